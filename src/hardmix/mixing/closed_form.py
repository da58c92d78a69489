"""Sec. 4 without vectors: the similarities of a plan's points to their queries in closed form.

Axes: batch, K (negatives), S (synthetic points), dim. Every embedding has unit length, so the
similarity of a query and a mixed point follows from similarities that are already there:

    with the query   q.h' = (share + (1 - share) q.n) / |(1 - share) n + share q|
    with a row       q.h  = ((1 - share) q.n_base + share q.n_partner) / |the sum of both|

The first length follows from q.n too, the second from n_base.n_partner: one look at the two rows.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hardmix.mixing.plans import KEY, NO_POINT, QUERY, VECTOR, MixPlan, Vectors
from hardmix.mixing.points import dots, join, pulled, table_of, table_rows

CHUNK_PAIRS = 2**12
"""Pairs whose vectors are made at once: 2 MB at 128 dimensions, about what caches hold."""
SHORT = 2**-6
"""Squared lengths below this are measured: 1 - 2 share (1 - share) (1 - n.n) loses digits there."""
_ROW_DOTS: Any = getattr(torch.ops.aten, "_embedding_bag_per_sample_weights_backward", None)
"""(left, right, rows of right, any, rows of left, 0) to inner products of rows, without copying a
row: of an embedding bag the gradient of its weights. Private to PyTorch, so it may be missing."""


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
    table = _table(vectors)
    seen = _seen(whole, num_pairs, vectors, table, real, positive)
    length = _lengths(whole, num_pairs, table, seen)
    from_base, from_partner = (1 - whole.share).div_(length), whole.share / length
    similarity = (from_base * seen.to_base).addcmul_(from_partner, seen.to_partner)
    similarity, unseen = similarity.clamp_(-1.0, 1.0), None
    if through_query:
        known = whole, seen, length, similarity, from_base, from_partner
        from_base, from_partner, unseen = _through_query(*known)
    if not every_point:
        similarity = similarity.masked_fill_(plan.base == NO_POINT, -torch.inf)
    logit = similarity
    if plan.scale is not None:
        logit = (similarity * plan.scale).masked_fill_(plan.base == NO_POINT, -torch.inf)
        from_base, from_partner = from_base * plan.scale, from_partner * plan.scale
        unseen = None if unseen is None else unseen * plan.scale
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
        unseen,
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


class _Table(NamedTuple):
    """All negatives as rows of one table: the shared ones, then every query's own."""

    vectors: Float[Tensor, "rows dim"]
    num_shared: int
    num_own: int

    def rows(self, columns: Int[Tensor, "batch S"]) -> Int[Tensor, "batch S"]:
        """Return the rows of these columns of the similarities."""
        return table_rows(columns, self.num_shared, self.num_own) if self.num_own else columns


def _table(vectors: Vectors) -> _Table:
    shared, own = vectors.negatives, vectors.own
    if own is None:
        return _Table(shared, len(shared), 0)
    return _Table(table_of(shared, own), len(shared), own.shape[1])


class _Seen(NamedTuple):
    """Inner products behind a plan's points."""

    to_base: Float[Tensor, "batch S"]
    """q.n_base."""
    to_partner: Float[Tensor, "batch S"]
    """q.partner."""
    between: Float[Tensor, "batch S"]
    """n_base.partner."""
    partner_squared: Float[Tensor, "batch others"] | None
    """|partner|^2 of the points that are no pairs, unless these are all 1."""


def _seen(
    plan: MixPlan,
    num_pairs: int,
    vectors: Vectors,
    table: _Table,
    real: Tensor,
    positive: Tensor,
) -> _Seen:
    """Eq. 3, Sec. 4.2, App. B.2: whatever the partner is, a row, the query, its key, a vector."""
    to_base = real.gather(1, plan.base)
    to_partner, between = torch.ones_like(to_base), to_base.clone()
    squared = None
    if num_pairs:
        partner = plan.partner[:, :num_pairs]
        to_partner[:, :num_pairs] = real.gather(1, partner)
        rows = table.rows(plan.base[:, :num_pairs]), table.rows(partner)
        between[:, :num_pairs] = _row_dots(*rows, table.vectors)
    others = plan.partner[:, num_pairs:]
    if bool((others != QUERY).any()):
        of_others = to_partner[:, num_pairs:], between[:, num_pairs:]
        squared = _see_constants(plan, num_pairs, vectors, table, positive, *of_others)
    return _Seen(to_base, to_partner, between, squared)


