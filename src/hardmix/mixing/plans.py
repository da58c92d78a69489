"""The paper's method, in the paper's order (Sec. 4): rank the negatives, mix the hardest.

Axes: batch, K (negatives), N (hardest ones), S (synthetic points), dim. Every embedding has
unit length. A synthetic point is a line of a plan, not a vector:

    point = normalize((1 - share) * negatives[base] + share * partner)
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hardmix.mixing.checks import (
    check_counts,
    check_mask,
    check_not_transformed,
    check_num_hardest,
    check_similarity,
)
from hardmix.mixing.ranking import (
    in_one_piece,
    joined,
    largest,
    row_chunks,
    rows_of,
)
from hardmix.mixing.row_draws import uniform_rows

QUERY = -1
"""Marks the query itself as the partner (Sec. 4.2)."""
KEY = -2
"""Marks the query's key as the partner (App. B.2)."""
VECTOR = -3
"""Marks the first of the plan's own `vectors` as the partner; -4 is the second, and so on."""
NO_POINT = -1
"""Marks, as the base, that no point could be made: its logit is -inf."""


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
    """Whether every query is known to have N valid positions."""


class MixPlan(NamedTuple):
    """Which synthetic points to make (Sec. 4): one entry per query and point."""

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
    """Optional partners that are neither a negative nor the query or its key, of any length: the
    noise and the signs of SynCo. Of each query's own."""


class Embeddings(NamedTuple):
    """The vectors behind the similarities, for strategies that need them."""

    query: Float[Tensor, "batch dim"]
    """q: the query encoder's output for one view."""
    key: Float[Tensor, "batch dim"]
    """k: the key encoder's output for the other view of the same images."""
    negatives: Float[Tensor, "K dim"]
    """n: the keys in the queue."""


class EmbeddingsWithOwn(Embeddings):
    """The same where each query has negatives of its own too."""

    own: Float[Tensor, "batch M dim"]
    """Columns K to K + M - 1 of the similarities."""


class Vectors(NamedTuple):
    """All vectors of a batch, of unit length."""

    query: Float[Tensor, "batch dim"]
    key: Float[Tensor, "batch dim"]
    negatives: Float[Tensor, "K dim"]
    own: Float[Tensor, "batch M dim"] | None = None
    """Further negatives of each query's own: columns K to K + M - 1 of the similarities."""

    def for_strategies(self) -> Embeddings:
        """Return them as strategies get them."""
        if self.own is None:
            return Embeddings(*self[:3])
        embeddings = EmbeddingsWithOwn(*self[:3])
        embeddings.own = self.own
        return embeddings


def vectors_of(embeddings: Embeddings, dtype: torch.dtype) -> Vectors:
    """Return what a strategy was given, in one dtype."""
    own = embeddings.own.to(dtype) if isinstance(embeddings, EmbeddingsWithOwn) else None
    query, key, negatives = (each.to(dtype) for each in embeddings)
    return Vectors(query, key, negatives, own)


@runtime_checkable
class DrawsByRow(Protocol):
    """In place of a generator, or a generator itself: makes the numbers of each query.

    `torch.compile` takes it into its graph, unless it is a torch.Generator.
    """

    def uniform_rows(
        self, rows: int, columns: int, dtype: torch.dtype, device: torch.device
    ) -> Float[Tensor, "rows columns"]:
        """Return uniform numbers in [0, 1), different in every call."""


@runtime_checkable
class Strategy(Protocol):
    """The signature of a strategy: any such callable may be passed in place of a name."""

    def __call__(
        self,
        similarity: Float[Tensor, "batch K"],
        *,
        num_hardest: int,
        num_pairs: int,
        num_with_query: int,
        exclude: Bool[Tensor, "batch K"] | None = None,
        generator: torch.Generator | None = None,
        embeddings: Embeddings | None = None,
    ) -> MixPlan:
        """Return a plan for every query of the batch."""


def plan_mochi(
    similarity: Float[Tensor, "batch K"],
    *,
    num_hardest: int,
    num_pairs: int,
    num_with_query: int,
    exclude: Bool[Tensor, "batch K"] | None = None,
    generator: torch.Generator | DrawsByRow | None = None,
    embeddings: Embeddings | None = None,
) -> MixPlan:
    """Return MoCHi's plan (Sec. 4): s pair points, then s' points mixed with the query.

    `similarity` is q.n for every query and negative; `exclude` marks negatives that must not be
    mixed. `embeddings` is not used here; other strategies need it.
    """
    check_counts(num_hardest, num_pairs, num_with_query)
    hardest = hardest_negatives(similarity, num_hardest, exclude)
    return mix(hardest, num_pairs, num_with_query, similarity.dtype, generator)


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
    similarity = similarity.detach()
    one_piece = in_one_piece(similarity)
    found = []
    for rows in row_chunks(len(similarity), similarity.shape[1], one_piece):
        some = rows_of(similarity, rows)
        if exclude is not None:
            some = some.masked_fill(rows_of(exclude, rows), -torch.inf)
        found.append(largest(some, num_hardest, all_there=exclude is None))
    positions, count = (joined(list(parts)) for parts in zip(*found, strict=True))
    complete = exclude is None if one_piece else bool(count.min() == num_hardest)
    return HardestNegatives(positions, count, complete)


