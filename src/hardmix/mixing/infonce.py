"""Eq. 1 and 2: InfoNCE with the queue and a plan's points as negatives.

    mass = log(sum over negatives exp(q.n / tau) + sum over points exp(q.h / tau))

    L = -log(exp(q.k / tau) / (exp(q.k / tau) + exp(mass))) = log(1 + exp(mass - q.k / tau))  Eq. 1
    dL/dq = -1 / tau ((1 - p_k) k - sum p_n n - sum p_h h)                                    Eq. 2

Points are constants, as all negatives are in Eq. 2: a point lends its probability p_h to the rows
it was made from, and one product with the negatives is the whole gradient. Axes: batch, columns
(negatives), S (synthetic points), dim. Everything is computed in float32 or better, also inside
autocast.
"""

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import softplus

from hardmix.errors import InputError
from hardmix.mixing.checks import (
    check_mask,
    check_not_transformed,
    check_own,
    check_plan,
    check_plan_rows,
    check_shapes,
    check_temperature,
    check_unit_length,
    wants_check,
)
from hardmix.mixing.logits import Embeddings, Logits, Points, dots, logits_of
from hardmix.mixing.plans import NO_POINT, MixPlan
from hardmix.mixing.ranking import CACHE_ELEMENTS, in_one_piece, joined, row_chunks

LOWEST = -1e30
"""Stands for -inf inside sums: a row of nothing but this has finite derivatives of any order."""
LOG2E = math.log2(math.e)
EXACT = 36.0
"""Above this, log(1 + exp(x)) is x in float64, too."""

Powers = tuple[tuple[float, float], ...]
"""Scales of the logits and exponents: the product of (sum w exp(scale * logit)) ** exponent."""
ONCE: Powers = ((1.0, 1.0),)
"""The sum of Eq. 1 itself."""


class WeightLine(NamedTuple):
    """Logs of weights that are a line of the logit: slope * q.n / tau + offset.

    They change the logit's own factor, so no (batch, columns) tensor is made of them.
    """

    slope: float | Float[Tensor, "..."]
    """The factor of a logit; below 0, similar negatives count less."""
    offset: Float[Tensor, "batch 1"] | None = None
    """One number for each query; None for 0."""

    def weights(self, logits: Float[Tensor, "batch columns"]) -> Float[Tensor, "batch columns"]:
        """Return the log of each negative's weight."""
        logs = logits.detach() * self.slope
        return logs if self.offset is None else logs + self.offset


LogWeights = Float[Tensor, "batch columns"] | WeightLine | None
"""The log of each real negative's weight, a line that it lies on, or None for weights of 1."""


class Contrast(NamedTuple):
    """The loss of a batch of queries, and what it was made of."""

    loss: Float[Tensor, ""]
    """Mean loss over the batch; differentiable."""
    per_query: Float[Tensor, " batch"]
    """Loss of each query (Eq. 1); differentiable."""
    positive: Float[Tensor, " batch"]
    """q.k, before division by the temperature; detached, like `real` and `synthetic`."""
    real: Float[Tensor, "batch columns"]
    """q.n for every negative, including excluded ones; no columns if it was not kept."""
    synthetic: Float[Tensor, "batch S"]
    """q.h for every point of the plan, before its `scale`; -inf where no point could be made."""
    temperature: float | Float[Tensor, "..."] = 1.0
    """tau."""
    exclude: Bool[Tensor, "batch columns"] | None = None
    """Negatives that took no part in the loss: those of the caller, of a filter, dropped ones."""
    log_weights: LogWeights = None
    """Weights of the real negatives."""
    plan: MixPlan | None = None
    """The points."""
    powers: Powers = ONCE
    """The sums in the mass of the negatives (see `log_mass`)."""


