"""Differences by seed: runs with the same seed share weights, images and views: noise cancels.

The 95 % interval of a mean difference is by Student's t; a difference is significant if its
interval excludes 0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hardmix.errors import InputError
from hardmix.evaluation.accuracy import mean_and_deviation
from hardmix.sweep.grid_rows import Trend
from hardmix.sweep.grids import grid_named
from hardmix.sweep.measures import Measure
from hardmix.sweep.results import SweepResult, TableRow

LEVEL = 0.95
ACCURACIES = ("linear", "linear-cached", "knn", "transfer")
"""Measures whose trends are computed."""


@dataclass(frozen=True)
class Interval:
    """The mean of differences, with its confidence interval."""

    mean: float
    number: int
    half: float | None
    """Half the width of the interval; None for a single difference."""

    @property
    def low(self) -> float | None:
        """Lower end."""
        return None if self.half is None else self.mean - self.half

    @property
    def high(self) -> float | None:
        """Upper end."""
        return None if self.half is None else self.mean + self.half

    @property
    def sign(self) -> int | None:
        """1 or -1 if the difference is significant, 0 if not; None for a single one."""
        if self.half is None:
            return None
        return 0 if abs(self.mean) <= self.half else 1 if self.mean > 0 else -1

    def text(self, digits: int) -> str:
        """Return the mean and both ends as text."""
        if self.low is None or self.high is None:
            return f"{self.mean:+.{digits}f} (one pair)"
        return f"{self.mean:+.{digits}f} [{self.low:+.{digits}f}, {self.high:+.{digits}f}]"


@dataclass(frozen=True)
class Pairs:
    """A row and its baseline in one measure, seed by seed."""

    row: str
    """Label of the row."""
    id: str
    baseline: str
    """Label of the baseline."""
    measure: Measure
    ours: dict[int, float]
    theirs: dict[int, float]
    """Values of both, by the seeds that both have."""

    @property
    def differences(self) -> dict[int, float]:
        """Differences by seed."""
        return {seed: value - self.theirs[seed] for seed, value in self.ours.items()}

    @property
    def interval(self) -> Interval:
        """Interval of the mean difference."""
        return student_interval(list(self.differences.values()))


@dataclass(frozen=True)
class FoundTrend:
    """How gains in a measure change with another measure, over the rows of a trend."""

    trend: Trend
    measure: Measure
    slopes: dict[int, float]
    """By seed: points of gain per 10 percent, or per 0.1 of a measure that is not a fraction."""
    means: dict[int, float]
    """By seed: mean gain over the rows."""


def student_interval(differences: Sequence[float]) -> Interval:
    """Return Student's t interval of the mean; a single difference has none."""
    mean, deviation = mean_and_deviation(list(differences))
    number = len(differences)
    if number < 2:
        return Interval(mean, number, None)
    quantile = student_quantile(number - 1, LEVEL)
    return Interval(mean, number, quantile * deviation / math.sqrt(number))


def student_quantile(freedom: int, level: float) -> float:
    """Return t such that P(|T| < t) = `level`, by bisection."""
    if freedom < 1 or not 0 < level < 1:
        raise InputError(
            f"freedom={freedom}, level={level}: freedom must be at least 1, level between 0 and 1."
        )
    low, high = 0.0, 1.0
    while student_probability(high, freedom) < level:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        below = student_probability(middle, freedom) < level
        low, high = (middle, high) if below else (low, middle)
    return high