def _see_constants(
    plan: MixPlan,
    num_pairs: int,
    vectors: Vectors,
    table: _Table,
    positive: Tensor,
    to_partner: Tensor,
    between: Tensor,
) -> Tensor:
    """Write q.partner and n.partner of partners that are a key or a vector; return |partner|^2."""
    base, partner = plan.base[:, num_pairs:], plan.partner[:, num_pairs:]
    with_key, squared = partner == KEY, torch.ones_like(between)
    if bool(with_key.any()):
        to_partner.copy_(torch.where(with_key, positive.unsqueeze(1), to_partner))
        to_key = dots(vectors.key, vectors.negatives, vectors.own).gather(1, base)
        between.copy_(torch.where(with_key, to_key, between))
    if plan.vectors is None:
        return squared
    # Only these need vectors, and a part of them at a time.
    rows = table.rows(base)
    for some in (partner <= VECTOR).nonzero().split(CHUNK_PAIRS):
        i, j = some.unbind(dim=1)
        vector = plan.vectors[i, VECTOR - partner[i, j]].to(between.dtype)
        to_partner[i, j] = (vectors.query[i] * vector).sum(dim=1)
        between[i, j] = (table.vectors[rows[i, j]] * vector).sum(dim=1)
        squared[i, j] = vector.square().sum(dim=1)
    return squared


def _lengths(plan: MixPlan, num_pairs: int, table: _Table, seen: _Seen) -> Tensor:
    """|(1 - share) n_base + share partner|: its square is 1 - 2 share (1 - share) (1 - between).

    Opposite parents cancel out: a floor keeps their point and its gradient finite.
    """
    share = plan.share
    both = (1 - share).mul_(share)
    squared = torch.addcmul(both.new_ones(()), both, seen.between - 1, value=2)
    if seen.partner_squared is not None:
        others = share[:, num_pairs:].square()
        squared[:, num_pairs:].addcmul_(others, seen.partner_squared - 1)
    floor = torch.finfo(squared.dtype).eps
    pairs = squared[:, :num_pairs]
    if num_pairs and not bool(pairs.amin() >= SHORT):
        i, j = (pairs < SHORT).nonzero().unbind(dim=1)
        base, partner = (table.rows(each[:, :num_pairs])[i, j] for each in plan[:2])
        pairs[i, j] = _measured_squares(base, partner, share[i, j], table.vectors)
    return squared.clamp_(min=floor).sqrt_()


def _through_query(
    plan: MixPlan,
    seen: _Seen,
    length: Tensor,
    similarity: Tensor,
    from_base: Tensor,
    from_partner: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The derivatives where the query inside h' is a variable too, and `Points.unseen`."""
    constant, rest = plan.partner != QUERY, 1 - plan.share
    # d similarity / d (q.n), over its value with h' constant: in [0.5, 1] where q.n >= 0.
    turn = rest * (rest + plan.share * seen.to_base) / length.square()
    from_base = torch.where(constant, from_base, from_base * turn)
    from_partner = torch.where(constant, from_partner, 0.0)
    unseen = (similarity - from_base * seen.to_base).masked_fill_(constant, 0.0)
    return from_base, from_partner, unseen


def _row_dots(left: Tensor, right: Tensor, table: Tensor) -> Tensor:
    """The inner products of two rows of the table each, n_base.n_partner."""
    first, second = left.contiguous().view(-1), right.contiguous().view(-1)
    if _ROW_DOTS is not None:
        products: Tensor = _ROW_DOTS(table, table, second, second[:1], first, 0)
    else:
        parts = zip(first.split(CHUNK_PAIRS), second.split(CHUNK_PAIRS), strict=True)
        products = torch.cat([(table[i] * table[j]).sum(dim=1) for i, j in parts])
    return products.view_as(left)


def _measured_squares(base: Tensor, partner: Tensor, share: Tensor, table: Tensor) -> Tensor:
    """Eq. 3's sums themselves, squared, a cache-sized part at a time."""
    parts = zip(*(each.split(CHUNK_PAIRS) for each in (base, partner, share)), strict=True)
    sums = (torch.lerp(table[i], table[j], s.unsqueeze(1)) for i, j, s in parts)
    return torch.cat([each.square().sum(dim=1) for each in sums])


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
