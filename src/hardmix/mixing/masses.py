"""The family around Eq. 1: what all negatives of a query weigh together, in closed form.

A loss of the family is a function of two numbers per query: the logit of its positive, and the log
of the sum over its negatives and points, each with a weight (`LogMass`). What that function is, is
a matter of a line (`denominators`). Axes: batch, columns (K shared negatives, then M of the query's
own), S (points), dim. As in Eq. 2, points and weights are constants.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hardmix.mixing.closed_form import Points, evaluate_plan
from hardmix.mixing.device_infonce import Wanted
from hardmix.mixing.log_mass import LogMass, Weighing
from hardmix.mixing.log_sums import WeightLine, log_sum
from hardmix.mixing.plans import NO_POINT, MixPlan, Vectors
from hardmix.mixing.points import pulled
from hardmix.mixing.ranking import in_one_piece


class Masses(NamedTuple):
    """What a denominator is made of: numbers of each query, as logs."""

    key: Float[Tensor, " batch"]
    """q.k / tau."""
    positive: Float[Tensor, " batch"]
    """The same, or the mean over several positives."""
    negatives: Float[Tensor, " batch"]
    """log of the sum of weight * exp(q.n / tau) over all negatives and points; -inf without any.
    For denominator="hcl", with its weights in it."""
    number: Float[Tensor, " batch"]
    """How many negatives and points these are."""
    temperature: float | Tensor
    """tau."""
    also: Float[Tensor, " batch"] | None
    """`negatives` at the denominator's `also_at` times tau, a constant; None if it has none."""
    at: Callable[[float], Tensor]
    """`negatives` at another temperature: at(10) at ten times tau."""
    inside: Callable[[], Tensor]
    """log of the mean of exp(q.p / tau) over several positives."""


class Terms(NamedTuple):
    """What stands in the sum besides the vectors; all constants."""

    real: Float[Tensor, "batch columns"]
    exclude: Bool[Tensor, "batch columns"] | None = None
    log_weights: Float[Tensor, "batch columns"] | WeightLine | None = None
    plan: MixPlan | None = None
    points: Points | None = None
    """The plan's, where they are evaluated in closed form."""
    through_query: bool = False
    every_point: bool = False
    beta: float = 0.0
    """HCL: weigh each term by exp(beta * logit) over its mean, with gradients. 0: none."""
    overwrite: bool = False
    """Whether the similarities are not needed afterwards: their memory is reused."""

    def weighing(self) -> Weighing:
        """Return what the sum does with the real negatives."""
        if isinstance(self.log_weights, WeightLine):
            line = self.log_weights
            return Weighing(self.exclude, line.offset, line.slope, self.beta, self.overwrite)
        return Weighing(self.exclude, self.log_weights, 0.0, self.beta, self.overwrite)


def masses_of(
    vectors: Vectors,
    temperature: float | Tensor,
    terms: Terms,
    positives: Bool[Tensor, "batch columns"] | None = None,
    num_pairs: int | None = None,
    also_at: float | None = None,
) -> tuple[Masses, Tensor, Tensor]:
    """Return a batch's masses, q.k, and q.h of every point (the last two detached).

    `num_pairs`: the number of the plan's leading columns that mix two rows, if known. `also_at`: at
    which further multiple of the temperature the sum is wanted, as a constant.
    """
    dot = (vectors.query * vectors.key).sum(dim=1)
    if terms.plan is not None and not in_one_piece(terms.real):
        with torch.no_grad():
            known = terms.through_query, num_pairs, terms.every_point
            points = evaluate_plan(terms.plan, vectors, terms.real, dot, *known)
            terms = terms._replace(points=points)
    positive = key = dot / temperature
    also = None
    if also_at is not None:
        with torch.no_grad():  # before the similarities are overwritten
            also, _ = log_mass(vectors, temperature * also_at, terms._replace(overwrite=False))
    negatives, synthetic = log_mass(vectors, temperature, terms)
    number = _count(terms).to(dot.dtype)
    if terms.beta > 0:
        negatives = torch.where(number > 0, negatives + number.log(), -torch.inf)
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
        number,
        temperature,
        also,
        lambda factor: log_mass(vectors, temperature * factor, terms)[0],
        partial(_inside, vectors, temperature, terms, positives, key),
    )
    return masses, dot.detach(), synthetic


def log_mass(
    vectors: Vectors, temperature: float | Tensor, terms: Terms
) -> tuple[Float[Tensor, " batch"], Float[Tensor, "batch S"]]:
    """Return log of the negatives' sum in Eq. 1, and q.h of every point."""
    if not torch.is_grad_enabled() and not in_one_piece(terms.real) and terms.beta == 0:
        return _value_only(temperature, terms)
    options = Wanted(terms.through_query, terms.every_point, True, True, True)
    mass, synthetic = LogMass.apply(
        vectors.query,
        vectors.negatives,
        vectors.own,
        temperature,
        vectors.key.detach(),
        terms.real,
        *terms.weighing(),
        options,
        terms.points,
        *(terms.plan or ()),
    )
    return mass, synthetic


def _value_only(temperature: float | Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    """The same where no gradient is wanted, in one pass over the similarities."""
    exclude, added, slope, *_ = terms.weighing()
    offset, added = (added, None) if added is not None and added.shape[1] == 1 else (0.0, added)
    mass = log_sum(terms.real, 1 / temperature + slope, exclude, added).add_(offset).squeeze(1)
    points = terms.points
    if points is None:
        return mass, terms.real[:, :0]
    logits = points.logit / temperature
    logits = logits if points.weight is None else logits + points.weight.log()
    return torch.logaddexp(mass, logits.logsumexp(dim=1)), points.similarity


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