def contrast(
    query: Float[Tensor, "batch dim"],
    key: Float[Tensor, "batch dim"],
    negatives: Float[Tensor, "K dim"],
    plan: MixPlan | None = None,
    *,
    temperature: float | Float[Tensor, "..."],
    exclude: Bool[Tensor, "batch columns"] | None = None,
    own: Float[Tensor, "batch M dim"] | None = None,
    through_query: bool = False,
) -> Contrast:
    """Return Eq. 1 with a plan's points as additional negatives (Sec. 4); plan=None is plain MoCo.

    Args:
        query: q, of unit length.
        key: k, of unit length.
        negatives: n, of unit length, shared by all queries.
        plan: the points to add, as from `plan_mochi`.
        temperature: tau of Eq. 1; a tensor of one number may be learnt: it gets its gradient.
        exclude: negatives to leave out of the loss.
        own: further negatives of each query's own; masks and plans then have K + M columns.
        through_query: whether gradients flow through the query inside h'. The paper does not say;
            in Eq. 2 and in every known implementation they do not.

    Returns:
        The loss, and the similarities behind it. Gradients reach query, key, negatives and
        temperature, but never flow through other parts of a synthetic point. On a CPU vectors that
        are not finite or not of unit length are refused; on a GPU, which checking would
        synchronise, NaN makes the loss NaN.
    """
    embeddings = _checked(query, key, negatives, own, plan, temperature, exclude)
    with torch.autocast(query.device.type, enabled=False):
        logits = logits_of(embeddings, plan, temperature=temperature, through_query=through_query)
        per_query = infonce(logits.positive, log_mass(logits, exclude))
        return outcome_of(per_query, logits, exclude)


def infonce(
    positive: Float[Tensor, " batch"], mass: Float[Tensor, " batch"]
) -> Float[Tensor, " batch"]:
    """Eq. 1: -log(exp(positive) / (exp(positive) + exp(mass))) = log(1 + exp(mass - positive))."""
    return softplus(mass - positive, threshold=EXACT)


def log_mass(
    logits: Logits,
    exclude: Bool[Tensor, "batch columns"] | None = None,
    log_weights: LogWeights = None,
    *,
    powers: Powers = ONCE,
    overwrite: bool = False,
) -> Float[Tensor, " batch"]:
    """Return the log of Eq. 1's sum over negatives and points; -inf for a query without any.

    Args:
        logits: logits of the batch.
        exclude: negatives to leave out.
        log_weights: the log of each real negative's weight; constants.
        powers: other sums: for each (scale, exponent), exponent times the log of the sum of
            weight * exp(scale * logit), added up. HCL's sum is ((1 + beta, 1), (beta, -1)).
        overwrite: reuse the memory of the logits. Faster, if nothing reads them afterwards.
    """
    if in_one_piece(logits.real):
        return _plain_log_mass(logits.real, logits.synthetic, exclude, log_weights, powers, logits)
    points, embeddings = logits.points, logits.embeddings
    coefficients: tuple[Tensor | None, ...] = (None,) * 4
    if points is not None:
        coefficients = points.other, points.to_base, points.to_row, points.to_other
    sums = _MassInputs(
        logits, logits.real.detach(), logits.synthetic.detach(), exclude, log_weights, powers
    )
    if not torch.is_grad_enabled():
        return _shares(sums, slice(0, len(sums.real)), None).mass
    mass: Tensor = _LogMass.apply(
        logits.scaled, embeddings.negatives, embeddings.own, *coefficients, sums, overwrite
    )
    return mass


def outcome_of(
    per_query: Float[Tensor, " batch"],
    logits: Logits,
    exclude: Bool[Tensor, "batch columns"] | None = None,
    log_weights: LogWeights = None,
    powers: Powers = ONCE,
) -> Contrast:
    """Return the loss with the similarities behind it, which take the memory of the logits."""
    real, temperature = logits.real.detach(), logits.temperature
    if isinstance(temperature, Tensor):
        temperature = temperature.detach()
    real = real * temperature if in_one_piece(real) else real.mul_(temperature)
    synthetic = real[:, :0] if logits.unscaled is None else logits.unscaled * temperature
    return Contrast(
        per_query.mean(),
        per_query,
        logits.positive.detach() * temperature,
        real,
        synthetic,
        temperature,
        exclude,
        log_weights,
        logits.plan,
        powers,
    )


