"""Randomness is a function of (seed, epoch, sample, view, purpose), never a state.

Nothing is saved and nothing is advanced, so a resumed run, another number of workers or of
processes, and another neighbour in the batch all leave a sample's random numbers as they were.
"""

import hashlib

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from numpy.typing import NDArray
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_STEP = 0x9E3779B1
"""From one counter to the next, as a prime near the golden ratio's 32 bits: sums stay in int64."""
_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
"""splitmix64's, as signed numbers; its third shift is for low bits, which are not used."""


def seed_of(*parts: int | str) -> int:
    """A seed of 63 bits for a generator, e.g. `seed_of("mixing", seed, step)`.

    Start with a word for the purpose: equal parts give equal seeds.
    """
    words = repr(tuple(part if isinstance(part, str) else int(part) for part in parts))
    digest = hashlib.blake2b(words.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def uniform(
    seed: int, epoch: int, samples: Int64[Tensor, " batch"], view: int, number: int
) -> Float64[Tensor, "batch number"]:
    """`number` random numbers in [0, 1) for one view of each sample.

    Asking for more leaves the first as they are: columns serve as purposes.
    """
    start = np.uint64(seed_of("views", seed, epoch, view))
    ids = samples.cpu().numpy().view(np.uint64)
    columns = np.arange(number, dtype=np.uint64)
    rows = _scramble(start + ids * _GOLDEN)
    bits = _scramble(rows[:, None] + columns * _GOLDEN)
    return torch.from_numpy((bits >> np.uint64(11)) * 2.0**-53)  # a float64 holds 53 bits


class RowsGenerator(torch.Generator):
    """Numbers that depend on the seed, the call, and a row's place in the batch of all processes.

    Nothing is drawn for other processes, and a row's numbers do not depend on how many there are.
    For whoever draws from it as from any generator, it is one, and the same on every process.
    """

    part: int = 0
    """Which of the equal parts of the batch, counted by rank, the rows are."""
    calls: int = 0
    """How often it was asked: every call is a purpose of its own."""

    def uniform_rows(
        self, rows: int, columns: int, dtype: torch.dtype, device: torch.device | str
    ) -> Float[Tensor, "rows columns"]:
        """Uniform numbers in [0, 1), made on the device."""
        seed = seed_of("rows", self.initial_seed(), self.calls)
        self.calls += 1
        return uniform_rows(seed, self.part * rows, rows, columns, dtype, device)


class RowDraws:
    """The numbers of a `RowsGenerator`, by an object that `torch.compile` takes into its graph.

    The seeds are an input of that graph: it serves every step.
    """

    MOST_CALLS = 8

    def __init__(self, seed: int, part: int = 0) -> None:
        self.part, self.calls = part, 0
        self.seeds = torch.tensor([seed_of("rows", seed, call) for call in range(self.MOST_CALLS)])

    def uniform_rows(
        self, rows: int, columns: int, dtype: torch.dtype, device: torch.device | str
    ) -> Float[Tensor, "rows columns"]:
        """Uniform numbers in [0, 1), made on the device."""
        seed = self.seeds[self.calls]
        self.calls += 1
        known = seed if torch.compiler.is_compiling() else int(seed)
        return uniform_rows(known, self.part * rows, rows, columns, dtype, device)


def uniform_rows(
    seed: int | Int64[Tensor, ""],
    first_row: int,
    rows: int,
    columns: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Float[Tensor, "rows columns"]:
    """Uniform numbers in [0, 1) of rows `first_row` and on: a function of seed, row and column.

    Of 23 bits, in float64 of 52. Nine launches on a device, and 8 bytes a number while it works;
    the same numbers on every device.
    """
    words = 2 if dtype == torch.float32 else 1  # of the 64 bits that are made at once
    width = -(-columns // words)
    start = seed % 2**61 + first_row * width * _STEP
    if isinstance(start, Tensor):  # of the host's, read by the device
        bits = torch.arange(0, rows * width * _STEP, _STEP, device=device) + start
    else:
        bits = torch.arange(start, start + rows * width * _STEP, _STEP, device=device)
    for shift, factor in _ROUNDS:
        # An arithmetic shift: a number and its complement meet, which no two rows ever do.
        bits = (bits ^ (bits >> shift)).mul_(factor)
    if words == 2:
        numbers = (bits.view(torch.int32) & 0x7FFFFF00) * 2.0**-31
    else:
        numbers = ((bits >> 12) & (2**52 - 1)).to(dtype) * 2.0**-52
    return numbers.view(rows, words * width)[:, :columns]


def permutation(seed: int, epoch: int, n: int) -> Int64[Tensor, " n"]:
    """The order in which an epoch visits n samples."""
    generator = torch.Generator().manual_seed(seed_of("order", seed, epoch))
    return torch.randperm(n, generator=generator)


def _scramble(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of splitmix64 (Steele et al. 2014): every bit depends on every bit."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
