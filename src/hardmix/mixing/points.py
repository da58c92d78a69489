"""A plan's points as vectors (Eq. 3, Sec. 4.2), and several plans as one.

Axes: batch, K (shared negatives), M (of each query's own), S (points), V (the plan's vectors), dim.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from hardmix.mixing.checks import check_plan, check_plan_rows, check_shapes
from hardmix.mixing.plans import KEY, NO_POINT, QUERY, VECTOR, MixPlan


def materialize(
    plan: MixPlan,
    query: Float[Tensor, "batch dim"],
    key: Float[Tensor, "batch dim"],
    negatives: Float[Tensor, "K dim"] | Float[Tensor, "batch M dim"],
) -> Float[Tensor, "batch S dim"]:
    """Return a plan's points as vectors (Eq. 3 and Sec. 4.2), for tests and figures.

    Points that could not be made are zero. `contrast` does not need this.
    """
    own = negatives if negatives.ndim == 3 else None
    check_shapes(query, key, query if own is not None else negatives)
    check_plan(plan, len(query))
    check_plan_rows(plan, negatives.shape[-2])
    if own is None:
        return point_vectors(plan, query, key, negatives)
    return point_vectors(in_table(plan, 0, own.shape[1]), query, key, own.flatten(0, 1))


def point_vectors(plan: MixPlan, query: Tensor, key: Tensor, table: Tensor) -> Tensor:
    """Return the points of a plan whose negatives are rows of this table."""
    partner = table[plan.partner.clamp(min=0)]
    partner = torch.where((plan.partner == QUERY).unsqueeze(-1), query.unsqueeze(1), partner)
    partner = torch.where((plan.partner == KEY).unsqueeze(-1), key.unsqueeze(1), partner)
    if plan.vectors is not None:
        which = (VECTOR - plan.partner).clamp(min=0).unsqueeze(-1).expand_as(partner)
        vectors = plan.vectors.to(partner.dtype).gather(1, which)
        partner = torch.where((plan.partner <= VECTOR).unsqueeze(-1), vectors, partner)
    share = plan.share.unsqueeze(-1)
    points = normalize((1 - share) * table[plan.base.clamp(min=0)] + share * partner, dim=-1)
    return points.masked_fill((plan.base == NO_POINT).unsqueeze(-1), 0.0)


def join(*plans: MixPlan) -> MixPlan:
    """Return one plan with the points of all plans, in order."""
    plans = _one_set_of_vectors(plans)
    fields: list[Any] = []
    for parts in zip(*(plan[:-1] for plan in plans), strict=True):
        if all(part is None for part in parts):
            fields.append(None)
            continue
        given = [
            torch.ones_like(plan.share) if part is None else part
            for plan, part in zip(plans, parts, strict=True)
        ]
        fields.append(torch.cat(given, dim=1))
    fields.append(plans[0].vectors)
    return MixPlan(*fields)


def _one_set_of_vectors(plans: tuple[MixPlan, ...]) -> tuple[MixPlan, ...]:
    """The same plans, each with the vectors of all."""
    every = [plan.vectors for plan in plans if plan.vectors is not None]
    if not every or all(plan.vectors is every[0] for plan in plans):
        return plans
    vectors, before, shifted = torch.cat(every, dim=1), 0, []
    for plan in plans:
        partner = torch.where(plan.partner <= VECTOR, plan.partner - before, plan.partner)
        shifted.append(plan._replace(partner=partner, vectors=vectors))
        before += 0 if plan.vectors is None else plan.vectors.shape[1]
    return tuple(shifted)


def in_table(plan: MixPlan, num_shared: int, num_own: int) -> MixPlan:
    """Return the plan with rows of one table: the shared negatives, then every query's own."""
    return plan._replace(
        base=table_rows(plan.base, num_shared, num_own),
        partner=table_rows(plan.partner, num_shared, num_own),
    )


def table_of(
    negatives: Float[Tensor, "K dim"], own: Float[Tensor, "batch M dim"]
) -> Float[Tensor, "rows dim"]:
    """Return the table that `table_rows` counts in."""
    return torch.cat([negatives, own.flatten(0, 1)])


def dots(
    vectors: Float[Tensor, "batch dim"],
    negatives: Float[Tensor, "K dim"],
    own: Float[Tensor, "batch M dim"] | None = None,
) -> Float[Tensor, "batch columns"]:
    """Return the similarities to the shared negatives, then to each query's own."""
    shared = vectors @ negatives.T
    if own is None:
        return shared
    return torch.cat([shared, torch.bmm(own, vectors.unsqueeze(2)).squeeze(2)], dim=1)


def pulled(
    terms: Float[Tensor, "batch columns"],
    negatives: Float[Tensor, "K dim"],
    own: Float[Tensor, "batch M dim"] | None = None,
) -> Float[Tensor, "batch dim"]:
    """Return the sum of the negatives, each times its term."""
    if own is None:
        return terms @ negatives
    shared, of_query = terms.split([len(negatives), own.shape[1]], dim=1)
    return torch.baddbmm((shared @ negatives).unsqueeze(1), of_query.unsqueeze(1), own).squeeze(1)


def table_rows(
    columns: Int[Tensor, "batch S"], num_shared: int, num_own: int
) -> Int[Tensor, "batch S"]:
    """Columns of the similarities to rows of the table: of a query's own, those of its block."""
    block = num_own * torch.arange(len(columns), device=columns.device).unsqueeze(1)
    return torch.where(columns >= num_shared, columns + block, columns)