class _MassInputs(NamedTuple):
    """The inputs of a sum over negatives and points that are constants."""

    logits: Logits
    real: Tensor
    synthetic: Tensor
    exclude: Tensor | None
    log_weights: LogWeights
    powers: Powers

    def without_real(self) -> "_MassInputs":
        """Return the same without the logits of negatives, whose memory is to be freed."""
        nothing = self.real.new_empty(len(self.real), 0)
        synthetic = self.synthetic if self.synthetic.shape[1] else nothing
        logits = self.logits._replace(real=nothing, synthetic=synthetic)
        return self._replace(logits=logits, real=nothing, synthetic=synthetic)

    @property
    def slope(self) -> float | Tensor:
        return self.log_weights.slope if isinstance(self.log_weights, WeightLine) else 0.0

    @property
    def offset(self) -> Tensor | None:
        return self.log_weights.offset if isinstance(self.log_weights, WeightLine) else None

    @property
    def dense(self) -> Tensor | None:
        return None if isinstance(self.log_weights, WeightLine) else self.log_weights


class _LogMass(torch.autograd.Function):
    """`log_mass` on a CPU: its value, and Eq. 2 from the same exponentials.

    The gradient by the query is made in the forward pass: half the work, no (batch, columns) tensor
    is kept, and the queue may be written before the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        scaled: Tensor,
        negatives: Tensor,
        own: Tensor | None,
        other: Tensor | None,
        to_base: Tensor | None,
        to_row: Tensor | None,
        to_other: Tensor | None,
        sums: _MassInputs,
        overwrite: bool,
    ) -> Tensor:
        real, points = sums.real, sums.logits.points
        by_query, by_negatives = ctx.needs_input_grad[0], any(ctx.needs_input_grad[1:3])
        parents = None
        if points is not None and any(ctx.needs_input_grad[4:7]):
            parents = real.gather(1, points.base), real.gather(1, points.row)
        parts: list[tuple[Tensor, ...]] = []
        for rows in [slice(0, len(real))] if overwrite else row_chunks(*real.shape):
            space = real[rows] if overwrite else torch.empty_like(real[rows])
            part = _shares(sums, rows, space)
            shares = space * part.factor if by_negatives else part.mass
            direction = part.mass
            if by_query:
                _lend(space, part.of_points, points, rows)
                own_rows = None if own is None else own[rows]
                direction = pulled(space, negatives, own_rows).mul_(part.factor)
            parts.append((part.mass, direction, shares, part.of_points * part.factor))
            del space  # before the next part's is made
        mass, direction, shares, point_shares = (
            joined(list(column)) for column in zip(*parts, strict=True)
        )
        ctx.inputs = (scaled, negatives, own, other, to_base, to_row, to_other)
        ctx.sums, ctx.parents = sums.without_real(), parents
        ctx.version = None if negatives.is_inference() else negatives._version
        ctx.save_for_backward(direction, shares, point_shares)
        return mass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[:7]
        if torch.is_grad_enabled():
            return *_differentiated_again(ctx, gradient, needed), None, None
        direction, shares, point_shares = ctx.saved_tensors
        scaled, negatives, *_, to_other = ctx.inputs
        step = gradient.unsqueeze(1)
        gradients: list[Tensor | None] = [None] * 7
        # Backward may be called inside autocast too, and would multiply in half precision there.
        with torch.autocast(scaled.device.type, enabled=False):
            gradients[0] = step * direction if needed[0] else None
            if needed[1] or needed[2]:
                shared, of_query = (step * shares).split(
                    [len(negatives), shares.shape[1] - len(negatives)], dim=1
                )
                gradients[1] = shared.T @ scaled if needed[1] else None
                gradients[2] = of_query.unsqueeze(2) * scaled.unsqueeze(1) if needed[2] else None
            if any(needed[3:]):
                gradients[3:] = _coefficient_gradients(ctx, step * point_shares, needed, to_other)
        return *gradients, None, None


class _Shares(NamedTuple):
    """The mass of some queries, and d mass / d logit of their negatives and points."""

    mass: Tensor
    of_points: Tensor
    factor: Tensor
    """(batch, 1): what the shares of points and of negatives must be multiplied by."""


def _shares(sums: _MassInputs, rows: slice, space: Tensor | None) -> _Shares:
    """Return the mass and the shares of some queries.

    The shares of the real negatives are written to `space`, which may be the logits themselves, a
    few queries at a time, so that all passes over them find them in the cache. With None they are
    not kept.
    """
    real, synthetic = sums.real[rows], sums.synthetic[rows]
    weights, once = sums.logits.log_point_weights, len(sums.powers) == 1
    chunks = row_chunks(len(real), real.shape[1], elements=CACHE_ELEMENTS)
    scratch = real if once and space is not None else torch.empty_like(real[chunks[0]])
    parts: list[tuple[Tensor, ...]] = []
    for part in chunks:
        queries = slice(rows.start + part.start, rows.start + part.stop)
        values, sums_of_part = real[part], []
        share_of_all: Tensor | None = None
        for scale, exponent in sums.powers:
            extra = synthetic[part] if scale == 1 else synthetic[part] * scale
            extra = extra if weights is None else extra + weights[queries]
            extra = extra if sums.offset is None else extra - sums.offset[queries]
            terms = space[part] if once and space is not None else scratch[: len(values)]
            highest = _exponentials(values, scale, sums, queries, extra, terms)
            point_terms, total = (extra - highest).exp_(), terms.sum(dim=1, keepdim=True)
            total += point_terms.sum(dim=1, keepdim=True)
            mass = (highest + total.log()).mul_(exponent)
            share = exponent * scale / total.clamp_(min=torch.finfo(total.dtype).tiny)
            if not once and space is not None:
                point_terms *= share
                if share_of_all is None:
                    share_of_all = terms * share
                else:
                    share_of_all.addcmul_(terms, share)
            sums_of_part.append((mass, point_terms, share))
        if share_of_all is not None and space is not None:
            space[part] = share_of_all
        parts.append(sums_of_part[0] if once else _added_up(sums_of_part))
    mass, of_points, factor = (joined(list(column)) for column in zip(*parts, strict=True))
    if sums.offset is not None:
        mass = mass + sums.offset[rows] * sum(exponent for _, exponent in sums.powers)
    return _Shares(mass.squeeze(1), of_points, factor)


def _added_up(parts: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, ...]:
    """Return the masses and shares of several powers together; the shares have their factors."""
    masses, of_points, shares = zip(*parts, strict=True)
    return sum(masses), sum(of_points), torch.ones_like(shares[0])


def _exponentials(
    values: Tensor, scale: float, sums: _MassInputs, rows: slice, extra: Tensor, terms: Tensor
) -> Tensor:
    """Write exp(logit + log weight - highest) of some queries; return their highest logits.

    In powers of two: exp2 takes about half the time of exp.
    """
    factor = scale + float(sums.slope)
    if sums.dense is not None:
        values, factor = torch.add(sums.dense[rows], values, alpha=factor, out=terms), 1.0
    if sums.exclude is not None:
        # Multiplied first: a factor of 0 would make NaN of -inf.
        values = terms.copy_(values) if factor == 1 else torch.mul(values, factor, out=terms)
        values, factor = values.masked_fill_(sums.exclude[rows], -torch.inf), 1.0
    edge = values.amax(dim=1, keepdim=True) if factor >= 0 else values.amin(dim=1, keepdim=True)
    highest = edge * factor
    if extra.shape[1]:
        highest = torch.maximum(highest, extra.amax(dim=1, keepdim=True))
    highest = highest.clamp_(min=LOWEST)
    torch.add(highest * -LOG2E, values, alpha=factor * LOG2E, out=terms).exp2_()
    return highest


def _lend(shares: Tensor, point_shares: Tensor, points: Points | None, rows: slice) -> None:
    """Eq. 2: a point's share of the gradient is lent to the negatives that it was made from."""
    if points is None:
        return
    shares.scatter_add_(1, points.base[rows], point_shares * points.to_base[rows])
    to_row = points.to_row[rows]
    shares.scatter_add_(1, points.row[rows], point_shares[:, : to_row.shape[1]] * to_row)


