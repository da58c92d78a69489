"""Eq. 1 and 2: InfoNCE with the queue and a plan's points as negatives.

Axes: batch, K (negatives), S (synthetic points), dim. Every embedding has unit length. Points are
constants, like every negative in Eq. 2: their probability lands on the rows they were made from,
and one matmul with the negatives is the whole gradient. Everything is computed in float32 or
better, also inside autocast.
"""

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hardmix.errors import InputError
from hardmix.mixing.checks import (
    as_number,
    check_mask,
    check_not_transformed,
    check_own,
    check_plan,
    check_plan_rows,
    check_shapes,
    check_similarity,
    check_temperature,
    check_unit_length,
    wants_check,
)
from hardmix.mixing.closed_form import Points, evaluate_plan, gradient_sum
from hardmix.mixing.denominators import (
    Denominator,
    DualTemperature,
    Weighted,
    check_family,
    denominator_of,
    infonce,
    looks_once,
)
from hardmix.mixing.device_infonce import DeviceInfoNCE, Wanted
from hardmix.mixing.differentiable import (
    Remembered,
    differentiated_again,
    infonce_again,
    remember,
    wants_second_derivative,
)
from hardmix.mixing.log_sums import WeightLine
from hardmix.mixing.masses import Terms, masses_of
from hardmix.mixing.plans import MixPlan, Vectors
from hardmix.mixing.points import dots
from hardmix.mixing.ranking import CACHE_ELEMENTS, in_one_piece, row_chunks


class Contrast(NamedTuple):
    """The loss of a batch of queries, and the similarities behind it."""

    loss: Float[Tensor, ""]
    """Mean loss over the batch; differentiable."""
    per_query: Float[Tensor, " batch"]
    """Loss of each query (Eq. 1); differentiable."""
    positive: Float[Tensor, " batch"]
    """q.k, before division by the temperature; detached, like `real` and `synthetic`."""
    real: Float[Tensor, "batch K"]
    """q.n for every negative, including excluded ones; no columns with `overwrite`."""
    synthetic: Float[Tensor, "batch S"]
    """q.h for every point of the plan, before its `scale`; -inf where no point could be made."""


