"""The difference of two means over seeds, or the reason why it is unknown."""

import math
from dataclasses import dataclass
from typing import Literal

from hardmix.evaluation.accuracy import mean_and_deviation

GainId = Literal["difference", "one-seed", "baseline", "no-baseline", "not-evaluated"]
"""Kind of gain: known with its error, of a single seed, or the reason why it is unknown."""


@dataclass(frozen=True)
class Gain:
    """Percentage points over the MoCo-v2 baseline, or the reason why they are unknown."""

    id: GainId
    word: str = ""
    """What a table prints with it."""
    points: float | None = None
    error: float | None = None
    """Standard error of the difference; None if either side has a single seed."""


def difference(ours: list[float], theirs: list[float]) -> Gain:
    """Return the difference of two means, with its standard error if both have two values."""
    (mean, deviation), (mean0, deviation0) = mean_and_deviation(ours), mean_and_deviation(theirs)
    if min(len(ours), len(theirs)) < 2:
        return Gain("one-seed", "one seed", mean - mean0)
    error = math.sqrt(deviation**2 / len(ours) + deviation0**2 / len(theirs))
    return Gain("difference", "", mean - mean0, error)
