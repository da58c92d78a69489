"""The difference of two means over seeds, or why there is none."""

import math
from dataclasses import dataclass
from typing import Literal

from hardmix.evaluation.accuracy import mean_and_deviation

GainId = Literal["difference", "one-seed", "baseline", "no-baseline", "not-evaluated"]
"""What a gain is: known with its error, or of a single seed; else why there is none."""


@dataclass(frozen=True)
class Gain:
    """Points over the MoCo-v2 baseline, or why there are none."""

    id: GainId
    word: str = ""
    """What a table says of it."""
    points: float | None = None
    error: float | None = None
    """Standard error of the difference; None where one side has a single seed."""


def difference(ours: list[float], theirs: list[float]) -> Gain:
    """Of two means, with its standard error where both have two values or more."""
    (mean, deviation), (mean0, deviation0) = mean_and_deviation(ours), mean_and_deviation(theirs)
    if min(len(ours), len(theirs)) < 2:
        return Gain("one-seed", "one seed", mean - mean0)
    error = math.sqrt(deviation**2 / len(ours) + deviation0**2 / len(theirs))
    return Gain("difference", "", mean - mean0, error)