def pulled(shares: Tensor, negatives: Tensor, own: Tensor | None) -> Tensor:
    """Return the sum of the negatives, each times its share of the gradient."""
    if own is None:
        return shares @ negatives
    shared, of_query = shares.split([len(negatives), own.shape[1]], dim=1)
    return torch.baddbmm((shared @ negatives).unsqueeze(1), of_query.unsqueeze(1), own).squeeze(1)


def _coefficient_gradients(
    ctx: Any, point_steps: Tensor, needed: tuple[bool, ...], to_other: Tensor
) -> list[Tensor | None]:
    """Return the gradients by a point's other parent and, with through_query, its coefficients."""
    points = ctx.sums.logits.points
    first_other, other = points.first_other, ctx.inputs[3]
    by_other = point_steps[:, first_other:] * to_other
    if ctx.parents is None:
        return [by_other, None, None, None]
    of_base, of_row = ctx.parents
    return [
        by_other,
        point_steps * of_base if needed[4] else None,
        point_steps[:, : of_row.shape[1]] * of_row if needed[5] else None,
        point_steps[:, first_other:] * other if needed[6] else None,
    ]


def _differentiated_again(
    ctx: Any, gradient: Tensor, needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Return the gradients with a graph of their own, by plain PyTorch (create_graph=True)."""
    negatives = ctx.inputs[1]
    if ctx.version is not None and negatives._version != ctx.version:
        raise InputError(
            "create_graph=True after the negatives were overwritten: differentiate the loss before"
            " memory.enqueue(...), or pass a copy, memory.keys.clone()."
        )
    sums: _MassInputs = ctx.sums
    with torch.enable_grad(), torch.autocast(negatives.device.type, enabled=False):
        # New nodes of the graph: inputs may depend on each other outside of this function.
        inputs: list[Any] = [None if old is None else old.view_as(old) for old in ctx.inputs]
        scaled, negatives, own, other, to_base, to_row, to_other = inputs
        real, synthetic = dots(scaled, negatives, own), sums.synthetic
        points = sums.logits.points
        if points is not None:
            constants = negatives.detach(), None if own is None else own.detach()
            points = points._replace(other=other, to_base=to_base, to_row=to_row, to_other=to_other)
            missing = sums.logits.plan.base == NO_POINT  # type: ignore[union-attr]
            synthetic = points.logits(dots(scaled, *constants)).masked_fill(missing, -torch.inf)
        mass = _plain_log_mass(
            real, synthetic, sums.exclude, sums.log_weights, sums.powers, sums.logits
        )
        leaves = [leaf for leaf, need in zip(inputs, needed, strict=True) if need]
        gradients = iter(torch.autograd.grad(mass, leaves, gradient, create_graph=True))
    return tuple(next(gradients) if need else None for need in needed)


def _plain_log_mass(
    real: Tensor,
    synthetic: Tensor,
    exclude: Tensor | None,
    log_weights: LogWeights,
    powers: Powers,
    logits: Logits,
) -> Tensor:
    """`log_mass` by plain PyTorch: for devices, `torch.compile` and second derivatives."""
    added = log_weights.weights(real) if isinstance(log_weights, WeightLine) else log_weights
    of_points, total = logits.log_point_weights, None
    for scale, exponent in powers:
        values = real if scale == 1 else real * scale
        extra = synthetic if scale == 1 else synthetic * scale
        values = values if added is None else values + added
        extra = extra if of_points is None else extra + of_points
        if exclude is not None:
            values = values.masked_fill(exclude, LOWEST)
        if extra.shape[1]:
            values = torch.cat([values, extra], dim=1)
        mass = values.logsumexp(dim=1)
        if exclude is not None:
            mass = mass.masked_fill(mass < LOWEST / 2, -torch.inf)
        mass = mass if exponent == 1 else mass * exponent
        total = mass if total is None else total + mass
    assert total is not None
    return total


def _checked(
    query: Tensor,
    key: Tensor,
    negatives: Tensor,
    own: Tensor | None,
    plan: MixPlan | None,
    temperature: float | Tensor,
    exclude: Tensor | None,
) -> Embeddings:
    """Return the vectors in one dtype, float32 or better; refuse what cannot be contrasted."""
    check_not_transformed()
    check_temperature(temperature)
    check_own(own, query)
    check_shapes(query, key, negatives, may_be_empty=own is not None)
    columns = len(negatives) + (0 if own is None else own.shape[1])
    check_mask(exclude, len(query), columns)
    if plan is not None:
        check_plan(plan, len(query), query.shape[1])
    if wants_check(None, query):
        check_unit_length(query=query, key=key, negatives=negatives)
        if own is not None:
            check_unit_length(own=own.flatten(0, 1))
        if plan is not None:
            check_plan_rows(plan, columns)
    dtype = torch.promote_types(torch.promote_types(query.dtype, negatives.dtype), torch.float32)
    return Embeddings(
        query.to(dtype), key.to(dtype), negatives.to(dtype), None if own is None else own.to(dtype)
    )