def contrast(
    query: Float[Tensor, "batch dim"],
    key: Float[Tensor, "batch dim"],
    negatives: Float[Tensor, "K dim"],
    plan: MixPlan | None = None,
    *,
    temperature: float | Float[Tensor, "..."],
    exclude: Bool[Tensor, "batch columns"] | None = None,
    similarity: Float[Tensor, "batch columns"] | None = None,
    through_query: bool = False,
    overwrite: bool = False,
    num_pairs: int | None = None,
    every_point: bool = False,
    check: bool | None = None,
    own: Float[Tensor, "batch M dim"] | None = None,
    log_weights: Float[Tensor, "batch columns"] | WeightLine | None = None,
    denominator: str | Denominator = "infonce",
    positives: Bool[Tensor, "batch columns"] | None = None,
) -> Contrast:
    """Return Eq. 1 with a plan's points as additional negatives (Sec. 4); plan=None is plain MoCo.

    temperature: tau of Eq. 1; a tensor of one number may be learnt: it gets its gradient.
    exclude: negatives to leave out of the loss.
    similarity: query @ negatives.T, if the caller has computed it already to make the plan.
    through_query: whether gradients flow through the query inside h'. The paper does not say; in
    Eq. 2 and in every known implementation they do not. Gradients reach query, key and negatives,
    but never flow through other parts of a synthetic point.
    overwrite: reuse the memory of the similarities. Faster, with half the memory, if only the loss
    is needed.
    num_pairs: the number of leading columns of the plan that mix two rows, if known; all other
    columns must mix one.
    every_point: promise that no point of the plan is missing.
    check: whether to refuse vectors that are not finite or not of unit length, and row indices
    out of range. None checks on a CPU only, as checking would synchronise a GPU. Unchecked, NaN
    makes the loss NaN.
    own: further negatives of each query's own; masks, weights and similarities then have K + M
    columns, and so has a plan.
    log_weights: log of each real negative's weight (see `negative_weights`), or a `WeightLine`; no
    gradient.
    denominator: a name in DENOMINATORS, or a function of `Masses`.
    positives: negatives that are positives too (SupCon), besides the key.
    """
    _check(query, key, negatives, plan, temperature, exclude, similarity, own)
    columns = len(negatives) + (0 if own is None else own.shape[1])
    chosen = denominator_of(denominator)
    check_family(chosen, log_weights, positives, len(query), columns)
    if wants_check(check, query):
        check_unit_length(query=query, key=key, negatives=negatives)
        if own is not None:
            check_unit_length(own=own.flatten(0, 1))
        if plan is not None:
            check_plan_rows(plan, columns)
    # float64 if any of the vectors has it, else float32.
    dtype = torch.promote_types(torch.promote_types(query.dtype, negatives.dtype), torch.float32)
    query, key, negatives = query.to(dtype), key.to(dtype), negatives.to(dtype)
    own = None if own is None else own.to(dtype)
    if plan is not None and plan.base.shape[1] == 0:
        plan = None
    if not torch.is_grad_enabled():
        query, key, negatives = query.detach(), key.detach(), negatives.detach()
    with torch.autocast(query.device.type, enabled=False):
        with torch.no_grad():
            real = dots(query, negatives, own) if similarity is None else similarity.to(dtype)
        vectors = Vectors(query, key, negatives, own)
        if (
            own is not None
            or log_weights is not None
            or positives is not None
            or chosen is not infonce
        ):
            beta = chosen.beta if isinstance(chosen, Weighted) else 0.0
            how = through_query, every_point, beta, overwrite and looks_once(chosen)
            terms = Terms(real, exclude, log_weights, plan, None, *how)
            also = chosen.also_at if isinstance(chosen, DualTemperature) else None
            given = vectors, temperature, terms, positives, num_pairs, also
            masses, positive, synthetic = masses_of(*given)
            per_query = chosen(masses)
        elif in_one_piece(query):
            learnt = isinstance(temperature, Tensor) and temperature.requires_grad
            wanted = Wanted(
                through_query,
                every_point,
                query.requires_grad or learnt,
                negatives.requires_grad,
                learnt,
            )
            per_query, positive, synthetic = DeviceInfoNCE.apply(
                query, key, negatives, real, exclude, temperature, wanted, *(plan or ())
            )
        else:
            with torch.no_grad():
                positive, points = (query * key).sum(dim=1), None
                if plan is not None:
                    known = through_query, num_pairs, every_point
                    points = evaluate_plan(plan, vectors, real, positive, *known)
            again = remember(vectors, plan, temperature, exclude, through_query=through_query)
            inputs = query, key, negatives, positive, real, points, temperature, exclude
            per_query = _InfoNCE.apply(*inputs, overwrite, again)
            synthetic = real.new_empty(len(real), 0) if points is None else points.similarity
    real = real[:, :0] if overwrite else real
    return Contrast(per_query.mean(), per_query, positive, real, synthetic)


