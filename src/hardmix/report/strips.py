"""The axis of a table's strip of dots, on which every run of an evaluation has its place."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hardmix.report.evaluation_tables import EvaluationTable

LEAST_SPAN = 0.5
"""Percentage points that an axis covers at least, so that noise does not look like a difference."""


@dataclass(frozen=True)
class Axis:
    """An axis with round ends; places on it go from 0 to 1."""

    low: float
    high: float
    step: float

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Place and text of each tick."""
        digits = max(0, -math.floor(math.log10(self.step) + 1e-9))
        number = round((self.high - self.low) / self.step)
        return [(n / number, f"{self.low + n * self.step:.{digits}f}") for n in range(number + 1)]

    def places(self, values: Sequence[float]) -> list[float]:
        """Return the places of some values."""
        return [(value - self.low) / (self.high - self.low) for value in values]


def axis_of(evaluation: EvaluationTable) -> Axis | None:
    """Return an axis over all runs of an evaluation."""
    return axis_over([value for score in evaluation.scores for value in score.values])


def axis_over(values: Sequence[float]) -> Axis | None:
    """Return an axis with round ends; None for a single value, which needs none."""
    if len(values) < 2:
        return None
    span = max(max(values) - min(values), LEAST_SPAN)
    power = 10.0 ** math.floor(math.log10(span / 2))
    step = power * next(each for each in (1, 2, 5, 10) if each * power >= span / 2 - 1e-9)
    low, high = math.floor(min(values) / step + 1e-9), math.ceil(max(values) / step - 1e-9)
    return Axis(low * step, max(high, low + 1) * step, step)
