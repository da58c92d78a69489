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
from hardmix.mixing.plans import MixPlan, Vectors
from hardmix.mixing.points import pulled
from hardmix.mixing.ranking import in_one_piece, joined, row_chunks, rows_of

LOWEST = -1e30
"""Stands for the highest logit of a query that has no negative."""


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


class LogMass(torch.autograd.Function):
    """log of the sum of weight * exp(q.n / tau) over negatives and points, and its gradient.

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
        parts = []
        for rows in row_chunks(len(real), width, one_piece):
            given = (query, key, own, real, exclude, log_weights, *plan)
            some = [None if each is None else rows_of(each, rows) for each in given]
            vectors = Vectors(some[0], some[1], negatives, some[2])  # type: ignore[arg-type]
            pointed = None if points is None else points.rows(rows)
            made = MixPlan(*some[6:]) if plan else None  # type: ignore[arg-type]
            similarity, masks = rows_of(real, rows), some[4:6]
            parts.append(_evaluate(vectors, similarity, masks, number, wanted, pointed, made))
        whole = _MassPart(*(joined(list(each)) for each in zip(*parts, strict=True)))
        ctx.temperature, ctx.num_shared = temperature, len(negatives)
        ctx.remembered = remember(
            Vectors(query, key, negatives, own),
            MixPlan(*plan) if plan else None,  # type: ignore[arg-type]
            temperature,
            exclude,
            log_weights,
            options.through_query,
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


def _evaluate(
    vectors: Vectors,
    real: Tensor,
    masks: list[Tensor | None],
    temperature: float | Tensor,
    wanted: Wanted,
    points: Points | None,
    plan: MixPlan | None,
) -> _MassPart:
    """Return all results for some of the queries."""
    exclude, log_weights = masks
    made = None
    if plan is not None and points is None:
        made = made_points(plan, vectors, wanted.every_point)
    extra, synthetic = _point_logits(real, points, made, plan, temperature)
    terms, highest = _terms(real, extra, exclude, log_weights, temperature)
    point_terms = (extra - highest).exp()
    total = terms.sum(dim=1, keepdim=True) + point_terms.sum(dim=1, keepdim=True)
    mass = (highest + total.log()).squeeze(1)
    total = total.clamp(min=torch.finfo(total.dtype).tiny)
    probability = terms / total if wanted.negatives_gradient else terms[:, :0]
    if not wanted.query_gradient:
        return _MassPart(mass, synthetic, terms[:, :0], probability, terms[:, :0])
    sums = terms, point_terms, total
    if made is None or plan is None:
        gradients = _in_closed_form(*sums, points, vectors)
    else:
        gradients = _of_made_points(*sums, made, plan, vectors, wanted)
    return _MassPart(mass, synthetic, gradients[0], probability, gradients[1])


def _terms(
    real: Tensor,
    extra: Tensor,
    exclude: Tensor | None,
    log_weights: Tensor | None,
    temperature: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the real negatives' terms over the highest of all terms, and the log of that one."""
    if isinstance(temperature, Tensor):
        logits, factor = real / temperature, 1.0
        logits = logits if log_weights is None else logits.add_(log_weights)
    elif log_weights is not None:
        logits, factor = torch.add(log_weights, real, alpha=1 / temperature), 1.0
    else:  # divided in the same pass that takes out the highest
        logits, factor = real, 1 / temperature
    if exclude is not None:
        logits = logits.masked_fill(exclude, -torch.inf)
    highest = logits.amax(dim=1, keepdim=True) * factor
    highest = torch.cat([highest, extra], dim=1).amax(dim=1, keepdim=True).clamp(min=LOWEST)
    return torch.add(-highest, logits, alpha=factor).exp_(), highest


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
    real: Tensor,
    points: Points | None,
    made: MadePoints | None,
    plan: MixPlan | None,
    temperature: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the points' logits with the logs of their weights, and their similarities."""
    if points is not None:
        logits, weight, similarity = points.logit, points.weight, points.similarity
    elif made is not None and plan is not None:
        logits, weight = scaled_logits(made.similarity, plan), plan.weight
        similarity = made.similarity
    else:
        return real[:, :0], real[:, :0]
    logits = logits / temperature
    return (logits if weight is None else logits + weight.log()), similarity
