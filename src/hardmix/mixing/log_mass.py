"""log of the sum over all negatives in Eq. 1, and its gradient in closed form.

With weights, own negatives and points; in closed form on a CPU, with points as vectors elsewhere.
Axes: batch, columns (K shared negatives, then M of the query's own), S (points), dim.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hardmix.mixing.checks import as_number
from hardmix.mixing.closed_form import Points, gradient_sum
from hardmix.mixing.device_infonce import (
    MadePoints,
    Wanted,
    direction_with_points,
    made_points,
    points_along,
    scaled_logits,
)
from hardmix.mixing.differentiable import (
    differentiated_again,
    log_mass_again,
    remember,
    wants_second_derivative,
)
from hardmix.mixing.log_sums import exponentials
from hardmix.mixing.plans import MixPlan, Vectors
from hardmix.mixing.points import pulled
from hardmix.mixing.ranking import CACHE_ELEMENTS, in_one_piece, joined, row_chunks, rows_of


class _MassPart(NamedTuple):
    """Results for some of the queries."""

    mass: Tensor
    synthetic: Tensor
    direction: Tensor
    """d mass / d query, times the temperature."""
    probability: Tensor
    """d mass / d logit of every real negative."""
    along: Tensor
    """d mass / d (1 / temperature)."""


class Weighing(NamedTuple):
    """Which real negatives count, and how much; constants."""

    exclude: Tensor | None
    log_weights: Tensor | None
    """(batch, columns), or (batch, 1) for an offset of each query."""
    slope: float | Tensor = 0.0
    """What q.n is multiplied by and added to the log of the weight, see `WeightLine`."""
    beta: float = 0.0
    """HCL: weigh each term by exp(beta * logit) over its mean, with gradients. 0: none."""
    overwrite: bool = False
    """Whether the similarities are not needed afterwards: their memory is reused."""

    @property
    def weighs(self) -> bool:
        """Whether any weight is not 1."""
        return self.log_weights is not None or isinstance(self.slope, Tensor) or self.slope != 0

    def rows(self, rows: slice) -> "Weighing":
        """Return those of some queries."""
        masks = self.exclude, self.log_weights
        exclude, log_weights = (None if each is None else rows_of(each, rows) for each in masks)
        return self._replace(exclude=exclude, log_weights=log_weights)


class LogMass(torch.autograd.Function):
    """log of the sum of weight * exp(q.n / tau) over negatives and points, and its gradient.

    With `beta`, log of the sum of weight * exp((1 + beta) q.n / tau) over that of
    weight * exp(beta q.n / tau).

    Points are constants, so the sum is a function of query / tau: its derivative by 1 / tau is
    q . direction, and takes no further pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        negatives: Tensor,
        own: Tensor | None,
        temperature: float | Tensor,
        key: Tensor,
        real: Tensor,
        exclude: Tensor | None,
        log_weights: Tensor | None,
        slope: float | Tensor,
        beta: float,
        overwrite: bool,
        options: Wanted,
        points: Points | None,
        *plan: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the mass of each query, and q.h of every point."""
        needs_query, needs_shared, needs_own, needs_temperature = ctx.needs_input_grad[:4]
        one_piece = in_one_piece(real)
        width = real.shape[1]
        if plan and points is None:
            width = max(width, plan[0].shape[1] * query.shape[1])  # type: ignore[union-attr]
        number = temperature if one_piece else as_number(temperature)
        wanted = options._replace(
            query_gradient=needs_query or needs_temperature,
            negatives_gradient=needs_shared or needs_own,
        )
        weighing = Weighing(exclude, log_weights, slope, beta, overwrite)
        parts = []
        for rows in row_chunks(len(real), width, one_piece):
            given = (query, key, own, *plan)
            some = [None if each is None else rows_of(each, rows) for each in given]
            vectors = Vectors(some[0], some[1], negatives, some[2])  # type: ignore[arg-type]
            pointed = None if points is None else points.rows(rows)
            made = MixPlan(*some[3:]) if plan else None  # type: ignore[arg-type]
            similarity, weighed = rows_of(real, rows), weighing.rows(rows)
            parts.append(_evaluate(vectors, similarity, weighed, number, wanted, pointed, made))
        whole = _MassPart(*(joined(list(each)) for each in zip(*parts, strict=True)))
        ctx.temperature, ctx.num_shared = temperature, len(negatives)
        ctx.remembered = remember(
            Vectors(query, key, negatives, own),
            MixPlan(*plan) if plan else None,  # type: ignore[arg-type]
            temperature,
            exclude,
            log_weights,
            options.through_query,
            slope,
            beta,
        )
        ctx.save_for_backward(query, whole.direction, whole.probability, whole.along)
        ctx.mark_non_differentiable(whole.synthetic)
        return whole.mass, whole.synthetic

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """Scale what the forward pass has computed."""
        rest = (None,) * (len(ctx.needs_input_grad) - 4)
        needed = ctx.needs_input_grad[:4]
        if wants_second_derivative(ctx):
            again, tau = ctx.remembered.vectors, ctx.temperature
            inputs = again.query, again.negatives, again.own, tau
            given = log_mass_again, ctx.remembered, inputs, needed, gradient
            return *differentiated_again(*given), *rest
        query, direction, probability, along = ctx.saved_tensors
        with torch.autocast(query.device.type, enabled=False):
            step = gradient.unsqueeze(1) / ctx.temperature
            grad_query = step * direction if needed[0] else None
            grad_negatives = grad_own = grad_temperature = None
            if needed[1] or needed[2]:
                shared = ctx.num_shared
                pull = step * probability
                grad_negatives = pull[:, :shared].T @ query if needed[1] else None
                if needed[2]:
                    grad_own = pull[:, shared:].unsqueeze(2) * query.unsqueeze(1)
            if needed[3]:
                total = -(gradient * along).sum() / ctx.temperature.square()
                grad_temperature = total.to(ctx.temperature).view_as(ctx.temperature)
        return grad_query, grad_negatives, grad_own, grad_temperature, *rest


class _MassSums(NamedTuple):
    """The terms of a sum over negatives and points, each over the highest of all."""

    terms: Tensor
    point_terms: Tensor
    total: Tensor
    mass: Tensor
    """log of the sum."""


def _evaluate(
    vectors: Vectors,
    real: Tensor,
    weighing: Weighing,
    temperature: float | Tensor,
    wanted: Wanted,
    points: Points | None,
    plan: MixPlan | None,
) -> _MassPart:
    """Return all results for some of the queries."""
    made = None
    if plan is not None and points is None:
        made = made_points(plan, vectors, wanted.every_point)
    of_points, log_weight, synthetic = _point_logits(real, points, made, plan)
    beta = weighing.beta
    if beta == 0:
        sums = _sums(real, of_points, log_weight, weighing, temperature)
    elif beta == 1 and log_weight is None and not weighing.weighs:
        sums = _ratio_to_square(_sums(real, of_points, None, weighing, temperature))
    else:
        first = weighing._replace(overwrite=False)
        upper = _sums(real, of_points, log_weight, first, temperature / (1 + beta))
        lower = _sums(real, of_points, log_weight, weighing, temperature / beta)
        sums = _ratio(upper, lower, beta)
    terms, point_terms, total, mass = sums
    probability = terms / total if wanted.negatives_gradient else terms[:, :0]
    if not wanted.query_gradient:
        return _MassPart(mass, synthetic, terms[:, :0], probability, terms[:, :0])
    if made is None or plan is None:
        gradients = _in_closed_form(terms, point_terms, total, points, vectors)
    else:
        gradients = _of_made_points(terms, point_terms, total, made, plan, vectors, wanted)
    return _MassPart(mass, synthetic, gradients[0], probability, gradients[1])


def _sums(
    real: Tensor,
    of_points: Tensor,
    log_weight: Tensor | None,
    weighing: Weighing,
    temperature: float | Tensor,
) -> _MassSums:
    """Return Eq. 1's sum over the negatives, with their weights, at a temperature."""
    exclude, log_weights, slope, _, overwrite = weighing
    extra = of_points / temperature
    extra = extra if log_weight is None else extra + log_weight
    offset: Tensor | float = 0.0
    if log_weights is not None and log_weights.shape[1] == 1:  # of all alike: taken from the points
        extra, offset, log_weights = extra - log_weights, log_weights, None
    above = extra.amax(dim=1, keepdim=True) if extra.shape[1] else None
    factor = 1 / temperature + slope
    given = exclude, log_weights, above
    terms, total, highest = exponentials(real, factor, *given, overwrite=overwrite)
    point_terms = (extra - highest).exp()
    total = total + point_terms.sum(dim=1, keepdim=True)
    mass = (highest + offset + total.log()).squeeze(1)
    return _MassSums(terms, point_terms, total.clamp(min=torch.finfo(total.dtype).tiny), mass)


