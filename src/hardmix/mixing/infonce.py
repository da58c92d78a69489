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
    check_mask,
    check_not_transformed,
    check_once_differentiated,
    check_plan,
    check_plan_rows,
    check_shapes,
    check_similarity,
    check_temperature,
    check_unit_length,
    wants_check,
)
from hardmix.mixing.closed_form import Points, evaluate_plan
from hardmix.mixing.device_infonce import DeviceInfoNCE, Wanted
from hardmix.mixing.plans import KEY, MixPlan
from hardmix.mixing.ranking import in_one_piece, row_chunks


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
    temperature: float,
    exclude: Bool[Tensor, "batch K"] | None = None,
    similarity: Float[Tensor, "batch K"] | None = None,
    through_query: bool = False,
    overwrite: bool = False,
    num_pairs: int | None = None,
    every_point: bool = False,
    check: bool | None = None,
) -> Contrast:
    """Return Eq. 1 with a plan's points as additional negatives (Sec. 4); plan=None is plain MoCo.

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
    """
    _check(query, key, negatives, plan, temperature, exclude, similarity)
    if wants_check(check, query):
        check_unit_length(query=query, key=key, negatives=negatives)
        if plan is not None:
            check_plan_rows(plan, len(negatives))
    # float64 if any of the vectors has it, else float32.
    dtype = torch.promote_types(torch.promote_types(query.dtype, negatives.dtype), torch.float32)
    query, key, negatives = query.to(dtype), key.to(dtype), negatives.to(dtype)
    if plan is not None and plan.base.shape[1] == 0:
        plan = None
    if not torch.is_grad_enabled():
        query, key, negatives = query.detach(), key.detach(), negatives.detach()
    with torch.autocast(query.device.type, enabled=False):
        with torch.no_grad():
            real = query @ negatives.T if similarity is None else similarity.to(dtype)
        if in_one_piece(query):
            wanted = Wanted(
                temperature,
                through_query,
                every_point,
                query.requires_grad,
                negatives.requires_grad,
            )
            per_query, positive, synthetic = DeviceInfoNCE.apply(
                query, key, negatives, real, exclude, wanted, *(plan or ())
            )
        else:
            with torch.no_grad():
                positive, points = (query * key).sum(dim=1), None
                if plan is not None:
                    known = num_pairs, every_point
                    points = evaluate_plan(
                        plan, key, negatives, real, positive, through_query, *known
                    )
            per_query = _InfoNCE.apply(
                query, key, negatives, positive, real, points, temperature, exclude, overwrite
            )
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
        temperature: float,
        exclude: Tensor | None,
        overwrite: bool,
    ) -> Tensor:
        needs_query, _, needs_negatives = ctx.needs_input_grad[:3]
        per_query, to_key = torch.empty_like(positive), torch.empty_like(positive)
        direction = torch.empty_like(query) if needs_query else None
        probability = torch.empty_like(real) if needs_negatives else None
        for rows in [slice(0, len(real))] if overwrite else row_chunks(*real.shape):
            some = None if points is None else _rows_of(points, rows)
            hidden = None if exclude is None else exclude[rows]
            space = real[rows] if overwrite else torch.empty_like(real[rows])
            terms, extra, ahead = _terms(
                positive[rows], real[rows], some, temperature, hidden, space
            )
            total = terms.sum(dim=1).add_(extra.sum(dim=1))
            per_query[rows] = (total.log2() + ahead) * math.log(2)
            to_key[rows] = extra[:, 0] / total - 1
            if probability is not None:
                torch.div(terms, total.unsqueeze(1), out=probability[rows])
            if direction is not None:
                pull = _gradient_sum(terms, extra[:, 1:], some, query[rows], key[rows], negatives)
                torch.div(pull, total.unsqueeze(1), out=direction[rows])
            del terms, space  # before the next chunk's are made
        if direction is not None:
            direction.addcmul_(to_key.unsqueeze(1), key)
        ctx.temperature = temperature
        ctx.save_for_backward(query, direction, to_key, probability)
        return per_query

    @staticmethod
    def backward(ctx: Any, grad_per_query: Tensor) -> tuple[Tensor | None, ...]:
        check_once_differentiated()
        query, direction, to_key, probability = ctx.saved_tensors
        needs_query, needs_key, needs_negatives = ctx.needs_input_grad[:3]
        # Backward may be called inside autocast too, and would multiply in half precision there.
        with torch.autocast(query.device.type, enabled=False):
            step = grad_per_query.unsqueeze(1) / ctx.temperature
            grad_query = step * direction if needs_query else None
            grad_key = step * to_key.unsqueeze(1) * query if needs_key else None
            grad_negatives = (step * probability).T @ query if needs_negatives else None
        return grad_query, grad_key, grad_negatives, None, None, None, None, None, None


