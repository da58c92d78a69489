"""Randomness is a function of (seed, epoch, sample, view, purpose), never a state.

No generator is saved or advanced. A sample therefore gets the same random numbers after a resume,
with any number of workers or processes, and whatever else is in its batch.
"""

import hashlib

import numpy as np
import torch
from jaxtyping import Float64, Int64
from numpy.typing import NDArray
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def seed_of(*parts: int | str) -> int:
    """Return a seed of 63 bits for a generator, e.g. `seed_of("mixing", seed, step)`.

    The first part should name the purpose, because equal parts give equal seeds.
    """
    words = repr(tuple(part if isinstance(part, str) else int(part) for part in parts))
    digest = hashlib.blake2b(words.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def uniform(
    seed: int, epoch: int, samples: Int64[Tensor, " batch"], view: int, number: int, first: int = 0
) -> Float64[Tensor, "batch {number}"]:
    """Return `number` random numbers in [0, 1) for one view of each sample.

    Each column has its purpose: column `first` is the same number however many are drawn with it.
    """
    key = np.uint64(seed_of("views", seed, epoch, view))
    ids = samples.cpu().numpy().view(np.uint64)
    columns = np.arange(first, first + number, dtype=np.uint64)
    rows = _scramble(key + ids * _GOLDEN)
    bits = _scramble(rows[:, None] + columns * _GOLDEN)
    return torch.from_numpy((bits >> np.uint64(11)) * 2.0**-53)  # a float64 holds 53 bits


def permutation(seed: int, epoch: int, n: int) -> Int64[Tensor, " n"]:
    """Return the order in which an epoch visits n samples."""
    generator = torch.Generator().manual_seed(seed_of("order", seed, epoch))
    return torch.randperm(n, generator=generator)


def _scramble(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply splitmix64's output function (Steele et al. 2014): each bit depends on all bits."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
