"""Eq. 1 by PyTorch's own differentiation: slow, with every vector made, for second derivatives.

The loss has its first derivative in closed form. Where someone differentiates that again
(`create_graph=True`: gradient penalties, Hessians), it is computed from here instead. Synthetic
points and weights are constants, as in the first derivative.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hardmix.errors import InputError
from hardmix.mixing.plans import NO_POINT, MixPlan, Vectors
from hardmix.mixing.points import dots, in_table, point_vectors, table_of


class Remembered(NamedTuple):
    """What the backward pass needs in order to be differentiated itself."""

    vectors: Vectors
    plan: MixPlan | None
    temperature: float | Tensor
    exclude: Tensor | None
    log_weights: Tensor | None
    through_query: bool
    slope: float | Tensor
    beta: float
    version: int | None
    """Of the negatives: a queue may have been written since."""


def remember(
    vectors: Vectors,
    plan: MixPlan | None,
    temperature: float | Tensor,
    exclude: Tensor | None,
    log_weights: Tensor | None = None,
    through_query: bool = False,
    slope: float | Tensor = 0.0,
    beta: float = 0.0,
) -> Remembered | None:
    """Return it, or None while compiling: compiled code is differentiated once."""
    if torch.compiler.is_compiling():
        return None
    negatives = vectors.negatives
    version = None if negatives.is_inference() else negatives._version
    weighing = exclude, log_weights, through_query, slope, beta
    return Remembered(vectors, plan, temperature, *weighing, version)


def wants_second_derivative(ctx: Any) -> bool:
    """Whether this backward pass will itself be differentiated."""
    return torch.is_grad_enabled() and getattr(ctx, "remembered", None) is not None


def differentiated_again(
    function: Callable[[Remembered], Tensor],
    remembered: Remembered,
    inputs: tuple[Any, ...],
    needed: tuple[bool, ...],
    gradient: Tensor,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of `function` with respect to the inputs, with their own graph."""
    negatives = remembered.vectors.negatives
    if remembered.version is not None and negatives._version != remembered.version:
        raise InputError(
            "create_graph=True after the negatives were overwritten: differentiate the loss before"
            " memory.enqueue(...), or pass a copy, memory.keys.clone()."
        )
    wanted = [each for each, need in zip(inputs, needed, strict=True) if need]
    device = negatives.device.type
    with torch.enable_grad(), torch.autocast(device, enabled=False):
        result = function(remembered)
        found = iter(torch.autograd.grad(result, wanted, gradient, create_graph=True))
    return tuple(next(found) if need else None for need in needed)


def infonce_again(remembered: Remembered) -> Tensor:
    """Eq. 1 for every query."""
    query, key = remembered.vectors[:2]
    positive = (query * key).sum(dim=1) / remembered.temperature
    return torch.logaddexp(positive, log_mass_again(remembered)) - positive


def log_mass_again(remembered: Remembered) -> Tensor:
    """What `LogMass` returns: log of the sum over negatives and points, for every query."""
    tau, beta = remembered.temperature, remembered.beta
    if beta == 0:
        return _log_sum_again(remembered)
    upper = _log_sum_again(remembered._replace(temperature=tau / (1 + beta)))
    return upper - _log_sum_again(remembered._replace(temperature=tau / beta))


def _log_sum_again(remembered: Remembered) -> Tensor:
    vectors, plan, temperature, exclude, log_weights, through_query, slope, *_ = remembered
    similarity = dots(vectors.query, vectors.negatives, vectors.own)
    logits = similarity / temperature + slope * similarity.detach()
    if log_weights is not None:
        logits = logits + log_weights
    if exclude is not None:
        logits = logits.masked_fill(exclude, -torch.inf)
    if plan is not None:
        points = _constant_points(plan, vectors, through_query)
        synthetic = torch.einsum("bd,bsd->bs", vectors.query, points)
        if plan.scale is not None:
            synthetic = synthetic * plan.scale
        synthetic = synthetic / temperature
        if plan.weight is not None:
            synthetic = synthetic + plan.weight.log()
        synthetic = synthetic.masked_fill(plan.base == NO_POINT, -torch.inf)
        logits = torch.cat([logits, synthetic], dim=1)
    return logits.logsumexp(dim=1)


def _constant_points(plan: MixPlan, vectors: Vectors, through_query: bool) -> Tensor:
    query, key, negatives, own = vectors
    table = negatives
    if own is not None:
        plan = in_table(plan, len(negatives), own.shape[1])
        table = table_of(negatives, own)
    query = query if through_query else query.detach()
    return point_vectors(plan, query, key.detach(), table.detach())