def _terms(
    positive: Tensor,
    real: Tensor,
    points: Points | None,
    temperature: float,
    exclude: Tensor | None,
    space: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Eq. 1's denominator over its highest term: the negatives' terms; those of key and points.

    Also log2 of the highest term over the key's. Powers of two: exp2 takes about half the time of
    exp. The highest logit is taken out first, so that no temperature overflows. The negatives'
    terms are written to `space`, which may be the similarities themselves.
    """
    to_log2 = math.log2(math.e) / temperature
    extra = positive.unsqueeze(1) * to_log2
    if points is not None:
        synthetic = points.logit * to_log2
        if points.weight is not None:
            synthetic += points.weight.log2()
        extra = torch.cat([extra, synthetic], dim=1)
    if exclude is not None:
        real = space.copy_(real).masked_fill_(exclude, -torch.inf)
    highest = torch.maximum(real.amax(dim=1) * to_log2, extra.amax(dim=1))
    terms = torch.add(-highest.unsqueeze(1), real, alpha=to_log2, out=space).exp2_()
    ahead = highest - extra[:, 0]
    return terms, extra.sub_(highest.unsqueeze(1)).exp2_(), ahead


def _gradient_sum(
    terms: Tensor,
    point_terms: Tensor,
    points: Points | None,
    query: Tensor,
    key: Tensor,
    negatives: Tensor,
) -> Tensor:
    """Eq. 2's sum over the negatives, after each point lent its term to its parents.

    Adds the loans to `terms`, which nobody needs after this.
    """
    if points is None:
        return terms @ negatives
    loan = point_terms * points.from_partner
    terms.scatter_add_(1, points.base, point_terms * points.from_base)
    terms.scatter_add_(1, points.partner[:, : points.num_pairs], loan[:, : points.num_pairs])
    pull = terms @ negatives
    partner, loan = points.partner[:, points.num_pairs :], loan[:, points.num_pairs :]
    if loan.shape[1] == 0:
        return pull
    to_key = loan.masked_fill(partner != KEY, 0.0).sum(dim=1, keepdim=True)
    to_query = loan.sum(dim=1, keepdim=True) - to_key
    return pull.addcmul_(to_query, query).addcmul_(to_key, key)


def _rows_of(points: Points, rows: slice) -> Points:
    sliced: dict[str, Any] = {
        name: part[rows] for name, part in points._asdict().items() if isinstance(part, Tensor)
    }
    return points._replace(**sliced)


def _check(
    query: Tensor,
    key: Tensor,
    negatives: Tensor,
    plan: MixPlan | None,
    temperature: float,
    exclude: Tensor | None,
    similarity: Tensor | None,
) -> None:
    check_not_transformed()
    check_temperature(temperature)
    check_shapes(query, key, negatives)
    check_mask(exclude, len(query), len(negatives))
    if plan is not None:
        check_plan(plan, len(query))
    if similarity is not None:
        check_similarity(similarity)
        expected = (len(query), len(negatives))
        if tuple(similarity.shape) != expected:
            raise InputError(
                f"similarity has shape {tuple(similarity.shape)}: it must be"
                f" {expected}, the shape of query @ negatives.T."
            )
