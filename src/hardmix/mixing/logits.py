"""Logits, the currency of the loss: similarities over the temperature, of key, negatives, points.

    positive = q.k / tau        real = q.n / tau        synthetic = q.h / tau

A point is a constant (Eq. 2), so its logit is linear in the query, with coefficients that are
computed once from inner products:

    q.h = to_base q.n_base + to_partner q.partner
    to_base = (1 - share) / length,  to_partner = share / length
    length^2 = 1 - 2 share (1 - share) (1 - n_base.partner)

With the query as its partner, n_base.partner is q.n, which is there already; with another negative
it takes one look at two rows. Two functions lead from a plan to logits: `by_coefficients` makes no
vector, for CPUs; `by_vectors` makes them all, in few launches, for devices and `torch.compile`.
`query / tau` comes first, so the gradients of everything follow from autograd.

Axes: batch, K (shared negatives), M (negatives of each query's own), columns (K + M), S (points),
V (a plan's own vectors), dim. Every embedding has unit length.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import embedding_bag, pad
from torch.utils.checkpoint import checkpoint

from hardmix.mixing.plans import NO_POINT, QUERY, VECTOR, MixPlan
from hardmix.mixing.ranking import in_one_piece, joined, row_chunks, rows_of
from hardmix.mixing.unit_length import row_products

CHUNK_PAIRS = 2**12
"""Pairs whose vectors are made at once: 2 MB at 128 dimensions, about what caches hold."""
SHORT = 2**-6
"""Squared lengths below this are measured: 1 - 2 share (1 - share) (1 - n.n) loses digits there."""
_ROW_DOTS: Any = getattr(torch.ops.aten, "_embedding_bag_per_sample_weights_backward", None)
"""(left, right, rows of right, any, rows of left, 0) to inner products of rows, without copying a
row: the gradient of an embedding bag's weights. It is private to PyTorch, so it may be missing."""


class Embeddings(NamedTuple):
    """The vectors of a batch, of unit length."""

    query: Float[Tensor, "batch dim"]
    """q: the query encoder's output for one view."""
    key: Float[Tensor, "batch dim"]
    """k: the key encoder's output for the other view of the same images."""
    negatives: Float[Tensor, "K dim"]
    """n: negatives that all queries share, such as the keys in the queue."""
    own: Float[Tensor, "batch M dim"] | None = None
    """Further negatives of each query's own: columns K to K + M - 1 of the similarities."""

    @property
    def num_own(self) -> int:
        """M."""
        return 0 if self.own is None else self.own.shape[1]


class Points(NamedTuple):
    """A plan's points as linear functions of logits, pair by pair.

    logit = to_base * real[base] + to_row * real[row] + to_other * other: the second term for the
    first columns, which mix two negatives; the third for columns `first_other` and on.
    """

    base: Int[Tensor, "batch S"]
    """Column of the real logits; 0 where no point could be made."""
    to_base: Float[Tensor, "batch S"]
    row: Int[Tensor, "batch pairs"]
    """Column of the real logits."""
    to_row: Float[Tensor, "batch pairs"]
    other: Float[Tensor, "batch others"]
    """The logit of the query, its key, or a vector of the plan."""
    to_other: Float[Tensor, "batch others"]
    first_other: int

    def logits(
        self,
        real: Float[Tensor, "batch columns"],
        of_base: Float[Tensor, "batch S"] | None = None,
    ) -> Float[Tensor, "batch S"]:
        """Return the points' logits; `of_base`, if it is known, is that of their bases."""
        logits = self.to_base * (real.gather(1, self.base) if of_base is None else of_base)
        logits[:, : self.row.shape[1]].addcmul_(self.to_row, real.gather(1, self.row))
        logits[:, self.first_other :].addcmul_(self.to_other, self.other)
        return logits


