"""The paper's method, in the paper's order (Sec. 4): rank the negatives, then mix the hardest.

    rank         the N negatives n with the highest q.n                                 Sec. 4.1
    pairs        h  = normalize(alpha n_i + (1 - alpha) n_j),    alpha ~ U(0, 1)        Eq. 3
    with query   h' = normalize(beta q + (1 - beta) n_j),        beta ~ U(0, 0.5)       Sec. 4.2

A synthetic point is never a vector here. It is an entry of a plan, which says what to mix:

    point = normalize((1 - share) * negatives[base] + share * partner)

Axes: batch, K (negatives), N (hardest ones), S (synthetic points), V (a plan's own vectors), dim.
Every embedding has unit length.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from hardmix.mixing.checks import (
    check_counts,
    check_mask,
    check_not_transformed,
    check_num_hardest,
    check_plan,
    check_plan_rows,
    check_shapes,
    check_similarity,
)
from hardmix.mixing.random_draws import RandomSource, uniform_numbers
from hardmix.mixing.ranking import in_one_piece, joined, largest, row_chunks, rows_of

QUERY = -1
"""Marks the query itself as the partner (Sec. 4.2)."""
KEY = -2
"""Marks the query's key as the partner (App. B.2)."""
VECTOR = -3
"""Marks the first of the plan's own `vectors` as the partner; -4 is the second, and so on."""
NO_POINT = -1
"""Marks, as the base, that no point could be made: its logit is -inf."""


class MixPlan(NamedTuple):
    """The synthetic points to make (Sec. 4): one entry per query and point."""

    base: Int[Tensor, "batch S"]
    """Row index of a negative; -1 if no point could be made, which gives a logit of -inf."""
    partner: Int[Tensor, "batch S"]
    """Row index of a negative, or `QUERY`, or `KEY`, or `VECTOR` - v for vector v of the plan."""
    share: Float[Tensor, "batch S"]
    """The partner's share: 1 - alpha in Eq. 3, beta in Sec. 4.2. Below 0: away from the partner."""
    scale: Float[Tensor, "batch S"] | None = None
    """Optional factor on the point's logit (App. B.2)."""
    weight: Float[Tensor, "batch S"] | None = None
    """Optional factor on the point's term in the sum of Eq. 1, exp(logit)."""
    vectors: Float[Tensor, "batch V dim"] | None = None
    """Optional partners of each query that are neither a negative nor the query or its key, of any
    length: the noise and the signs of SynCo."""


@dataclass(frozen=True)
class HardestNegatives:
    """The set of a query's N closest negatives (Sec. 4.1), in slot order.

    Slot order, not rank: a last-bit difference between two similarities then cannot change which
    negative a random draw picks. The draw is uniform over the set, so the method is the same.
    """

    positions: Int[Tensor, "batch N"]
    """Row indices of the negatives in ascending order, padded with -1."""
    count: Int[Tensor, " batch"]
    """Number of valid positions: below N if fewer negatives are allowed."""
    complete: bool = False
    """True if every query certainly has N valid positions."""

    @property
    def number(self) -> int | Int[Tensor, "batch 1"]:
        """The count as a factor: one number if all queries have the same."""
        return self.positions.shape[1] if self.complete else self.count.unsqueeze(1)


def plan_mochi(
    similarity: Float[Tensor, "batch K"],
    *,
    num_hardest: int,
    num_pairs: int,
    num_with_query: int,
    exclude: Bool[Tensor, "batch K"] | None = None,
    generator: RandomSource = None,
) -> MixPlan:
    """Return MoCHi's plan (Sec. 4): s pair points, then s' points mixed with the query.

    Args:
        similarity: q.n for every query and negative.
        num_hardest: N, how many of a query's hardest negatives may be mixed.
        num_pairs: s, how many points mix two of them.
        num_with_query: s', how many points mix one of them with the query.
        exclude: negatives that must not be mixed.
        generator: the source of random numbers.

    Returns:
        A plan with s + s' points for every query.
    """
    check_counts(num_hardest, num_pairs, num_with_query)
    hardest = hardest_negatives(similarity, num_hardest, exclude)
    return mix(hardest, num_pairs, num_with_query, similarity, generator)


def hardest_negatives(
    similarity: Float[Tensor, "batch K"],
    num_hardest: int,
    exclude: Bool[Tensor, "batch K"] | None = None,
) -> HardestNegatives:
    """Return the N most similar negatives of each query (Sec. 4.1), without excluded ones."""
    check_not_transformed()
    check_similarity(similarity)
    check_counts(num_hardest)
    check_num_hardest(num_hardest, similarity.shape[1])
    check_mask(exclude, len(similarity), similarity.shape[1])
    return ranked(similarity.detach(), num_hardest, exclude)


def ranked(
    similarity: Float[Tensor, "batch K"],
    num_hardest: int,
    exclude: Bool[Tensor, "batch K"] | None = None,
) -> HardestNegatives:
    """Return `hardest_negatives` of similarities, or of logits, that were checked already."""
    one_piece = in_one_piece(similarity)
    parts = []
    for rows in row_chunks(len(similarity), similarity.shape[1], one_piece):
        values = rows_of(similarity, rows)
        if exclude is not None:
            values = values.masked_fill(rows_of(exclude, rows), -torch.inf)
        parts.append(largest(values, num_hardest, all_there=exclude is None))
    positions, count = (joined(list(column)) for column in zip(*parts, strict=True))
    complete = exclude is None if one_piece else bool(count.min() == num_hardest)
    return HardestNegatives(positions, count, complete)


