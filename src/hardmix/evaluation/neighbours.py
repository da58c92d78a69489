"""The k nearest rows of a bank: exact, in bounded memory, with the bank on one process or on many.

A neighbour is a single whole number, with its similarity in the upper half and its place in the
bank in the lower one. The k highest numbers are then the same however bank and queries are divided,
and among equally similar rows the first ones win. The similarities have the same bits, too: in a
matrix product of few terms whose sides are multiples of 96, every element is computed alike (by
MKL, as tested).

With many processes, each holds its rows of the bank and its queries. In every round, the next
queries of all are gathered, each process searches its own rows, and the process that asked gets the
k best of each and merges them.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor
from torch.nn.functional import normalize, pad

from hardmix.runtime.device import send
from hardmix.runtime.distributed import agree_on_max, gather, group_for, meet, rank, world_size

QUERIES = 4096
"""Queries of all processes in one round."""
ROWS = 4096
"""Rows of the bank on the device at a time."""
CHUNK = 480
"""Queries compared with these rows at a time."""
TERMS = 256
"""Terms of a matrix product."""
TILE = 96
"""The sides of a matrix product are multiples of this."""

LAST = 2**32 - 1
"""Highest place in a bank."""
NOBODY = -(2**63)
"""A number below every neighbour's."""


class NearestRows(NamedTuple):
    """The nearest rows of a part of the queries, the most similar first."""

    queries: slice
    """The part, among this process's queries."""
    similarity: Float[Tensor, "queries k"]
    """Cosine similarity."""
    places: Int64[Tensor, "queries k"]
    """Place in the bank; with many processes, in the bank of all, in rank order."""

    def first(self, k: int) -> "NearestRows":
        """Return only the k most similar rows."""
        return NearestRows(self.queries, self.similarity[:, :k], self.places[:, :k])


@torch.no_grad()
def neighbours(
    bank: Float[Tensor, "rows dim"],
    queries: Float[Tensor, "queries dim"],
    k: int,
    *,
    device: torch.device,
    leave_one_out: bool = False,
    shared: bool = False,
    between: Callable[[], None] = lambda: None,
) -> Iterator[NearestRows]:
    """Yield the k nearest rows of all queries, part by part; fewer if the bank has fewer.

    With `leave_one_out`, the queries are the bank's rows, and no row is its own neighbour. With
    `shared`, every process calls this with its own rows and queries; `between` is then called
    equally often on each.
    """
    many, most = (world_size(), agree_on_max(len(queries))) if shared else (1, len(queries))
    first, total = _place_of(bank) if shared else (0, len(bank))
    k = min(k, total - leave_one_out)
    size = min(_tiled(QUERIES // many), _tiled(most))
    for start in range(0, most, size):
        between()
        number = max(0, min(size, len(queries) - start))
        asked = _unit(queries[start : start + size], size, device)
        own = torch.arange(first + start, first + start + size, device=device)
        if shared:
            meet()  # a process that died is noticed before a GPU waits for it
            asked, own = gather(asked), gather(own)
        best = _nearest(bank, asked, k, first, own if leave_one_out else None)
        if shared:
            blocks = _exchanged(best.view(many, size, k))
            best = blocks.transpose(0, 1).flatten(1).topk(k, dim=1).values
        yield NearestRows(slice(start, start + number), *_read_keys(best[:number]))


def _exchanged(blocks: Int64[Tensor, "ranks rows k"]) -> Int64[Tensor, "ranks rows k"]:
    """Send block i to rank i; return the blocks that all ranks have sent here, in rank order."""
    if world_size() == 1:
        return blocks
    blocks = blocks.contiguous()
    arrived = torch.empty_like(blocks)
    torch.distributed.all_to_all_single(arrived, blocks, group=group_for(blocks.device))
    return arrived


def _place_of(bank: Tensor) -> tuple[int, int]:
    """Return the place of this process's first row in the bank of all, and that bank's size."""
    counts = gather(torch.tensor([len(bank)])).tolist()
    return sum(counts[: rank()]), sum(counts)


def _nearest(
    bank: Float[Tensor, "rows dim"],
    queries: Float[Tensor, "queries dim"],
    k: int,
    first: int,
    own: Int[Tensor, " queries"] | None,
) -> Int64[Tensor, "queries k"]:
    """Return the keys of the k nearest rows, the highest first, padded with `NOBODY`."""
    best = torch.full((len(queries), k), NOBODY, device=queries.device)
    for start in range(0, len(bank), ROWS):
        number = min(ROWS, len(bank) - start)
        rows = _unit(bank[start : start + number], _tiled(number), queries.device)
        places = torch.arange(first + start, first + start + number, device=queries.device)
        for at in range(0, len(queries), CHUNK):
            part = slice(at, at + CHUNK)
            similarity = _products(queries[part], rows)[:, :number]
            if own is not None:
                similarity.masked_fill_(own[part, None] == places, -torch.inf)
            near = _keys(similarity, places).topk(min(k, number), dim=1, sorted=False).values
            best[part] = torch.cat([best[part], near], dim=1).topk(k, dim=1).values
    return best


def _unit(rows: Float[Tensor, "rows dim"], number: int, device: torch.device) -> Tensor:
    """Return `number` rows of unit length in float32 on the device; those added are zeros."""
    on_device = send(rows, device).float()
    return normalize(pad(on_device, (0, 0, 0, number - len(rows))), dim=1)


def _tiled(number: int) -> int:
    """Return the smallest positive multiple of `TILE` that is not less than a number."""
    return max(1, -(-number // TILE)) * TILE


def _products(
    queries: Float[Tensor, "queries dim"], rows: Float[Tensor, "rows dim"]
) -> Float[Tensor, "queries rows"]:
    products = queries[:, :TERMS] @ rows[:, :TERMS].T
    for start in range(TERMS, rows.shape[1], TERMS):
        part = slice(start, start + TERMS)
        products.addmm_(queries[:, part], rows[:, part].T)
    return products


def _keys(
    similarity: Float[Tensor, "queries rows"], places: Int64[Tensor, " rows"]
) -> Int64[Tensor, "queries rows"]:
    """Return numbers ordered by similarity, then by place; overwrites `similarity`."""
    keys = _flip(similarity.add_(0.0).view(torch.int32)).long()  # -0.0 becomes 0.0, its equal
    return keys.bitwise_left_shift_(32).add_(LAST - places)


def _read_keys(keys: Int64[Tensor, "queries k"]) -> tuple[Tensor, Tensor]:
    """Return the similarities and the places that keys stand for."""
    bits = _flip(keys.bitwise_right_shift(32).int())
    return bits.view(torch.float32), LAST - keys.bitwise_and(LAST)


def _flip(bits: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """Turn bits of float32 numbers into integers of the same order, or back: negative ones flip."""
    return bits.bitwise_xor_(bits.bitwise_right_shift(31).bitwise_and_(2**31 - 1))