class Logits(NamedTuple):
    """The logits that every loss of the family reads, and the vectors behind them."""

    positive: Float[Tensor, " batch"]
    """q.k / tau."""
    real: Float[Tensor, "batch columns"]
    """q.n / tau of all negatives, excluded ones too."""
    synthetic: Float[Tensor, "batch S"]
    """q.h / tau of every point, times the plan's `scale`; -inf where no point could be made. If it
    was made by coefficients, it is detached, and gradients reach it through `log_mass`."""
    temperature: float | Float[Tensor, "..."]
    """tau."""
    scaled: Float[Tensor, "batch dim"]
    """q / tau."""
    embeddings: Embeddings
    """The vectors behind them."""
    plan: MixPlan | None = None
    """The plan whose points these are."""
    points: Points | None = None
    """How `synthetic` follows from `real`, if it was made by coefficients."""
    unscaled: Float[Tensor, "batch S"] | None = None
    """The points' logits before the plan's `scale`."""
    ids: Int[Tensor, " K"] | None = None
    """Ids of the shared negatives, such as items; -1 if unknown."""

    @property
    def log_point_weights(self) -> Float[Tensor, "batch S"] | None:
        """The log of each point's weight in the sum of Eq. 1."""
        if self.plan is None or self.plan.weight is None:
            return None
        return self.plan.weight.log()


def logits(
    query: Float[Tensor, "batch dim"],
    key: Float[Tensor, "batch dim"],
    negatives: Float[Tensor, "K dim"],
    plan: MixPlan | None = None,
    *,
    temperature: float | Float[Tensor, "..."],
    own: Float[Tensor, "batch M dim"] | None = None,
    through_query: bool = False,
) -> Logits:
    """Return the logits of the key, of every negative, and of every point of a plan.

    All vectors must have unit length and one dtype, float32 or better; nothing is checked. See
    `hardmix.contrast` for the arguments. On a CPU gradients reach `synthetic` through `log_mass`.
    """
    embeddings = Embeddings(query, key, negatives, own)
    return logits_of(embeddings, plan, temperature=temperature, through_query=through_query)


def logits_of(
    embeddings: Embeddings,
    plan: MixPlan | None = None,
    *,
    temperature: float | Float[Tensor, "..."],
    through_query: bool = False,
) -> Logits:
    """Return `logits` of a batch's vectors."""
    query, key, negatives, own = embeddings
    scaled = query / temperature
    # One launch on a device; on a CPU no matrix product, which autocast would change in backward.
    one_piece = in_one_piece(query)
    positive = row_products(scaled, key).squeeze(1) if one_piece else (scaled * key).sum(dim=1)
    real = dots(scaled, negatives, own)
    logits = Logits(positive, real, real[:, :0], temperature, scaled, embeddings)
    return logits if plan is None else with_points(logits, plan, through_query=through_query)


def with_points(logits: Logits, plan: MixPlan, *, through_query: bool = False) -> Logits:
    """Return the logits with those of a plan's points."""
    if plan.base.shape[1] == 0:
        return logits
    way = by_vectors if in_one_piece(logits.real) else by_coefficients
    synthetic, points = way(logits, plan, through_query)
    unscaled = synthetic
    if plan.scale is not None:
        synthetic = _without_missing(synthetic * plan.scale, plan)
    if points is not None and plan.scale is not None:
        points = points._replace(
            to_base=points.to_base * plan.scale,
            to_row=points.to_row * plan.scale[:, : points.row.shape[1]],
            to_other=points.to_other * plan.scale[:, points.first_other :],
        )
    return logits._replace(
        synthetic=synthetic,
        unscaled=unscaled.detach(),
        plan=plan,
        points=points,
    )