def mix_pairs(
    hardest: HardestNegatives,
    num_pairs: int,
    dtype: torch.dtype = torch.float32,
    generator: torch.Generator | DrawsByRow | None = None,
) -> MixPlan:
    """Eq. 3: mix pairs of the hardest negatives, alpha ~ U(0, 1), for every query and point.

    The paper says "randomly chosen": here each pair is drawn uniformly from all pairs of two
    different negatives. Pairs may repeat, so s may exceed N.
    """
    return mix(hardest, num_pairs, 0, dtype, generator)


def mix_with_query(
    hardest: HardestNegatives,
    num_with_query: int,
    dtype: torch.dtype = torch.float32,
    generator: torch.Generator | DrawsByRow | None = None,
) -> MixPlan:
    """Sec. 4.2: mix the query into its hardest negatives, beta ~ U(0, 0.5)."""
    return mix(hardest, 0, num_with_query, dtype, generator)


def mix(
    hardest: HardestNegatives,
    num_pairs: int,
    num_with_query: int,
    dtype: torch.dtype = torch.float32,
    generator: torch.Generator | DrawsByRow | None = None,
) -> MixPlan:
    """Sec. 4: s pair points (Eq. 3), then s' points mixed with the query, in one draw."""
    check_counts(2, num_pairs, num_with_query)
    points = num_pairs + num_with_query
    # For each point its base, for each pair its partner, for each point the partner's share.
    uniform = uniform_numbers(hardest, 2 * points + num_pairs, dtype, generator)
    count: int | Tensor = hardest.positions.shape[1]
    if not hardest.complete:
        count = hardest.count.unsqueeze(1)
    # Below 1, a number times n rounds to one below n, in its own dtype.
    uniform[:, :num_pairs].mul_(count - 1)
    uniform[:, num_pairs : points + num_pairs].mul_(count)
    which = uniform[:, : points + num_pairs].long()
    of_base, of_partner = which[:, :num_pairs], which[:, points:]
    # One of the others, each as likely; of less than two the second, which is NO_POINT.
    of_base += of_base >= of_partner
    base, partner = hardest.positions.gather(1, which).split([points, num_pairs], dim=1)
    if isinstance(count, Tensor) and not in_one_piece(partner):
        partner = partner.clamp(min=0)  # a row, also where no point is made; a device needs none
    share = uniform[:, points + num_pairs :].clamp(min=torch.finfo(dtype).eps)
    share[:, num_pairs:].mul_(0.5)
    if num_with_query:
        pairs, partner = partner, torch.full_like(base, QUERY)
        partner[:, :num_pairs] = pairs
    return MixPlan(base, partner, share)


def uniform_numbers(
    hardest: HardestNegatives,
    columns: int,
    dtype: torch.dtype,
    generator: torch.Generator | DrawsByRow | None,
) -> Float[Tensor, "batch columns"]:
    """Uniform numbers in [0, 1) for every query, on the negatives' device.

    The generator may be on another device. If it has a method `uniform_rows`, that method makes the
    numbers, e.g. as a function of the query's place in the batch of all processes.
    """
    device, rows = hardest.positions.device, len(hardest.positions)
    if generator is None:
        return _drawn_from(None, rows, columns, dtype, device)
    if not isinstance(generator, torch.Generator):
        return generator.uniform_rows(rows, columns, dtype, device)
    # A torch.Generator cannot be compiled: the graph has two parts, around this call.
    drawn: Tensor = torch.compiler.disable(_drawn_from)(generator, rows, columns, dtype, device)
    return drawn


def _drawn_from(
    generator: torch.Generator | None,
    rows: int,
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Float[Tensor, "rows columns"]:
    """By PyTorch's generator; on a CPU, where that takes one thread and long, only the seed."""
    if generator is not None and isinstance(generator, DrawsByRow):
        return generator.uniform_rows(rows, columns, dtype, device)
    source = device if generator is None else generator.device
    if source.type == device.type == "cpu" and dtype in (torch.float32, torch.float64):
        seed = torch.randint(2**61, (), generator=generator)
        known = seed if torch.compiler.is_compiling() else int(seed)
        return uniform_rows(known, 0, rows, columns, dtype, device)
    uniform = torch.empty(rows, columns, dtype=dtype, device=source)
    return uniform.uniform_(generator=generator).to(device)


def draw(
    hardest: HardestNegatives,
    num_points: int,
    num_each: int,
    dtype: torch.dtype,
    generator: torch.Generator | DrawsByRow | None,
) -> tuple[Float[Tensor, "batch S"], ...]:
    """Uniform numbers in [0, 1): `num_each` for every query and point, on the negatives' device."""
    uniform = uniform_numbers(hardest, num_each * num_points, dtype, generator)
    return torch.unbind(uniform.reshape(len(uniform), num_each, num_points), dim=1)


def open_interval(uniform: Float[Tensor, "batch S"], end: float) -> Float[Tensor, "batch S"]:
    """Uniform numbers in [0, 1) to the open interval (0, end)."""
    eps = torch.finfo(uniform.dtype).eps
    return (uniform * end).clamp(eps, end - eps)