def _ratio(upper: _MassSums, lower: _MassSums, beta: float) -> _MassSums:
    """HCL's ratio of two sums, whose gradient is one sum: with terms above and below 0."""
    total = upper.total / (1 + beta)
    share = -beta * total / lower.total
    terms = upper.terms.addcmul_(lower.terms, share)
    point_terms = upper.point_terms + lower.point_terms * share
    return _MassSums(terms, point_terms, total, upper.mass - lower.mass)


def _ratio_to_square(sums: _MassSums) -> _MassSums:
    """`_ratio` at beta = 1 without weights: exp(2x) is the square of exp(x), which is there."""
    terms, point_terms, sum_below, mass = sums
    above = torch.linalg.vector_norm(terms, dim=1, keepdim=True).square()
    above = above + point_terms.square().sum(dim=1, keepdim=True)
    total = above.clamp(min=torch.finfo(above.dtype).tiny) / 2
    share = -total / sum_below
    chunks = row_chunks(len(terms), terms.shape[1], in_one_piece(terms), CACHE_ELEMENTS)
    parts = [rows_of(terms, rows) for rows in chunks]
    for some, of_some in zip(parts, share.split([len(each) for each in parts]), strict=True):
        some.mul_(some + of_some)
    mass = mass + (above.log() - 2 * sum_below.log()).squeeze(1)
    return _MassSums(terms, point_terms * (point_terms + share), total, mass)


