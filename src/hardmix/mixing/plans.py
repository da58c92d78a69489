"""The paper's method, in the paper's order (Sec. 4): rank the negatives, mix the hardest.

Axes: batch, K (negatives), N (hardest ones), S (synthetic points), dim. Every embedding has
unit length. A synthetic point is a line of a plan, not a vector:

    point = normalize((1 - share) * negatives[base] + share * partner)
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from hardmix.errors import InputError
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

QUERY = -1
"""A partner that is the query itself (Sec. 4.2)."""
KEY = -2
"""A partner that is the query's key (App. B.2)."""
NO_POINT = -1
"""A base where no point could be made: its logit is -inf."""
CHUNK_ELEMENTS = 2**22
"""Similarities worked on at once: 16 MB in float32, and still enough rows for a fast matmul."""


@dataclass(frozen=True)
class HardestNegatives:
    """The set of a query's N closest negatives (Sec. 4.1), in slot order.

    Slot order, not rank: a last-bit difference between two similarities then cannot change which
    negative a random draw picks. The draw is uniform over the set, so the method is the same.
    """

    positions: Int[Tensor, "batch N"]
    """Rows of the negatives, ascending; the valid ones first, then -1."""
    count: Int[Tensor, " batch"]
    """How many are valid: less than N where fewer negatives are allowed."""


class MixPlan(NamedTuple):
    """Which synthetic points to make (Sec. 4): one line per query and point."""

    base: Int[Tensor, "batch S"]
    """Row of the negatives, or -1: no point could be made, its logit is -inf."""
    partner: Int[Tensor, "batch S"]
    """Row of the negatives, or `QUERY`, or `KEY`."""
    share: Float[Tensor, "batch S"]
    """The partner's share: 1 - alpha in Eq. 3, beta in Sec. 4.2."""
    scale: Float[Tensor, "batch S"] | None = None
    """Optional factor on the point's logit (App. B.2)."""
    weight: Float[Tensor, "batch S"] | None = None
    """Optional factor on the point's term in the sum of Eq. 1, exp(logit)."""


class Embeddings(NamedTuple):
    """The vectors behind the similarities, for strategies that look beyond them."""

    query: Float[Tensor, "batch dim"]
    """q: the query encoder's, of one view."""
    key: Float[Tensor, "batch dim"]
    """k: the key encoder's, of the other view of the same images."""
    negatives: Float[Tensor, "K dim"]
    """n: the keys in the queue."""


@runtime_checkable
class Strategy(Protocol):
    """Turns similarities into a plan; any callable of this form may stand for a strategy's name."""

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
        """A plan for every query of the batch."""


def plan_mochi(
    similarity: Float[Tensor, "batch K"],
    *,
    num_hardest: int,
    num_pairs: int,
    num_with_query: int,
    exclude: Bool[Tensor, "batch K"] | None = None,
    generator: torch.Generator | None = None,
    embeddings: Embeddings | None = None,
) -> MixPlan:
    """Sec. 4: MoCHi (N, s, s'), a plan of s pair points, then s' points mixed with the query.

    `similarity` is q.n for every query and negative; `exclude` marks negatives that must not be
    mixed. `embeddings` is not needed here: other strategies look at it.
    """
    check_counts(num_hardest, num_pairs, num_with_query)
    hardest = hardest_negatives(similarity, num_hardest, exclude)
    pairs = mix_pairs(hardest, num_pairs, similarity.dtype, generator)
    with_query = mix_with_query(hardest, num_with_query, similarity.dtype, generator)
    return join(pairs, with_query)