def by_coefficients(
    logits: Logits, plan: MixPlan, through_query: bool
) -> tuple[Float[Tensor, "batch S"], Points | None]:
    """Sec. 4 without vectors: q.h / tau from logits that are there, and from n_base.partner."""
    real, embeddings = logits.real.detach(), logits.embeddings
    base, share = _rows_or_first(plan.base), plan.share.to(real.dtype)
    pairs, first_other = _kinds(plan)
    row, mark = plan.partner[:, :pairs], plan.partner[:, first_other:]
    of_base, table = real.gather(1, base), _table(embeddings)
    with torch.set_grad_enabled(through_query and torch.is_grad_enabled()):
        to_query = of_base[:, first_other:]
        if through_query:  # the same, differentiable
            vectors = table[_rows(base[:, first_other:], embeddings)]
            to_query = torch.bmm(vectors, logits.scaled.unsqueeze(2)).squeeze(2)
        others = _other_partners(logits, plan, base[:, first_other:], mark, to_query, table)
        between = others.between
        if pairs:
            row = _rows_or_first(row)
            rows = _rows(base[:, :pairs], embeddings), _rows(row, embeddings)
            of_pairs = row_dots(table, rows[0], table, rows[1])
            if first_other < pairs:
                between = torch.where(mark >= 0, of_pairs, between)
            else:
                between = torch.cat([of_pairs, between], dim=1)
        squared = _squared_lengths(between, share, others.squared)
        squared = _measured_where_short(squared, pairs, base, plan, table, embeddings)
        to_base, to_partner = _coefficients(squared, share)
    del between, squared  # before further memory is taken
    other = others.logit
    if through_query:
        other = torch.where(mark == QUERY, 1 / logits.temperature, other)  # q.q is 1 for every q
    to_row, to_other = to_partner[:, :pairs], to_partner[:, first_other:]
    if first_other < pairs:
        to_row, to_other = to_row.where(mark >= 0, 0.0), to_other.where(mark < 0, 0.0)
    points = Points(base, to_base, row, to_row, other, to_other, first_other)
    with torch.no_grad():
        synthetic = points.logits(real, of_base)
    return (synthetic if base is plan.base else _without_missing(synthetic, plan)), points


def _squared_lengths(between: Tensor, share: Tensor, of_others: Tensor | None) -> Tensor:
    """|(1 - share) n + share p|^2 = 1 - 2 share (1 - share) (1 - n.p), at unit length.

    `of_others` is |p|^2 of the last columns, unless it is 1.
    """
    squared = (between - 1).mul_((1 - share) * share).mul_(2).add_(1)
    if of_others is None:
        return squared
    first = share.shape[1] - of_others.shape[1]
    return squared + pad(share[:, first:].square() * (of_others - 1), (first, 0))