class _InfoNCE(torch.autograd.Function):
    """Eq. 1 forward, Eq. 2 backward.

    The gradient is made in the forward pass, out of the same exponentials as the loss: half the
    work, and no (batch, K) tensor to keep.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        negatives: Tensor,
        positive: Tensor,
        real: Tensor,
        points: Points | None,
        temperature: float | Tensor,
        exclude: Tensor | None,
        overwrite: bool,
        remembered: Remembered | None,
    ) -> Tensor:
        needs_query, _, needs_negatives, *_, needs_temperature = ctx.needs_input_grad[:7]
        needs_query = needs_query or needs_temperature
        ctx.temperature, temperature = temperature, as_number(temperature)
        along = torch.zeros_like(positive) if needs_temperature else None
        per_query, to_key = torch.empty_like(positive), torch.empty_like(positive)
        direction = torch.empty_like(query) if needs_query else None
        probability = torch.empty_like(real) if needs_negatives else None
        for rows in [slice(0, len(real))] if overwrite else row_chunks(*real.shape):
            some = None if points is None else points.rows(rows)
            hidden = None if exclude is None else exclude[rows]
            space = real[rows] if overwrite else torch.empty_like(real[rows])
            terms, extra, ahead, total = _terms(
                positive[rows], real[rows], some, temperature, hidden, space
            )
            per_query[rows] = (total.log2() + ahead) * math.log(2)
            to_key[rows] = extra[:, 0] / total - 1
            if probability is not None:
                torch.div(terms, total.unsqueeze(1), out=probability[rows])
            if direction is not None:
                vectors = Vectors(query[rows], key[rows], negatives)
                pull = gradient_sum(terms, extra[:, 1:], some, vectors)
                torch.div(pull, total.unsqueeze(1), out=direction[rows])
                if along is not None and some is not None and some.unseen is not None:
                    along[rows] = (extra[:, 1:] * some.unseen).sum(dim=1) / total
            del terms, space  # before the next chunk's are made
        if direction is not None:
            direction.addcmul_(to_key.unsqueeze(1), key)
            if along is not None:
                # Points are constants, so the loss is a function of query / temperature.
                along += (query * direction).sum(dim=1)
        ctx.remembered = remembered
        ctx.save_for_backward(query, direction, to_key, probability, along)
        return per_query

    @staticmethod
    def backward(ctx: Any, grad_per_query: Tensor) -> tuple[Tensor | None, ...]:
        if wants_second_derivative(ctx):
            inputs = (*ctx.remembered.vectors[:3], None, None, None, ctx.temperature)
            needed = ctx.needs_input_grad[:7]
            again = infonce_again, ctx.remembered, inputs, needed, grad_per_query
            return *differentiated_again(*again), None, None, None
        query, direction, to_key, probability, along = ctx.saved_tensors
        needs_query, needs_key, needs_negatives = ctx.needs_input_grad[:3]
        # Backward may be called inside autocast too, and would multiply in half precision there.
        with torch.autocast(query.device.type, enabled=False):
            temperature = as_number(ctx.temperature)
            step = grad_per_query.unsqueeze(1) / temperature
            grad_query = step * direction if needs_query else None
            grad_key = step * to_key.unsqueeze(1) * query if needs_key else None
            grad_negatives = (step * probability).T @ query if needs_negatives else None
            grad_temperature = None
            if along is not None:
                total = -(grad_per_query * along).sum() / temperature**2
                grad_temperature = total.to(ctx.temperature).view_as(ctx.temperature)
        gradients = grad_query, grad_key, grad_negatives, None, None, None, grad_temperature
        return *gradients, None, None, None


def _terms(
    positive: Tensor,
    real: Tensor,
    points: Points | None,
    temperature: float,
    exclude: Tensor | None,
    space: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Eq. 1's denominator over its highest term: the negatives' terms; those of key and points.

    Also log2 of the highest term over the key's, and the sum of all. Powers of two: exp2 takes
    about half the time of exp. The highest logit is taken out first, so that no temperature
    overflows. The negatives' terms are written to `space`, which may be the similarities
    themselves, a few queries at a time: all passes over them then find them in the cache.
    """
    to_log2 = math.log2(math.e) / temperature
    extra = positive.unsqueeze(1) * to_log2
    if points is not None:
        synthetic = points.logit * to_log2
        if points.weight is not None:
            synthetic += points.weight.log2()
        extra = torch.cat([extra, synthetic], dim=1)
    highest, total = extra.amax(dim=1), torch.empty_like(positive)
    for rows in row_chunks(len(real), real.shape[1], elements=CACHE_ELEMENTS):
        some, terms, most = real[rows], space[rows], highest[rows]
        if exclude is not None:
            some = terms.copy_(some).masked_fill_(exclude[rows], -torch.inf)
        torch.maximum(some.amax(dim=1).mul_(to_log2), most, out=most)
        torch.add(-most.unsqueeze(1), some, alpha=to_log2, out=terms).exp2_()
        torch.sum(terms, dim=1, out=total[rows])
    ahead = highest - extra[:, 0]
    extra = extra.sub_(highest.unsqueeze(1)).exp2_()
    return space, extra, ahead, total.add_(extra.sum(dim=1))


def _check(
    query: Tensor,
    key: Tensor,
    negatives: Tensor,
    plan: MixPlan | None,
    temperature: float | Tensor,
    exclude: Tensor | None,
    similarity: Tensor | None,
    own: Tensor | None,
) -> None:
    check_not_transformed()
    check_temperature(temperature)
    check_own(own, query)
    check_shapes(query, key, negatives, may_be_empty=own is not None)
    columns = len(negatives) + (0 if own is None else own.shape[1])
    check_mask(exclude, len(query), columns)
    if plan is not None:
        check_plan(plan, len(query))
    if similarity is not None:
        check_similarity(similarity)
        expected = (len(query), columns)
        if tuple(similarity.shape) != expected:
            raise InputError(
                f"similarity has shape {tuple(similarity.shape)}: it must be"
                f" {expected}, the shape of query @ negatives.T."
            )