def hardest_negatives(
    similarity: Float[Tensor, "batch K"],
    num_hardest: int,
    exclude: Bool[Tensor, "batch K"] | None = None,
) -> HardestNegatives:
    """Sec. 4.1: the first N of the negatives ordered by similarity, never an excluded one."""
    check_not_transformed()
    check_similarity(similarity)
    check_counts(num_hardest)
    check_num_hardest(num_hardest, similarity.shape[1])
    check_mask(exclude, len(similarity), similarity.shape[1])
    similarity = similarity.detach()
    rows = row_chunks(*similarity.shape)
    if exclude is None:
        positions = torch.cat([_largest_in_two_stages(similarity[r], num_hardest) for r in rows])
        return HardestNegatives(positions, positions.new_full((len(positions),), num_hardest))
    allowed = (similarity[r].masked_fill(exclude[r], -torch.inf) for r in rows)
    positions = torch.cat([_largest_in_two_stages(some, num_hardest) for some in allowed])
    valid = ~exclude.gather(1, positions)
    after_all = similarity.shape[1]
    positions = positions.masked_fill(~valid, after_all).sort(dim=1).values
    return HardestNegatives(positions.masked_fill(positions == after_all, -1), valid.sum(dim=1))


def mix_pairs(
    hardest: HardestNegatives,
    num_pairs: int,
    dtype: torch.dtype = torch.float32,
    generator: torch.Generator | None = None,
) -> MixPlan:
    """Eq. 3: mix pairs of the hardest negatives, alpha ~ U(0, 1), for every query and point.

    The paper says "randomly chosen": pairs are drawn uniformly, with replacement over the points
    (s > N is legal), and always of two different negatives.
    """
    check_counts(2, num_pairs=num_pairs)
    first, other, alpha = draw(hardest, num_pairs, 3, dtype, generator)
    count = hardest.count.unsqueeze(1)
    i, j = pick(first, count), pick(other, count - 1)
    j += j >= i  # one of the others: each as likely
    base = hardest.positions.gather(1, i).masked_fill(count < 2, NO_POINT)
    j = j.minimum((count - 1).clamp(min=0))
    partner = hardest.positions.gather(1, j).clamp(min=0)  # a row also where no point is made
    return MixPlan(base, partner, 1 - open_interval(alpha, 1.0))


def mix_with_query(
    hardest: HardestNegatives,
    num_with_query: int,
    dtype: torch.dtype = torch.float32,
    generator: torch.Generator | None = None,
) -> MixPlan:
    """Sec. 4.2: mix the query into its hardest negatives, beta ~ U(0, 0.5)."""
    check_counts(1, num_with_query=num_with_query)
    which, beta = draw(hardest, num_with_query, 2, dtype, generator)
    base = hardest.positions.gather(1, pick(which, hardest.count.unsqueeze(1)))
    return MixPlan(base, torch.full_like(base, QUERY), open_interval(beta, 0.5))


def materialize(
    plan: MixPlan,
    query: Float[Tensor, "batch dim"],
    key: Float[Tensor, "batch dim"],
    negatives: Float[Tensor, "K dim"],
) -> Float[Tensor, "batch S dim"]:
    """Eq. 3 and Sec. 4.2 as vectors: the reference for tests, and for pictures.

    Points that could not be made are zero. `contrast` never calls this.
    """
    check_shapes(query, key, negatives)
    check_plan(plan, len(query))
    check_plan_rows(plan, len(negatives))
    base = negatives[plan.base.clamp(min=0)]
    partner = negatives[plan.partner.clamp(min=0)]
    partner = torch.where((plan.partner == QUERY).unsqueeze(-1), query.unsqueeze(1), partner)
    partner = torch.where((plan.partner == KEY).unsqueeze(-1), key.unsqueeze(1), partner)
    share = plan.share.unsqueeze(-1)
    points = normalize((1 - share) * base + share * partner, dim=-1)
    return points.masked_fill((plan.base == NO_POINT).unsqueeze(-1), 0.0)


def join(*plans: MixPlan) -> MixPlan:
    """One plan with the points of all, in this order."""
    fields: list[Any] = []
    for parts in zip(*plans, strict=True):
        if all(part is None for part in parts):
            fields.append(None)
            continue
        given = [
            torch.ones_like(plan.share) if part is None else part
            for plan, part in zip(plans, parts, strict=True)
        ]
        fields.append(torch.cat(given, dim=1))
    return MixPlan(*fields)


