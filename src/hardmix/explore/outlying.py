"""Outliers: images unlike all others."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int64
from numpy.typing import ArrayLike
from torch import Tensor

from hardmix.errors import InputError
from hardmix.explore.nearest import Neighbours, neighbours

NEIGHBOURS = 10
CUTOFF = 3.5
"""Robust deviations above the median (3.5 after Iglewicz and Hoaglin)."""


@dataclass(frozen=True, eq=False)
class Outliers:
    """How unusual every image is, and which ones stand out."""

    scores: Float32[np.ndarray, " n"]
    """1 minus the mean similarity to the nearest images: 0 for copies, 1 for unrelated images."""
    order: Int64[np.ndarray, " n"]
    """All rows, the most unusual first."""
    number: int
    """How many of `order` stand out."""

    @property
    def indices(self) -> Int64[np.ndarray, " m"]:
        """The rows that stand out, the most unusual first."""
        return self.order[: self.number]


def outliers(
    features: ArrayLike | Tensor, k: int = NEIGHBOURS, *, cutoff: float = CUTOFF
) -> Outliers:
    """Find rows that are unusually far from their k nearest neighbours for this set.

    A row stands out if its score exceeds the median by `cutoff` robust deviations
    (1.4826 times the median distance to the median).
    """
    return outlying(neighbours(features, k), cutoff)


def outlying(near: Neighbours, cutoff: float = CUTOFF) -> Outliers:
    """Like `outliers`, for known neighbours."""
    if cutoff <= 0:
        raise InputError(f"cutoff={cutoff} must be above 0: a number of deviations.")
    if near.indices.shape[1] == 0:
        raise InputError("features have 1 row: outliers need at least 2.")
    scores = (1 - near.similarities.astype(np.float64).mean(axis=1)).astype(np.float32)
    order = np.lexsort((np.arange(len(scores)), -scores))
    middle = np.median(scores)
    spread = 1.4826 * np.median(np.abs(scores - middle))
    # If most images have copies, the spread is 0 and everything else would stand out.
    number = int((scores > middle + cutoff * spread).sum()) if spread > 0 else 0
    return Outliers(scores, order, number)
