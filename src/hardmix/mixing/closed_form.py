"""Sec. 4 without vectors: the similarities of a plan's points to their queries in closed form.

Axes: batch, K (negatives), S (synthetic points), dim. Every embedding has unit length, so the
similarity of a query and a mixed point follows from similarities that are already there:

    with the query   q.h' = (share + (1 - share) q.n) / |(1 - share) n + share q|
    with a row       q.h  = ((1 - share) q.n_base + share q.n_partner) / |the sum of both|

The first length follows from q.n too; the second takes one look at the two rows.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import embedding_bag

from hardmix.mixing.plans import KEY, NO_POINT, QUERY, VECTOR, MixPlan, Vectors
from hardmix.mixing.points import dots, join, pulled, table_of, table_rows

CHUNK_PAIRS = 2**12
"""Pairs whose sums are measured at once: 2 MB at 128 dimensions, about what caches hold."""


class Points(NamedTuple):
    """A plan's points as the loss sees them. The first `num_pairs` columns mix two rows."""

    similarity: Float[Tensor, "batch given"]
    """q.h in the columns of the plan that was given; -inf where no point could be made."""
    logit: Float[Tensor, "batch S"]
    """The same after the plan's `scale`, pairs first: what is divided by the temperature."""
    base: Int[Tensor, "batch S"]
    """Column of the similarities, 0 where no point could be made."""
    partner: Int[Tensor, "batch S"]
    num_pairs: int
    from_base: Float[Tensor, "batch S"]
    """d logit / d query = from_base * negatives[base] + from_partner * partner."""
    from_partner: Float[Tensor, "batch S"]
    weight: Float[Tensor, "batch S"] | None
    vectors: Float[Tensor, "batch V dim"] | None
    unseen: Float[Tensor, "batch S"] | None
    """With `through_query`: the logit without from_base q.n + from_partner q.partner."""

    def rows(self, rows: slice) -> "Points":
        """Return those of some queries."""
        sliced: dict[str, Any] = {
            name: part[rows] for name, part in self._asdict().items() if isinstance(part, Tensor)
        }
        return self._replace(**sliced)


def evaluate_plan(
    plan: MixPlan,
    vectors: Vectors,
    real: Float[Tensor, "batch K"],
    positive: Float[Tensor, " batch"],
    through_query: bool = False,
    num_pairs: int | None = None,
    every_point: bool = False,
) -> Points:
    """Return the similarities of a plan's points to their query, and their derivatives (Sec. 4).

    `real` is q.n, `positive` q.k. `through_query` counts the query inside h' as a variable too.
    `num_pairs`: the number of leading columns that mix two rows, if all others mix one.
    `every_point`: no point of the plan is missing.
    """
    given = plan.base.shape[1]
    if num_pairs is None:
        plan, num_pairs = _pairs_first(plan)
    base = plan.base if every_point else plan.base.clamp(min=0)
    whole = plan._replace(base=base, share=plan.share.to(real.dtype))
    pairs = _mixed_pairs(_columns(whole, slice(num_pairs)), vectors, real)
    rest = _columns(whole, slice(num_pairs, None))
    others = _mixed_with_one(rest, vectors, real, positive, through_query)
    similarity, from_base, from_partner, *unseen = (
        torch.cat(parts, dim=1) for parts in zip(pairs, others, strict=False)
    )
    if not every_point:
        similarity = similarity.masked_fill_(plan.base == NO_POINT, -torch.inf)
    logit = similarity
    if plan.scale is not None:
        logit = (similarity * plan.scale).masked_fill_(plan.base == NO_POINT, -torch.inf)
        from_base, from_partner = from_base * plan.scale, from_partner * plan.scale
        unseen = [each * plan.scale for each in unseen]
    if similarity.shape[1] > given:
        similarity = torch.maximum(similarity[:, :given], similarity[:, given:])
    return Points(
        similarity,
        logit,
        base,
        plan.partner,
        num_pairs,
        from_base,
        from_partner,
        plan.weight,
        plan.vectors,
        unseen[0] if through_query else None,
    )


def gradient_sum(
    terms: Tensor, point_terms: Tensor, points: Points | None, vectors: Vectors
) -> Tensor:
    """Eq. 2's sum over the negatives, after each point lent its term to its parents.

    Adds the loans to `terms`, which nobody needs after this.
    """
    query, key, negatives, own = vectors
    if points is None:
        return pulled(terms, negatives, own)
    loan = point_terms * points.from_partner
    terms.scatter_add_(1, points.base, point_terms * points.from_base)
    terms.scatter_add_(1, points.partner[:, : points.num_pairs], loan[:, : points.num_pairs])
    pull = pulled(terms, negatives, own)
    partner, loan = points.partner[:, points.num_pairs :], loan[:, points.num_pairs :]
    if loan.shape[1] == 0:
        return pull
    if points.vectors is not None:
        which = (VECTOR - partner).clamp_(min=0)
        to_vectors = loan.new_zeros(points.vectors.shape[:2])
        to_vectors.scatter_add_(1, which, loan.masked_fill(partner > VECTOR, 0.0))
        partners = points.vectors.to(pull.dtype)
        pull = torch.baddbmm(pull.unsqueeze(1), to_vectors.unsqueeze(1), partners).squeeze(1)
        loan = loan.masked_fill(partner <= VECTOR, 0.0)
    to_key = loan.masked_fill(partner != KEY, 0.0).sum(dim=1, keepdim=True)
    to_query = loan.sum(dim=1, keepdim=True) - to_key
    return pull.addcmul_(to_query, query).addcmul_(to_key, key)


