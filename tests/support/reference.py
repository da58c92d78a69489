"""Sec. 3.1 and 4 as slow, obvious float64 loops: one query, one negative, one point at a time."""

import math

import torch
from torch import Tensor
from torch.nn.functional import normalize

from hardmix import KEY, QUERY, MixPlan


def unit(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return normalize(torch.randn(*shape, dtype=torch.float64), dim=-1).to(dtype)


def dot(x: list[float], y: list[float]) -> float:
    return sum(a * b for a, b in zip(x, y, strict=True))


def mixed_point(plan: MixPlan, row: int, column: int, query, key, negatives) -> list[float] | None:
    """Return one synthetic point (Eq. 3 or Sec. 4.2), or None where the plan has none."""
    base, partner = int(plan.base[row, column]), int(plan.partner[row, column])
    share = float(plan.share[row, column])
    if base < 0:
        return None
    first = negatives[base].tolist()
    if partner < KEY:
        second = plan.vectors[row, KEY - 1 - partner].tolist()
    else:
        by_name = {QUERY: query[row], KEY: key[row]}
        second = by_name.get(partner, negatives[max(partner, 0)]).tolist()
    mixed = [(1 - share) * a + share * b for a, b in zip(first, second, strict=True)]
    length = math.sqrt(dot(mixed, mixed))
    return [value / length for value in mixed]


def loss_and_gradient(query, key, negatives, plan, temperature, exclude=None):
    """Return Eq. 1 and Eq. 2 for every query, with the plan's points as further negatives."""
    losses, gradients = [], []
    for row in range(len(query)):
        q, k = query[row].tolist(), key[row].tolist()
        others = [
            (negatives[n].tolist(), 1.0, 1.0)
            for n in range(len(negatives))
            if exclude is None or not exclude[row, n]
        ]
        for column in range(0 if plan is None else plan.base.shape[1]):
            point = mixed_point(plan, row, column, query, key, negatives)
            if point is not None:
                scale = 1.0 if plan.scale is None else float(plan.scale[row, column])
                weight = 1.0 if plan.weight is None else float(plan.weight[row, column])
                others.append((point, scale, weight))
        terms = [w * math.exp(s * dot(q, z) / temperature) for z, s, w in others]
        own = math.exp(dot(q, k) / temperature)
        total = own + sum(terms)
        losses.append(-math.log(own / total))
        gradient = [-(1 - own / total) * value / temperature for value in k]
        for term, (z, scale, _) in zip(terms, others, strict=True):
            for d, value in enumerate(z):
                gradient[d] += term / total * scale * value / temperature
        gradients.append(gradient)
    return torch.tensor(losses, dtype=torch.float64), torch.tensor(gradients, dtype=torch.float64)
