"""Random numbers for the rows of a batch: a function of seed, row and column."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

_STEP = 0x9E3779B1
"""From one counter to the next, as a prime near the golden ratio's 32 bits: sums stay in int64."""
_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
"""splitmix64's, as signed numbers; its third shift is for low bits, which are not used."""


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
        bits = bits.bitwise_xor_(bits >> shift).mul_(factor)
    if words == 2:
        numbers = (bits.view(torch.int32) & 0x7FFFFF00) * 2.0**-31
    else:
        numbers = ((bits >> 12) & (2**52 - 1)).to(dtype) * 2.0**-52
    return numbers.view(rows, words * width)[:, :columns]