def row_chunks(batch: int, width: int) -> list[slice]:
    """Parts of a (batch, width) tensor, each small enough to be worked on without much memory."""
    rows = max(1, CHUNK_ELEMENTS // width)
    return [slice(start, min(start + rows, batch)) for start in range(0, batch, rows)]


class RowsGenerator(torch.Generator):
    """Draws for the batch of all processes and keeps the rows of one: its `part` of `parts`.

    Every process draws the same, so that a query's points do not depend on how many there are.
    """

    part: int = 0
    parts: int = 1


def draw(
    hardest: HardestNegatives,
    num_points: int,
    num_each: int,
    dtype: torch.dtype,
    generator: torch.Generator | None,
) -> tuple[Float[Tensor, "batch S"], ...]:
    """Uniform numbers in [0, 1): `num_each` for every query and point, on the negatives' device.

    A generator may live on another device than the negatives.
    """
    device = hardest.positions.device
    source = device if generator is None else generator.device
    parts, part = getattr(generator, "parts", 1), getattr(generator, "part", 0)
    shape = (parts * len(hardest.positions), num_each, num_points)
    uniform = torch.empty(shape, dtype=dtype, device=source).uniform_(generator=generator)
    return uniform.chunk(parts)[part].to(device).unbind(1)


def pick(
    uniform: Float[Tensor, "batch S"], count: Int[Tensor, "batch 1"]
) -> Int[Tensor, "batch S"]:
    """Uniform numbers in [0, 1) to whole numbers below each row's count (0 where that is 0)."""
    highest = (count - 1).clamp(min=0)
    return torch.minimum((uniform * count).long(), highest)


def open_interval(uniform: Float[Tensor, "batch S"], end: float) -> Float[Tensor, "batch S"]:
    """Uniform numbers in [0, 1) to the open interval (0, end)."""
    eps = torch.finfo(uniform.dtype).eps
    return (uniform * end).clamp(eps, end - eps)


def _largest_in_two_stages(values: Float[Tensor, "batch K"], number: int) -> Int[Tensor, "batch N"]:
    """Positions of the `number` largest of each row, ascending; exact, and faster than one top-k.

    The `number` largest lie in the `number` blocks with the largest maxima. Blocks are strided,
    so that their maxima are one elementwise pass, and blocks and rounds come in slot order.
    """
    batch, width = values.shape
    per_block = int((width / number) ** 0.5)  # minimises blocks + candidates
    if per_block < 2:
        return _largest(values, number)
    num_blocks = width // per_block
    in_blocks = values[:, : per_block * num_blocks].unflatten(1, (per_block, num_blocks))
    blocks = _largest(in_blocks.amax(dim=1), number).unsqueeze(1).expand(batch, per_block, number)
    candidates = in_blocks.gather(2, blocks).flatten(1)
    rounds = torch.arange(per_block, device=values.device).unsqueeze(1)
    slots = (blocks + rounds * num_blocks).flatten(1)
    if width % per_block:
        candidates = torch.cat([candidates, values[:, per_block * num_blocks :]], dim=1)
        rest = torch.arange(per_block * num_blocks, width, device=values.device)
        slots = torch.cat([slots, rest.expand(batch, -1)], dim=1)
    return slots.gather(1, _largest(candidates, number))


def _largest(values: Float[Tensor, "batch width"], number: int) -> Int[Tensor, "batch N"]:
    """Positions of the `number` largest of each row, ascending; among equals the first."""
    if values.device.type != "cpu" or torch.compiler.is_compiling():
        return values.topk(number, dim=1, sorted=False).indices.sort(dim=1).values
    # NumPy's partition is vectorised: 4 times faster here than topk, and no sort is needed after.
    array = values.numpy()
    width = array.shape[1]
    threshold = np.partition(array, width - number, axis=1)[:, width - number, None]
    chosen = array >= threshold
    surplus = np.count_nonzero(chosen, axis=1) - number
    if surplus.min() < 0:  # comparisons with NaN are false
        raise InputError("similarity holds NaN: it cannot be ranked; look at the encoder's output.")
    for row in np.flatnonzero(surplus):  # ties with the threshold: the last of the equals go
        chosen[row, np.flatnonzero(array[row] == threshold[row])[-surplus[row] :]] = False
    positions = np.flatnonzero(chosen).reshape(-1, number)
    return torch.from_numpy(positions - np.arange(len(array))[:, None] * width)
