"""Random numbers for the rows of a batch: functions of a seed, the row and the column.

A query's draws then do not depend on how many processes share the batch, and a resumed run repeats
them. A torch.Generator serves as well: on a CPU it only gives the seed, because drawing every
number from it takes long, on a single thread.
"""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor

_STEP = 0x9E3779B1
"""Distance of two counters: a prime near the golden ratio's 32 bits, so that sums fit in int64."""
_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
"""The rounds of splitmix64 as signed numbers; its third shift is for low bits, which are unused."""


@runtime_checkable
class DrawsByRow(Protocol):
    """An object that may be passed in place of a generator, or a generator with this method.

    `torch.compile` takes it into its graph, unless it is a torch.Generator.
    """

    def uniform_rows(
        self, rows: int, columns: int, dtype: torch.dtype, device: torch.device
    ) -> Float[Tensor, "rows columns"]:
        """Return uniform numbers in [0, 1), different in every call."""


RandomSource = torch.Generator | DrawsByRow | None
"""A source of random numbers; None is PyTorch's own generator."""


def uniform_numbers(
    like: Float[Tensor, "batch K"], columns: int, source: RandomSource = None
) -> Float[Tensor, "batch columns"]:
    """Return uniform numbers in [0, 1) for every row of `like`, in its dtype and on its device."""
    rows, dtype, device = len(like), like.dtype, like.device
    if source is not None and not isinstance(source, torch.Generator):
        return source.uniform_rows(rows, columns, dtype, device)
    if source is None:
        return _drawn(None, rows, columns, dtype, device)
    # A torch.Generator cannot be compiled: the graph has two parts, around this call.
    numbers: Tensor = torch.compiler.disable(_drawn)(source, rows, columns, dtype, device)
    return numbers


def _drawn(
    generator: torch.Generator | None,
    rows: int,
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Float[Tensor, "rows columns"]:
    if generator is not None and isinstance(generator, DrawsByRow):
        return generator.uniform_rows(rows, columns, dtype, device)
    source = device if generator is None else generator.device
    if source.type == device.type == "cpu" and dtype in (torch.float32, torch.float64):
        seed = torch.randint(2**61, (), generator=generator)
        number = seed if torch.compiler.is_compiling() else int(seed)
        return uniform_rows(number, 0, rows, columns, dtype, device)
    uniform = torch.empty(rows, columns, dtype=dtype, device=source)
    return uniform.uniform_(generator=generator).to(device)


def uniform_rows(
    seed: int | Int64[Tensor, ""],
    first_row: int,
    rows: int,
    columns: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Float[Tensor, "rows columns"]:
    """Return uniform numbers in [0, 1) for rows `first_row` and on, the same on every device.

    They have 23 random bits, in float64 52. It takes nine launches on a device, and 8 bytes for a
    number while it works.
    """
    words = 2 if dtype == torch.float32 else 1  # of the 64 bits that are made at once
    width = -(-columns // words)
    start = seed % 2**61 + first_row * width * _STEP
    if isinstance(start, Tensor):  # on the host; the device reads it
        bits = torch.arange(0, rows * width * _STEP, _STEP, device=device) + start
    else:
        bits = torch.arange(start, start + rows * width * _STEP, _STEP, device=device)
    for shift, factor in _ROUNDS:
        # An arithmetic shift: a number and its complement meet, which no two rows ever do.
        bits = bits.bitwise_xor_(bits >> shift).mul_(factor)
    if words == 2:
        numbers = (bits.view(torch.int32) & 0x7FFFFF00) * 2.0**-31
    else:
        numbers = ((bits >> 12) & (2**52 - 1)).to(dtype) * 2.0**-52
    return numbers.view(rows, words * width)[:, :columns]


def open_interval(uniform: Float[Tensor, "batch S"], end: float) -> Float[Tensor, "batch S"]:
    """Map uniform numbers in [0, 1) to the open interval (0, end)."""
    eps = torch.finfo(uniform.dtype).eps
    return (uniform * end).clamp(eps, end - eps)