def _columns(plan: MixPlan, some: slice) -> MixPlan:
    """Some of a plan's points; of these only base, partner, share and vectors."""
    parts = plan.base[:, some], plan.partner[:, some], plan.share[:, some]
    return MixPlan(*parts, vectors=plan.vectors)


def _mixed_pairs(plan: MixPlan, vectors: Vectors, real: Tensor) -> tuple[Tensor, ...]:
    """Eq. 3: similarity, from_base, from_partner, unseen of points that mix two rows."""
    base, partner, share = plan[:3]
    rows, table = (base, partner), vectors.negatives
    if vectors.own is not None:
        shapes = len(table), vectors.own.shape[1]
        rows = table_rows(base, *shapes), table_rows(partner, *shapes)
        table = table_of(table, vectors.own)
    length = _pair_lengths(*rows, share, table)
    from_base, from_partner = (1 - share).div_(length), share / length
    similarity = from_base * real.gather(1, base)
    similarity.addcmul_(from_partner, real.gather(1, partner))
    return similarity.clamp_(-1.0, 1.0), from_base, from_partner, torch.zeros_like(share)


def _mixed_with_one(
    plan: MixPlan, vectors: Vectors, real: Tensor, positive: Tensor, through_query: bool
) -> tuple[Tensor, ...]:
    """Sec. 4.2 and App. B.2: the same of points mixed with the query, its key, or a vector."""
    base, partner, share = plan[:3]
    rest = 1 - share
    to_base = real.gather(1, base)
    to_partner, between = torch.ones_like(to_base), to_base
    squared, constant = share.square(), partner != QUERY
    if bool(constant.any()):
        to_partner, between, length = _with_constants(plan, vectors, to_base, positive)
        squared = squared * length
    squared = squared + rest.square() + 2 * share * rest * between
    length = squared.clamp_(min=torch.finfo(real.dtype).eps).sqrt_()
    from_base, from_partner = rest / length, share / length
    similarity = (from_base * to_base + from_partner * to_partner).clamp_(-1.0, 1.0)
    if not through_query:
        return similarity, from_base, from_partner
    # d similarity / d (q.n), over its value with h' constant: in [0.5, 1] where q.n >= 0.
    turn = rest * (rest + share * to_base) / length.square()
    from_base = torch.where(constant, from_base, from_base * turn)
    from_partner = torch.where(constant, from_partner, 0.0)
    unseen = similarity - from_base * to_base - from_partner * to_partner
    return similarity, from_base, from_partner, unseen


def _with_constants(
    plan: MixPlan, vectors: Vectors, to_base: Tensor, positive: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """q.partner, n.partner and |partner|^2 where the partner may be a key or a vector too."""
    base, partner = plan.base, plan.partner
    to_partner, between = torch.ones_like(to_base), to_base.clone()
    length = torch.ones_like(to_base)
    with_key = partner == KEY
    if bool(with_key.any()):
        to_partner = torch.where(with_key, positive.unsqueeze(1), to_partner)
        to_key = dots(vectors.key, vectors.negatives, vectors.own).gather(1, base)
        between = torch.where(with_key, to_key, between)
    if plan.vectors is None:
        return to_partner, between, length
    # Only these need vectors, and a part of them at a time.
    table, rows = vectors.negatives, base
    if vectors.own is not None:
        rows = table_rows(base, len(table), vectors.own.shape[1])
        table = table_of(table, vectors.own)
    for some in (partner <= VECTOR).nonzero().split(CHUNK_PAIRS):
        i, j = some.unbind(dim=1)
        vector = plan.vectors[i, VECTOR - partner[i, j]].to(to_base.dtype)
        to_partner[i, j] = (vectors.query[i] * vector).sum(dim=1)
        between[i, j] = (table[rows[i, j]] * vector).sum(dim=1)
        length[i, j] = vector.square().sum(dim=1)
    return to_partner, between, length


def _pair_lengths(base: Tensor, partner: Tensor, share: Tensor, negatives: Tensor) -> Tensor:
    """|(1 - share) n_base + share n_partner| of Eq. 3, a cache-sized part at a time.

    Opposite parents cancel out: a floor keeps their point and its gradient finite.
    """
    length = torch.empty_like(share).view(-1)
    rows = torch.stack([base, partner], dim=-1).view(-1).split(2 * CHUNK_PAIRS)
    shares = torch.stack([1 - share, share], dim=-1).view(-1).split(2 * CHUNK_PAIRS)
    first = torch.arange(0, 2 * CHUNK_PAIRS, 2, device=base.device)
    for some, parents, weights in zip(length.split(CHUNK_PAIRS), rows, shares, strict=True):
        mixed = embedding_bag(
            parents, negatives, first[: len(some)], mode="sum", per_sample_weights=weights
        )
        torch.linalg.vector_norm(mixed, dim=1, out=some)
    return length.clamp_(min=torch.finfo(length.dtype).eps ** 0.5).view_as(share)


def _pairs_first(plan: MixPlan) -> tuple[MixPlan, int]:
    """The same points, those that mix two rows in front, and how many columns these are.

    Every strategy puts them there. Of any other plan each column becomes two, one for each kind,
    with no point where the other kind is meant.
    """
    is_pair = plan.partner >= 0
    per_column = is_pair.sum(dim=0)
    num_pairs = int((per_column > 0).sum())
    if bool((per_column[:num_pairs] == len(is_pair)).all()):
        return plan, num_pairs
    pairs = plan._replace(
        base=plan.base.masked_fill(~is_pair, NO_POINT), partner=plan.partner.clamp(min=0)
    )
    others = plan._replace(
        base=plan.base.masked_fill(is_pair, NO_POINT),
        partner=plan.partner.masked_fill(is_pair, QUERY),
    )
    return join(pairs, others), is_pair.shape[1]