def _in_closed_form(
    terms: Tensor, point_terms: Tensor, total: Tensor, points: Points | None, vectors: Vectors
) -> tuple[Tensor, Tensor]:
    """Return `direction` and `along` of a `_MassPart`."""
    direction = gradient_sum(terms, point_terms, points, vectors).div_(total)
    along = (direction * vectors.query).sum(dim=1)
    if points is not None and points.unseen is not None:
        along = along + (point_terms * points.unseen).sum(dim=1) / total.squeeze(1)
    return direction, along


def _of_made_points(
    terms: Tensor,
    point_terms: Tensor,
    total: Tensor,
    made: MadePoints,
    plan: MixPlan,
    vectors: Vectors,
    wanted: Wanted,
) -> tuple[Tensor, Tensor]:
    """Return the same where points are vectors."""
    direction, point_terms = (
        pulled(terms, vectors.negatives, vectors.own) / total,
        point_terms / total,
    )
    along = (direction * vectors.query).sum(dim=1) + points_along(made, plan, point_terms)
    query = vectors.query
    return direction_with_points(direction, made, plan, point_terms, query, wanted), along


def _point_logits(
    real: Tensor, points: Points | None, made: MadePoints | None, plan: MixPlan | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the points' logits before the temperature, logs of weights, and similarities."""
    if points is not None:
        logits, weight, similarity = points.logit, points.weight, points.similarity
    elif made is not None and plan is not None:
        logits, weight = scaled_logits(made.similarity, plan), plan.weight
        similarity = made.similarity
    else:
        return real[:, :0], None, real[:, :0]
    return logits, None if weight is None else weight.log(), similarity
