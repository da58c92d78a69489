"""The family around Eq. 1: what all negatives of a query weigh together, in closed form.

A loss of the family is a function of two numbers per query: the logit of its positive, and the log
of the sum over its negatives and points, each with a weight (`LogMass`). What that function is, is
a matter of a line (`denominators`). Axes: batch, columns (K shared negatives, then M of the query's
own), S (points), dim. As in Eq. 2, points and weights are constants.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hardmix.mixing.checks import as_number
from hardmix.mixing.closed_form import Points, evaluate_plan, gradient_sum
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
from hardmix.mixing.plans import NO_POINT, MixPlan, Vectors
from hardmix.mixing.points import pulled
from hardmix.mixing.ranking import in_one_piece, joined, row_chunks, rows_of

LOWEST = -1e30
"""Stands for the highest logit of a query that has no negative."""


class Masses(NamedTuple):
    """What a denominator is made of: numbers of each query, as logs."""

    key: Float[Tensor, " batch"]
    """q.k / tau."""
    positive: Float[Tensor, " batch"]
    """The same, or the mean over several positives."""
    negatives: Float[Tensor, " batch"]
    """log of the sum of weight * exp(q.n / tau) over all negatives and points; -inf without any."""
    number: Float[Tensor, " batch"]
    """How many negatives and points these are."""
    temperature: float | Tensor
    at: Callable[[float], Tensor]
    """`negatives` at another temperature: at(10) at ten times tau."""
    inside: Callable[[], Tensor]
    """log of the mean of exp(q.p / tau) over several positives."""


class Terms(NamedTuple):
    """What stands in the sum besides the vectors; all constants."""

    real: Float[Tensor, "batch columns"]
    exclude: Bool[Tensor, "batch columns"] | None = None
    log_weights: Float[Tensor, "batch columns"] | None = None
    plan: MixPlan | None = None
    points: Points | None = None
    """The plan's, where they are evaluated in closed form."""
    through_query: bool = False
    every_point: bool = False


def masses_of(
    vectors: Vectors,
    temperature: float | Tensor,
    terms: Terms,
    positives: Bool[Tensor, "batch columns"] | None = None,
    num_pairs: int | None = None,
) -> tuple[Masses, Tensor, Tensor]:
    """Return a batch's masses, q.k, and q.h of every point (the last two detached).

    `num_pairs`: the number of the plan's leading columns that mix two rows, if known.
    """
    dot = (vectors.query * vectors.key).sum(dim=1)
    if terms.plan is not None and not in_one_piece(terms.real):
        with torch.no_grad():
            known = terms.through_query, num_pairs, terms.every_point
            points = evaluate_plan(terms.plan, vectors, terms.real, dot, *known)
            terms = terms._replace(points=points)
    positive = key = dot / temperature
    negatives, synthetic = log_mass(vectors, temperature, terms)
    if positives is not None:
        if terms.exclude is not None:
            positives = positives & ~terms.exclude
        several = 1 + positives.sum(dim=1)
        members = pulled(positives.to(dot.dtype), vectors.negatives, vectors.own) + vectors.key
        positive = (vectors.query * members).sum(dim=1) / (several * temperature)
    masses = Masses(
        key,
        positive,
        negatives,
        _count(terms).to(dot.dtype),
        temperature,
        lambda factor: log_mass(vectors, temperature * factor, terms)[0],
        partial(_inside, vectors, temperature, terms, positives, key),
    )
    return masses, dot.detach(), synthetic


def log_mass(
    vectors: Vectors, temperature: float | Tensor, terms: Terms
) -> tuple[Float[Tensor, " batch"], Float[Tensor, "batch S"]]:
    """Return log of the negatives' sum in Eq. 1, and q.h of every point."""
    real, exclude, log_weights, plan, points, through_query, every_point = terms
    options = Wanted(through_query, every_point, True, True, True)
    mass, synthetic = LogMass.apply(
        vectors.query,
        vectors.negatives,
        vectors.own,
        temperature,
        vectors.key.detach(),
        real,
        exclude,
        log_weights,
        options,
        points,
        *(plan or ()),
    )
    return mass, synthetic


def _count(terms: Terms) -> Tensor:
    """How many negatives and points each query has."""
    batch, columns = terms.real.shape
    count = torch.full((batch,), columns, device=terms.real.device)
    if terms.exclude is not None:
        count = count - terms.exclude.sum(dim=1)
    if terms.plan is not None:
        count = count + (terms.plan.base != NO_POINT).sum(dim=1)
    return count


def _inside(
    vectors: Vectors,
    temperature: float | Tensor,
    terms: Terms,
    positives: Tensor | None,
    key: Tensor,
) -> Tensor:
    if positives is None:
        return key
    others, _ = log_mass(vectors, temperature, Terms(terms.real, ~positives))
    return torch.logaddexp(key, others) - (1 + positives.sum(dim=1)).to(key.dtype).log()


class _Part(NamedTuple):
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
        whole = _Part(*(joined(list(each)) for each in zip(*parts, strict=True)))
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
) -> _Part:
    """Return all results for some of the queries."""
    exclude, log_weights = masks
    made = None
    if plan is not None and points is None:
        made = made_points(plan, vectors, wanted.every_point)
    extra, synthetic = _point_logits(real, points, made, plan, temperature)
    logits = real / temperature
    if log_weights is not None:
        logits += log_weights
    if exclude is not None:
        logits = logits.masked_fill_(exclude, -torch.inf)
    highest = torch.cat([logits.amax(dim=1, keepdim=True), extra], dim=1).amax(dim=1, keepdim=True)
    highest = highest.clamp(min=LOWEST)
    terms, point_terms = logits.sub_(highest).exp_(), (extra - highest).exp()
    total = terms.sum(dim=1, keepdim=True) + point_terms.sum(dim=1, keepdim=True)
    mass = (highest + total.log()).squeeze(1)
    total = total.clamp(min=torch.finfo(total.dtype).tiny)
    probability = terms / total if wanted.negatives_gradient else terms[:, :0]
    if not wanted.query_gradient:
        return _Part(mass, synthetic, terms[:, :0], probability, terms[:, :0])
    shares = terms.div_(total), point_terms / total
    if made is None or plan is None:
        gradients = _in_closed_form(*shares, points, vectors)
    else:
        gradients = _of_made_points(*shares, made, plan, vectors, wanted)
    return _Part(mass, synthetic, gradients[0], probability, gradients[1])


def _in_closed_form(
    terms: Tensor, point_terms: Tensor, points: Points | None, vectors: Vectors
) -> tuple[Tensor, Tensor]:
    """Return `direction` and `along` of a `_Part`."""
    direction = gradient_sum(terms, point_terms, points, vectors)
    along = (direction * vectors.query).sum(dim=1)
    if points is not None and points.unseen is not None:
        along = along + (point_terms * points.unseen).sum(dim=1)
    return direction, along


def _of_made_points(
    terms: Tensor,
    point_terms: Tensor,
    made: MadePoints,
    plan: MixPlan,
    vectors: Vectors,
    wanted: Wanted,
) -> tuple[Tensor, Tensor]:
    """Return the same where points are vectors."""
    direction = pulled(terms, vectors.negatives, vectors.own)
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
