"""Sec. 4.1: the largest similarities of each query, exactly. On a CPU by NumPy, elsewhere by top-k.

Axes: batch, width (negatives), N. A position is a slot of the queue.
"""

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from hardmix.errors import InputError

CHUNK_ELEMENTS = 2**22
"""Numbers worked on at once on a CPU: 16 MB in float32, and still enough rows for a fast matmul."""
DEVICE_CHUNK_ELEMENTS = 2**28
"""The same elsewhere, where each launch costs: 1 GiB in float32."""

CACHE_ELEMENTS = 2**17
"""Numbers that stay in a core's cache from one pass to the next: 512 kB in float32."""

SPARSE = 20
"""In rows this many times as wide as the number wanted, most words of eight values hold none."""

NARROW = 4
"""Rows up to this many times as wide as the number wanted are partitioned without a bound."""

Largest = tuple[Int[Tensor, "batch N"], Int[Tensor, " batch"]]
"""Positions of each row's largest, ascending, then -1 if fewer are above -inf; how many are."""


def in_one_piece(values: Tensor) -> bool:
    """Return whether launches matter more than caches: on devices, and in `torch.compile`."""
    return values.device.type != "cpu" or torch.compiler.is_compiling()


def row_chunks(
    batch: int, width: int, one_piece: bool = False, elements: int = CHUNK_ELEMENTS
) -> list[slice]:
    """Return the parts of a (batch, width) tensor that need little memory, one by one."""
    rows = max(1, (DEVICE_CHUNK_ELEMENTS if one_piece else elements) // max(1, width))
    return [slice(start, min(start + rows, batch)) for start in range(0, batch, rows)]


def rows_of(tensor: Tensor, rows: slice) -> Tensor:
    """Return some rows, or the tensor itself if these are all rows."""
    return tensor if rows.stop - rows.start == len(tensor) else tensor[rows]


def joined(parts: list[Tensor]) -> Tensor:
    """Return the rows of all parts."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def largest(values: Float[Tensor, "batch width"], number: int, all_there: bool = False) -> Largest:
    """Return the `number` largest values above -inf of each row; on a CPU ties take the first.

    `all_there`: every row is known to have `number` values above -inf.
    """
    if not in_one_piece(values):
        maxima = _block_maxima(values, number).numpy()
        chosen, counts = _partition(values.numpy(), maxima, number)
        return torch.from_numpy(chosen), torch.from_numpy(counts)
    highest = values.topk(number, dim=1, sorted=False)
    if all_there:
        positions = highest.indices.sort(dim=1).values
        return positions, positions.new_full((len(values),), number)
    there = highest.values > -torch.inf
    # 2^32 - 1 sorts last as 64 bits, and its lower 32 bits are -1.
    positions = torch.where(there, highest.indices, 2**32 - 1).sort(dim=1).values
    return positions.view(torch.int32)[:, ::2].long(), there.sum(dim=1)


def _block_maxima(
    values: Float[Tensor, "batch width"], number: int
) -> Float[Tensor, "batch blocks"]:
    """Return the maxima of blocks, a third more blocks than `number`.

    Blocks are strided, so this is one elementwise pass. Sparse rows have more of them: fewer values
    then reach the bound, and finding these takes longer there.
    """
    width = values.shape[1]
    share = 3 / 8 if width >= SPARSE * number else 3 / 4
    per_block = max(1, int(share * width / number))
    blocks = width // per_block
    in_blocks = values[:, : per_block * blocks].unflatten(1, (per_block, blocks))
    maxima: Tensor = in_blocks.amax(dim=1)
    rest = values[:, per_block * blocks :]
    if bool(maxima.amax().isnan()) or bool(rest.isnan().any()):
        raise InputError("similarity holds NaN: it cannot be ranked; look at the encoder's output.")
    return maxima


def _partition(
    array: NDArray[np.floating], maxima: NDArray[np.floating], number: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rule out most values by a lower bound of the N-th largest, and partition the rest.

    Maxima of blocks are values of the row, so the `number`-th of them is such a bound; about 1.8
    times as many values reach it, in sparse rows 1.2 times.
    """
    batch, width = array.shape
    source = array if width <= NARROW * number else maxima
    bound = np.partition(source, -number, axis=1)[:, -number, None]
    chosen = _places(array >= np.maximum(bound, np.finfo(array.dtype).min), number)
    starts = np.searchsorted(chosen, width * np.arange(batch + 1))
    counts = np.diff(starts)
    if counts.max() > number:
        # One line of candidates for each row, in slot order, padded with -inf.
        there = np.arange(counts.max()) < counts[:, None]
        candidates = np.full(there.shape, -np.inf, array.dtype)
        candidates[there] = array.take(chosen)
        smallest = np.partition(candidates, -number, axis=1)[:, -number, None]
        kept = (candidates >= smallest) & there
        surplus = np.count_nonzero(kept, axis=1) - number
        for row in np.flatnonzero(surplus > 0):  # ties: the last of the equals go
            equal = np.flatnonzero(candidates[row] == smallest[row])
            kept[row, equal[-surplus[row] :]] = False
        chosen = chosen.take(np.flatnonzero(kept[there]))  # faster than by a mask
        counts = np.minimum(counts, number)
    if counts.min() == number:
        return chosen.reshape(batch, number) - width * np.arange(batch)[:, None], counts
    positions = np.full((batch, number), -1)
    positions[np.arange(number) < counts[:, None]] = chosen
    positions -= np.where(positions < 0, 0, width * np.arange(batch)[:, None])
    return positions, counts


def _places(mask: NDArray[np.bool_], number: int) -> NDArray[np.int64]:
    """Return np.flatnonzero of a mask in which each row has up to about 2 * `number` set.

    A sparse mask is read by words of eight: NumPy stops at each bit that is set, which takes twice
    as long.
    """
    if mask.shape[1] % 8 or mask.shape[1] < SPARSE * number:
        return np.flatnonzero(mask)
    words = mask.reshape(-1).view(np.uint64)
    occupied = np.flatnonzero(words != 0)
    inside = np.flatnonzero(words.take(occupied).view(np.bool_))
    places: NDArray[np.int64] = (occupied.take(inside >> 3) << 3) + (inside & 7)
    return places