def mix(
    hardest: HardestNegatives,
    num_pairs: int,
    num_with_query: int,
    like: Float[Tensor, "batch K"],
    generator: RandomSource = None,
) -> MixPlan:
    """Mix the hardest negatives (Eq. 3 and Sec. 4.2): s pairs, then s' points with the query.

    The paper says "randomly chosen": here each pair is drawn uniformly from all pairs of two
    different negatives. Pairs may repeat, so s may exceed N. `like` has the dtype of the shares,
    and the rows and the device of the queries.
    """
    check_counts(2, num_pairs, num_with_query)
    points = num_pairs + num_with_query
    uniform = uniform_numbers(like, 2 * points + num_pairs, generator)
    number, share = hardest.number, uniform[:, points + num_pairs :]
    # Eq. 3, h = normalize(alpha n_i + (1 - alpha) n_j): i is one of the N - 1 others than j, each
    # as likely. Below 1, a number times n rounds to one below n, in its own dtype.
    uniform[:, :num_pairs].mul_(number - 1)
    uniform[:, num_pairs : points + num_pairs].mul_(number)
    which = uniform[:, : points + num_pairs].long()
    i, j = which[:, :num_pairs], which[:, points:]
    i += i >= j  # with fewer than two, the padding: NO_POINT
    base, partner = hardest.positions.gather(1, which).split([points, num_pairs], dim=1)
    if not hardest.complete and not in_one_piece(partner):
        partner = partner.clamp(min=0)  # a row, also where no point is made; a device needs none
    share = share.clamp(min=torch.finfo(share.dtype).eps)  # 1 - alpha, alpha ~ U(0, 1)
    if num_with_query:
        # Sec. 4.2, h' = normalize(beta q + (1 - beta) n_i), beta ~ U(0, 0.5).
        share[:, num_pairs:].mul_(0.5)
        pairs, partner = partner, torch.full_like(base, QUERY)
        partner[:, :num_pairs] = pairs
    return MixPlan(base, partner, share)


def join(*plans: MixPlan) -> MixPlan:
    """Return one plan with the points of all plans, in order."""
    plans = _one_set_of_vectors(plans)
    fields: list[Any] = []
    for parts in zip(*(plan[:-1] for plan in plans), strict=True):
        if all(part is None for part in parts):
            fields.append(None)
            continue
        present = [
            torch.ones_like(plan.share) if part is None else part
            for plan, part in zip(plans, parts, strict=True)
        ]
        fields.append(torch.cat(present, dim=1))
    fields.append(plans[0].vectors)
    return MixPlan(*fields)


def _one_set_of_vectors(plans: tuple[MixPlan, ...]) -> tuple[MixPlan, ...]:
    """Return the same plans, each with the vectors of all."""
    vectors = [plan.vectors for plan in plans if plan.vectors is not None]
    if not vectors or all(plan.vectors is vectors[0] for plan in plans):
        return plans
    joint, before, shifted = torch.cat(vectors, dim=1), 0, []
    for plan in plans:
        partner = torch.where(plan.partner <= VECTOR, plan.partner - before, plan.partner)
        shifted.append(plan._replace(partner=partner, vectors=joint))
        before += 0 if plan.vectors is None else plan.vectors.shape[1]
    return tuple(shifted)


def materialize(
    plan: MixPlan,
    query: Float[Tensor, "batch dim"],
    key: Float[Tensor, "batch dim"],
    negatives: Float[Tensor, "K dim"] | Float[Tensor, "batch M dim"],
) -> Float[Tensor, "batch S dim"]:
    """Return a plan's points as vectors (Eq. 3 and Sec. 4.2), for tests and pictures.

    Points that could not be made are zero. The loss does not need this.
    """
    own = negatives if negatives.ndim == 3 else None
    check_shapes(query, key, query if own is not None else negatives)
    check_plan(plan, len(query))
    check_plan_rows(plan, negatives.shape[-2])
    if own is not None:
        block = own.shape[1] * torch.arange(len(own), device=own.device).unsqueeze(1)
        base, partner = (torch.where(rows >= 0, rows + block, rows) for rows in plan[:2])
        plan, negatives = plan._replace(base=base, partner=partner), own.flatten(0, 1)
    partner = negatives[plan.partner.clamp(min=0)]
    partner = torch.where((plan.partner == QUERY).unsqueeze(-1), query.unsqueeze(1), partner)
    partner = torch.where((plan.partner == KEY).unsqueeze(-1), key.unsqueeze(1), partner)
    if plan.vectors is not None:
        which = (VECTOR - plan.partner).clamp(min=0).unsqueeze(-1).expand_as(partner)
        vectors = plan.vectors.to(partner.dtype).gather(1, which)
        partner = torch.where((plan.partner <= VECTOR).unsqueeze(-1), vectors, partner)
    share = plan.share.unsqueeze(-1)
    points = normalize((1 - share) * negatives[plan.base.clamp(min=0)] + share * partner, dim=-1)
    return points.masked_fill((plan.base == NO_POINT).unsqueeze(-1), 0.0)