def student_probability(t: float, freedom: int) -> float:
    """Return P(|T| < t), exact for integer degrees of freedom (Abramowitz, Stegun 26.7.3-4)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = total = cosine if odd else 1.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= (k - 1) / k * cosine**2
        total += term
    if not odd:
        return sine * total
    return 2 / math.pi * (angle + (sine * total if freedom > 1 else 0.0))


def paired(result: SweepResult) -> list[Pairs]:
    """Return pairs of every row and its baseline, in every measure that both have.

    Two runs of different machines are no pair (`refused_pairs`): their sums round differently.
    """
    by_label = {line.row.label: line for line in result.lines}
    found = []
    for line in result.lines:
        for number, (measure, cell) in enumerate(zip(result.measures, line.cells, strict=True)):
            base = by_label.get(cell.baseline)
            if base is None:
                continue
            theirs = base.cells[number].values
            refused = different_machines(line, base)
            ours = {
                seed: value
                for seed, value in cell.values.items()
                if seed in theirs and seed not in refused
            }
            if ours:
                both = {seed: theirs[seed] for seed in ours}
                row = line.row
                found.append(Pairs(row.label, row.id, cell.baseline, measure, ours, both))
    return found


def different_machines(line: TableRow, base: TableRow) -> dict[int, str]:
    """Return the seeds whose two runs record different machines, and both machines in words."""
    return {
        seed: f"{machine} and {base.machines[seed]}"
        for seed, machine in line.machines.items()
        if base.machines.get(seed, machine) != machine
    }


def refused_pairs(result: SweepResult) -> list[str]:
    """Return a sentence for every seed whose runs are no pair, because of their machines."""
    by_label = {line.row.label: line for line in result.lines}
    sentences = []
    for line in result.lines:
        base = by_label.get(line.cells[0].baseline) if line.cells else None
        if base is None:
            continue
        labels = f"{line.row.label} and {base.row.label}"
        sentences += [
            f"Seed {seed}: {labels} are not used as a pair, because they were trained on different"
            f" machines ({machines})."
            for seed, machines in different_machines(line, base).items()
        ]
    return sentences


def trends(result: SweepResult, pairs: Sequence[Pairs]) -> list[FoundTrend]:
    """Return the grid's trends in every accuracy, for seeds that have all of a trend's rows."""
    found = []
    for trend in grid_named(result.options.grid).trends:
        over = [values_over(trend.over, row, result) for row in trend.rows]
        unit = _unit(trend.over, result)
        for measure in (each for each in result.measures if each.id in ACCURACIES):
            gains = {each.id: each.differences for each in pairs if each.measure == measure}
            chosen = [gains.get(row, {}) for row in trend.rows]
            slopes, means = {}, {}
            for seed in result.options.every_seed:
                if not all(seed in each for each in (*over, *chosen)):
                    continue
                x, y = [each[seed] / unit for each in over], [each[seed] for each in chosen]
                if len(set(x)) > 1:  # rows that do not differ have no slope
                    slopes[seed], means[seed] = slope(x, y), sum(y) / len(y)
            if means:
                found.append(FoundTrend(trend, measure, slopes, means))
    return found


def without_trend(result: SweepResult, found: Sequence[FoundTrend]) -> list[str]:
    """Return a sentence for every trend of the grid that could not be computed."""
    sentences = []
    for trend in grid_named(result.options.grid).trends:
        if any(each.trend == trend for each in found):
            continue
        without = [row for row in trend.rows if not values_over(trend.over, row, result)]
        why = f"no seed has finished runs of all its rows, with different {trend.over}"
        if without:
            why = f"{', '.join(without)} have no {trend.over}; select rows with rows = [...]"
        elif len(trend.rows) < 2:
            why = "a slope needs at least two rows with a baseline"
        sentences.append(f"No trend over {trend.over}: {why}.")
    return sentences


def values_over(measure: str, row: str, result: SweepResult) -> dict[int, float]:
    """Return a trend's x values by seed: the baseline's, or the row's if it has none."""
    number = next((i for i, each in enumerate(result.measures) if each.id == measure), None)
    by_id = {line.row.id: line for line in result.lines}
    if number is None or row not in by_id:
        return {}
    lines = [by_id.get(by_id[row].row.baseline), by_id[row]]
    values = [line.cells[number].values for line in lines if line is not None]
    return next((each for each in values if each), {})


def _unit(measure: str, result: SweepResult) -> float:
    """Return the unit of slopes: 10 percent, or 0.1 of a measure that is not a fraction."""
    return 10 if all(each.percent for each in result.measures if each.id == measure) else 0.1


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the slope of the least-squares line; `x` has at least two different values."""
    middle_x, middle_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((each - middle_x) ** 2 for each in x)
    return sum((a - middle_x) * (b - middle_y) for a, b in zip(x, y, strict=True)) / spread
