"""The family's formulas as their papers print them: slow, one query and one term at a time.

Differentiated by PyTorch. Every vector is made; points and weights are constants.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hardmix import MixPlan, materialize


class Query:
    """A query with its positive, its negatives, and their weights."""

    def __init__(self, q: Tensor, k: Tensor, negatives: list[Tensor], points: list) -> None:
        self.q, self.k, self.negatives, self.points = q, k, negatives, points
        """points: vector, scale, weight."""

    def pos(self, tau) -> Tensor:
        return torch.exp(self.q @ self.k / tau)

    def neg(self, tau, weights=None) -> Tensor:
        """Return the sum over negatives and points."""
        total = torch.zeros((), dtype=self.q.dtype)
        for number, each in enumerate(self.negatives):
            weight = 1.0 if weights is None else weights[number]
            total = total + weight * torch.exp(self.q @ each / tau)
        for vector, scale, weight in self.points:
            total = total + weight * torch.exp(scale * (self.q @ vector) / tau)
        return total

    @property
    def count(self) -> int:
        return len(self.negatives) + len(self.points)


def queries(query, key, negatives, plan: MixPlan | None, exclude=None, own=None) -> list[Query]:
    """Return every query of a batch; `plan` and `exclude` count shared negatives, then own ones."""
    batch, found = len(query), []
    for i in range(batch):
        columns = torch.cat([negatives, own[i]]) if own is not None else negatives
        points = []
        if plan is not None:
            one = MixPlan(*(None if part is None else part[i : i + 1].detach() for part in plan))
            vectors = [each[i : i + 1].detach() for each in (query, key)]
            made = materialize(one, *vectors, columns.detach())[0]
            for s in range(made.shape[0]):
                if one.base[0, s] >= 0:
                    scale = 1.0 if one.scale is None else float(one.scale[0, s])
                    weight = 1.0 if one.weight is None else float(one.weight[0, s])
                    points.append((made[s], scale, weight))
        shown = [n for n in range(len(columns)) if exclude is None or not exclude[i, n]]
        found.append(Query(query[i], key[i], [columns[n] for n in shown], points))
    return found


def infonce(of: Query, tau, weights=None) -> Tensor:
    return -torch.log(of.pos(tau) / (of.pos(tau) + of.neg(tau, weights)))


def decoupled(of: Query, tau, weights=None) -> Tensor:
    if of.count == 0:
        return 0 * of.q.sum()
    return -torch.log(of.pos(tau) / of.neg(tau, weights))


def of_each(formula: Callable[..., Tensor]) -> Callable[[list[Query], Tensor], Tensor]:
    """Return the losses of a batch, by a formula for one query."""
    return lambda batch, tau: torch.stack([formula(of, tau) for of in batch])


def decoupled_weighted(batch: list[Query], tau, sigma=0.5) -> Tensor:
    """DCLW: the weight of a positive is 2 - exp(q.k / sigma) over its mean in the batch."""
    factors = torch.stack([torch.exp(of.q @ of.k / sigma) for of in batch]).detach()
    losses = []
    for of, factor in zip(batch, factors, strict=True):
        weight = 2 - factor / factors.mean()
        loss = -weight * (of.q @ of.k) / tau + torch.log(of.neg(tau))
        losses.append(loss if of.count else 0 * of.q.sum())
    return torch.stack(losses)


def debiased(of: Query, tau, weights=None, tau_plus=0.1) -> Tensor:
    n = of.count
    total = (of.neg(tau, weights) - tau_plus * n * of.pos(tau)) / (1 - tau_plus)
    total = torch.clamp(total, min=n * torch.exp(torch.as_tensor(-1 / tau)))
    return -torch.log(of.pos(tau) / (of.pos(tau) + total))


def dual_temperature(of: Query, tau, weights=None, factor=10.0) -> Tensor:
    if of.count == 0:
        return 0 * of.q.sum()

    def wrong(t) -> Tensor:
        return (1 - of.pos(t) / (of.pos(t) + of.neg(t, weights))).detach()

    return wrong(factor * tau) / wrong(tau) * infonce(of, tau, weights)


def hcl_as_published(of: Query, tau, beta=1.0, tau_plus=0.1) -> Tensor:
    """The authors' criterion: gradients flow through the weights."""
    terms = [torch.exp(of.q @ each / tau) for each in of.negatives]
    terms += [torch.exp(scale * (of.q @ vector) / tau) for vector, scale, _ in of.points]
    n = len(terms)
    if n == 0:
        return 0 * of.q.sum()
    neg = torch.stack(terms)
    imp = neg**beta
    total = (imp * neg).sum() / imp.mean()
    total = (total - tau_plus * n * of.pos(tau)) / (1 - tau_plus)
    total = torch.clamp(total, min=n * math.exp(-1 / tau))
    return -torch.log(of.pos(tau) / (of.pos(tau) + total))


def hcl_weights(of: Query, tau, beta=1.0) -> list[float]:
    terms = [math.exp(beta * float(of.q @ each) / float(tau)) for each in of.negatives]
    return [each / (sum(terms) / len(terms)) for each in terms]


def hardness_weights(of: Query, tau, alpha=9.0) -> list[float]:
    return [math.exp(alpha * float(of.q @ each)) for each in of.negatives]


def ring_weights(of: Query, tau, low=90.0, high=99.0) -> list[float]:
    values = [float((of.q @ each).detach()) for each in of.negatives]
    return [float(slot in ring(values, low, high)) for slot in range(len(values))]


def ring(values: list[float], low: float, high: float) -> list[int]:
    """Return the slots between two percentiles; of equal values, the first slots rank higher."""
    ranked = sorted(range(len(values)), key=lambda slot: (-values[slot], slot))
    outer = int(round(len(values) * (100 - low) / 100, 6))
    inner = int(round(outer * (100 - high) / (100 - low), 6))
    return ranked[inner:outer]