def _coefficients(squared: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """to_base = (1 - share) / length, to_partner = share / length."""
    # Opposite parents cancel out: a floor keeps their point and its gradient finite.
    length = squared.clamp(min=torch.finfo(squared.dtype).eps).sqrt()
    return (1 - share) / length, share / length


def _rows_or_first(rows: Tensor) -> Tensor:
    """Return rows of negatives, with 0 where there is none: a mark, or no point."""
    return rows if rows.numel() == 0 or bool(rows.amin() >= 0) else rows.clamp(min=0)


def by_vectors(
    logits: Logits, plan: MixPlan, through_query: bool
) -> tuple[Float[Tensor, "batch S"], Points | None]:
    """Sec. 4 with vectors: few launches, and no sum of floats in random order.

    At most 1 GiB of vectors is made at once; if they are more, the backward pass makes them again.
    """
    table, base, partner = _rows_of_all(logits.embeddings, plan)
    chunks = row_chunks(len(base), base.shape[1] * table.shape[1], one_piece=True)
    share, with_query = plan.share.to(table.dtype), None
    if through_query:
        with_query = plan.partner == QUERY
    parts = []
    for rows in chunks:
        inputs: list[Any] = [
            None if tensor is None else rows_of(tensor, rows)
            for tensor in (logits.scaled, base, partner, share, with_query)
        ]
        first = torch.arange(0, 2 * inputs[1].numel(), 2, device=table.device)
        inputs = [table, first, logits.temperature, *inputs]
        if len(chunks) == 1:
            parts.append(_vector_logits(*inputs))
        else:
            parts.append(
                checkpoint(_vector_logits, *inputs, use_reentrant=False, preserve_rng_state=False)
            )
    return _without_missing(joined(parts), plan), None


def _without_missing(synthetic: Tensor, plan: MixPlan) -> Tensor:
    """Return points' logits with -inf where no point could be made."""
    return synthetic.masked_fill(plan.base == NO_POINT, -torch.inf)


def _vector_logits(
    table: Tensor,
    first: Tensor,
    temperature: float | Tensor,
    scaled: Tensor,
    base: Tensor,
    partner: Tensor,
    share: Tensor,
    with_query: Tensor | None,
) -> Tensor:
    """Return q.h / tau for points whose parents are rows of the table.

    `first` is the place of each point's first parent among all: 0, 2, 4 and so on.
    """
    parents = torch.stack([base, partner], dim=-1).view(-1)
    shares = torch.stack([1 - share, share], dim=-1).view(-1)
    mixed = embedding_bag(parents, table, first, mode="sum", per_sample_weights=shares)
    mixed = mixed.view(*base.shape, -1)
    # Opposite parents cancel out: a floor keeps their point and its gradient finite.
    length = torch.linalg.vector_norm(mixed, dim=-1).clamp_(min=torch.finfo(share.dtype).eps ** 0.5)
    synthetic: Tensor = torch.bmm(mixed, scaled.unsqueeze(2)).squeeze(2) / length
    if with_query is None:
        return synthetic
    # h' with the query as a variable, by the same closed form as on a CPU.
    of_base = torch.bmm(table[base], scaled.unsqueeze(2)).squeeze(2)
    squared = 1 - 2 * share * (1 - share) * (1 - of_base * temperature)
    closed = ((1 - share) * of_base + share / temperature) / squared.clamp(
        min=torch.finfo(share.dtype).eps
    ).sqrt()
    return torch.where(with_query, closed, synthetic)


def dots(
    vectors: Float[Tensor, "batch dim"],
    negatives: Float[Tensor, "K dim"],
    own: Float[Tensor, "batch M dim"] | None = None,
) -> Float[Tensor, "batch columns"]:
    """Return the inner products with the shared negatives, then with each query's own."""
    shared = vectors @ negatives.T
    if own is None:
        return shared
    return torch.cat([shared, torch.bmm(own, vectors.unsqueeze(2)).squeeze(2)], dim=1)


def row_dots(
    left: Float[Tensor, "rows dim"],
    left_rows: Int[Tensor, "batch S"],
    right: Float[Tensor, "others dim"],
    right_rows: Int[Tensor, "batch S"],
) -> Float[Tensor, "batch S"]:
    """Return the inner products of rows of two tables."""
    first, second = left_rows.contiguous().view(-1), right_rows.contiguous().view(-1)
    if _ROW_DOTS is not None:
        products: Tensor = _ROW_DOTS(left, right, second, second[:1], first, 0)
    else:
        parts = zip(first.split(CHUNK_PAIRS), second.split(CHUNK_PAIRS), strict=True)
        products = torch.cat([(left[i] * right[j]).sum(dim=1) for i, j in parts])
    return products.view_as(left_rows)


def _kinds(plan: MixPlan) -> tuple[int, int]:
    """Return how many columns may mix two negatives, and the first that may mix something else.

    Every strategy here puts its pairs first. In any other plan each column may be of either kind.
    """
    partner = plan.partner.numpy()
    pairs = int((partner[0] >= 0).sum())
    if (partner[:, :pairs] >= 0).all() and (partner[:, pairs:] < 0).all():
        return pairs, pairs
    return partner.shape[1], 0


class _OtherPartners(NamedTuple):
    """Partners that are not negatives: the query, its key, or a vector of the plan; constants."""

    logit: Float[Tensor, "batch others"]
    """q.partner / tau; differentiable."""
    between: Float[Tensor, "batch others"]
    """n_base.partner."""
    squared: Float[Tensor, "batch others"] | None
    """|partner|^2, unless all are 1."""


def _other_partners(
    logits: Logits, plan: MixPlan, base: Tensor, mark: Tensor, to_query: Tensor, table: Tensor
) -> _OtherPartners:
    query, key = logits.embeddings.query.detach(), logits.embeddings.key.detach()
    between = to_query * logits.temperature
    if (mark.numpy() >= QUERY).all():
        with torch.enable_grad():
            own = (logits.scaled * query).sum(dim=1, keepdim=True)
            logit = own.expand_as(between)
        return _OtherPartners(logit, between, None)
    partners = torch.stack([query, key], dim=1)
    if plan.vectors is not None:
        partners = torch.cat([partners, plan.vectors.to(partners.dtype)], dim=1)
    which = (QUERY - mark).clamp(min=0)  # QUERY is the first of them, KEY the second
    with torch.enable_grad():
        logit = (partners * logits.scaled.unsqueeze(1)).sum(dim=-1).gather(1, which)
    block = partners.shape[1] * torch.arange(len(base), device=base.device).unsqueeze(1)
    rows = _rows(base, logits.embeddings)
    with_partner = row_dots(table, rows, partners.flatten(0, 1), which + block)
    squared = None
    if plan.vectors is not None:
        squared = partners.square().sum(dim=-1).gather(1, which)
    return _OtherPartners(logit, torch.where(mark == QUERY, between, with_partner), squared)


def _measured_where_short(
    squared: Tensor, pairs: int, base: Tensor, plan: MixPlan, table: Tensor, embeddings: Embeddings
) -> Tensor:
    """Return squared lengths, measured for pairs whose sum is so short that digits are lost."""
    of_pairs = squared.detach()[:, :pairs]
    if pairs == 0 or bool(of_pairs.amin() >= SHORT):
        return squared
    i, j = ((of_pairs < SHORT) & (plan.partner[:, :pairs] >= 0)).nonzero().unbind(dim=1)
    rows, share = _rows(base, embeddings), plan.share.to(table.dtype)
    columns = rows[i, j], _rows(plan.partner, embeddings)[i, j], share[i, j]
    parts = zip(*(column.split(CHUNK_PAIRS) for column in columns), strict=True)
    sums = (torch.lerp(table[a], table[b], s.unsqueeze(1)) for a, b, s in parts)
    lengths = [vectors.square().sum(dim=1) for vectors in sums]
    return squared.index_put((i, j), torch.cat(lengths)) if lengths else squared


def _table(embeddings: Embeddings) -> Float[Tensor, "rows dim"]:
    """Return all negatives as rows of one table: the shared ones, then every query's own."""
    negatives, own = embeddings.negatives.detach(), embeddings.own
    return negatives if own is None else torch.cat([negatives, own.detach().flatten(0, 1)])


def _rows(columns: Int[Tensor, "batch S"], embeddings: Embeddings) -> Int[Tensor, "batch S"]:
    """Return the rows of the table for columns of the logits."""
    if embeddings.own is None:
        return columns
    block = embeddings.num_own * torch.arange(len(columns), device=columns.device).unsqueeze(1)
    return torch.where(columns >= len(embeddings.negatives), columns + block, columns)


def _rows_of_all(
    embeddings: Embeddings, plan: MixPlan
) -> tuple[Float[Tensor, "rows dim"], Int[Tensor, "batch S"], Int[Tensor, "batch S"]]:
    """Return one table with all parents as rows, constants, and the rows of bases and partners."""
    table, batch = _table(embeddings), len(plan.base)
    number = len(table)
    parts = [table, embeddings.query.detach(), embeddings.key.detach()]
    # QUERY is -1 and KEY is -2: `batch` rows further down for each.
    above = torch.arange(number - batch, number, device=table.device).unsqueeze(1)
    partner = torch.where(
        plan.partner < 0,
        torch.add(above, plan.partner, alpha=-batch),
        _rows(plan.partner, embeddings),
    )
    if plan.vectors is not None:
        block = plan.vectors.shape[1] * (above - (number - batch))
        vector = number + 2 * batch + VECTOR + block - plan.partner
        partner = torch.where(plan.partner <= VECTOR, vector, partner)
        parts.append(plan.vectors.flatten(0, 1).to(table.dtype))
    return torch.cat(parts), _rows(plan.base, embeddings).clamp(min=0), partner
