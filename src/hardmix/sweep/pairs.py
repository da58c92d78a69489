"""Differences by seed: runs with the same seed share weights, images and views, so noise cancels.

The 95 % interval of a mean difference is by Student's t; a difference is significant if its
interval excludes 0. They are shown on the terminal, written to DIR/GRID-pairs.csv, .tex and .json,
and drawn: forest plots of every accuracy, and the gains of trends.
"""

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import linear_regression
from typing import Any

from hardmix.analysis.paired_gains import GainLine, GainPoint, forest, gain_over
from hardmix.analysis.picture import Picture
from hardmix.errors import InputError
from hardmix.evaluation.accuracy import mean_and_deviation
from hardmix.runtime.console import say, table
from hardmix.sweep.grid_rows import Trend
from hardmix.sweep.grids import grid_named
from hardmix.sweep.measures import Measure
from hardmix.sweep.results import SweepResult, TableRow, latex_table, write_files

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
class MeasuredTrend:
    """How gains in a measure change with another measure, over the rows of a trend."""

    trend: Trend
    measure: Measure
    slopes: dict[int, float]
    """Points of gain per 10 percent, or per 0.1 of a measure that is not a fraction, by seed."""
    means: dict[int, float]
    """Mean gain over the rows, by seed."""


def student_interval(differences: Sequence[float]) -> Interval:
    """Return Student's t interval of the mean; a single difference has none."""
    mean, deviation = mean_and_deviation(list(differences))
    number = len(differences)
    if number < 2:
        return Interval(mean, number, None)
    from scipy.stats import t  # here, because it takes half a second to import

    quantile = float(t.ppf((1 + LEVEL) / 2, number - 1))
    return Interval(mean, number, quantile * deviation / math.sqrt(number))


def check_scipy() -> None:
    """Raise InputError if scipy is missing, before any work."""
    if find_spec("scipy") is None:
        raise InputError(
            "a sweep needs scipy for its intervals, which is not installed: pip install"
            " 'hardmix[analysis]'."
        )


def paired(result: SweepResult) -> list[Pairs]:
    """Return pairs of every row and its baseline, in every measure that both have.

    Two runs of different machines are no pair (`refused_pairs`): their sums round differently.
    """
    by_label = {line.row.label: line for line in result.lines}
    pairs = []
    for line in result.lines:
        for measure in result.measures:
            cell = line.cells[measure.id]
            base = by_label.get(cell.baseline)
            if base is None:
                continue
            theirs = base.cells[measure.id].values
            refused = different_machines(line, base)
            seeds = [seed for seed in cell.values if seed in theirs and seed not in refused]
            if seeds:
                ours = {seed: cell.values[seed] for seed in seeds}
                both = {seed: theirs[seed] for seed in seeds}
                row = line.row
                pairs.append(Pairs(row.label, row.id, cell.baseline, measure, ours, both))
    return pairs


def different_machines(line: TableRow, base: TableRow) -> dict[int, str]:
    """Return the seeds whose two runs record different machines, and both machines in words."""
    return {
        seed: f"{machine} and {base.finished.machines[seed]}"
        for seed, machine in line.finished.machines.items()
        if base.finished.machines.get(seed, machine) != machine
    }


def refused_pairs(result: SweepResult) -> list[str]:
    """Return a sentence for every seed whose runs are no pair, because of their machines."""
    by_label = {line.row.label: line for line in result.lines}
    sentences = []
    for line in result.lines:
        base = next((by_label.get(cell.baseline) for cell in line.cells.values()), None)
        if base is None:
            continue
        labels = f"{line.row.label} and {base.row.label}"
        sentences += [
            f"Seed {seed}: {labels} are not used as a pair, because they were trained on different"
            f" machines ({machines})."
            for seed, machines in different_machines(line, base).items()
        ]
    return sentences


def trends(result: SweepResult, pairs: Sequence[Pairs]) -> list[MeasuredTrend]:
    """Return the grid's trends in every accuracy, for seeds that have all of a trend's rows."""
    measured = []
    for trend in grid_named(result.options.grid).trends:
        over = [values_over(trend.over, row, result) for row in trend.rows]
        unit = _unit(trend.over, result)
        for measure in (each for each in result.measures if each.id in ACCURACIES):
            by_row = {each.id: each.differences for each in pairs if each.measure == measure}
            gains = [by_row.get(row, {}) for row in trend.rows]
            slopes, means = {}, {}
            for seed in result.options.every_seed:
                if not all(seed in each for each in (*over, *gains)):
                    continue
                x, y = [each[seed] / unit for each in over], [each[seed] for each in gains]
                if len(set(x)) > 1:  # rows that do not differ have no slope
                    slopes[seed], means[seed] = slope(x, y), sum(y) / len(y)
            if means:
                measured.append(MeasuredTrend(trend, measure, slopes, means))
    return measured


def without_trend(result: SweepResult, measured: Sequence[MeasuredTrend]) -> list[str]:
    """Return a sentence for every trend of the grid that could not be computed."""
    sentences = []
    for trend in grid_named(result.options.grid).trends:
        if any(each.trend == trend for each in measured):
            continue
        lacking = [row for row in trend.rows if not values_over(trend.over, row, result)]
        reason = f"no seed has finished runs of all its rows, with different {trend.over}"
        if lacking:
            reason = f"{', '.join(lacking)} have no {trend.over}; select rows with rows = [...]"
        elif len(trend.rows) < 2:
            reason = "a slope needs at least two rows with a baseline"
        sentences.append(f"No trend over {trend.over}: {reason}.")
    return sentences


def values_over(measure: str, row: str, result: SweepResult) -> dict[int, float]:
    """Return a trend's x values by seed: the baseline's, or the row's if it has none."""
    by_id = {line.row.id: line for line in result.lines}
    if row not in by_id or measure not in by_id[row].cells:
        return {}
    lines = [by_id.get(by_id[row].row.baseline), by_id[row]]
    values = [line.cells[measure].values for line in lines if line is not None]
    return next((each for each in values if each), {})


def _unit(measure: str, result: SweepResult) -> float:
    """Return the unit of slopes: 10 percent, or 0.1 of a measure that is not a fraction."""
    return 10 if all(each.percent for each in result.measures if each.id == measure) else 0.1


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the slope of the least-squares line; `x` has at least two different values."""
    return linear_regression(x, y).slope


# -- the differences as text


RULE = (
    "Differences are by seed, with the 95 % interval by Student's t; a difference is significant if"
    " its interval excludes 0."
)
WORDS = {1: "yes, higher", -1: "yes, lower", 0: "no", None: "-"}


def show_pairs(pairs: Sequence[Pairs], measured: Sequence[MeasuredTrend]) -> None:
    """Print a table for every measure, then the trends."""
    if not pairs:
        say("There are no pairs: no two rows have a seed in common.")
        return
    say(RULE)
    for measure in dict.fromkeys(each.measure for each in pairs):
        rows = [_cells(each) for each in pairs if each.measure == measure]
        columns = ["", "over", "pairs", "difference and interval", "significant"]
        table(f"paired differences, {measure.title}", columns, rows)
    for sentence in trend_sentences(measured):
        say(sentence)


def trend_sentences(measured: Sequence[MeasuredTrend]) -> list[str]:
    """Return each trend in a sentence, with intervals over seeds."""
    sentences = []
    for each in measured:
        slopes = student_interval(list(each.slopes.values()))
        means = student_interval(list(each.means.values()))
        sentences.append(
            f"{each.measure.title} over {each.trend.over} in {len(each.trend.rows)} rows,"
            f" {slopes.number} seeds: slope {slopes.text(3)} per 10 % or 0.1; mean gain"
            f" {means.text(2)}."
        )
    return sentences


def write_pairs(
    result: SweepResult, pairs: Sequence[Pairs], measured: Sequence[MeasuredTrend], out: Path
) -> list[Path]:
    """Write GRID-pairs.csv, .tex and .json, and return their paths; none if there are no pairs."""
    if not pairs:
        return []
    columns = ["", "over", "measure", "pairs", "difference", "significant"]
    rows = []
    for each in pairs:
        row, over, number, text, word = _cells(each)
        rows.append([row, over, each.measure.title, number, text, word])
    texts = {
        "csv": _as_csv(result, pairs),
        "tex": latex_table(columns, "lllrrl", rows, f"{result.place}. {RULE}"),
        "json": json.dumps(_facts(pairs, measured), indent=2) + "\n",
    }
    name = f"{result.options.grid_name}-pairs"
    return write_files({out / f"{name}.{ending}": text for ending, text in texts.items()})


def _cells(pair: Pairs) -> list[str]:
    interval = pair.interval
    text = interval.text(pair.measure.digits)
    return [pair.row, pair.baseline, str(interval.number), text, WORDS[interval.sign]]


def _as_csv(result: SweepResult, pairs: Sequence[Pairs]) -> str:
    """Return a line for every row and measure, with each seed's difference."""
    out = io.StringIO()
    seeds = list(result.options.every_seed)
    names = ["label", "over", "measure", "pairs", "mean", "low", "high", "significant"]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*names, *(f"seed_{seed}" for seed in seeds)])
    for each in pairs:
        interval = each.interval
        numbers = [interval.number, interval.mean, interval.low, interval.high]
        by_seed = [each.differences.get(seed) for seed in seeds]
        start = [each.row, each.baseline, each.measure.id]
        writer.writerow([*start, *numbers, WORDS[interval.sign], *by_seed])
    return out.getvalue()


def _facts(pairs: Sequence[Pairs], measured: Sequence[MeasuredTrend]) -> dict[str, Any]:
    return {
        "rule": RULE,
        "pairs": [
            {
                "label": each.row,
                "id": each.id,
                "over": each.baseline,
                "measure": each.measure.id,
                **_interval_facts(each.interval, each.differences),
            }
            for each in pairs
        ],
        "trends": [
            {
                "over": each.trend.over,
                "rows": list(each.trend.rows),
                "measure": each.measure.id,
                name: _interval_facts(student_interval(list(values.values())), values),
            }
            for each in measured
            for name, values in (("slope", each.slopes), ("mean_gain", each.means))
        ],
    }


def _interval_facts(interval: Interval, by_seed: dict[int, float]) -> dict[str, Any]:
    return {
        "pairs": interval.number,
        "mean": interval.mean,
        "low": interval.low,
        "high": interval.high,
        "significant": None if interval.sign is None else interval.sign != 0,
        "by_seed": {str(seed): value for seed, value in by_seed.items()},
    }


# -- the differences as figures


FIGURED = (*ACCURACIES, "uniformity", "queue-uniformity")


def forests(pairs: Sequence[Pairs]) -> list[Picture]:
    """Draw a forest plot for every measure of `FIGURED`, with a line for every row."""
    pictures = []
    for measure in dict.fromkeys(each.measure for each in pairs if each.measure.id in FIGURED):
        lines = [
            GainLine(each.row, tuple(each.differences.values()), each.interval.half)
            for each in pairs
            if each.measure == measure
        ]
        pictures.append(forest(lines, measure.title, f"forest-{measure.id}", measure.percent))
    return pictures


def gains_over(
    result: SweepResult, pairs: Sequence[Pairs], measured: Sequence[MeasuredTrend]
) -> list[Picture]:
    """Draw a figure for every trend: all rows with a gain, and the line of the trend's rows."""
    pictures = []
    of_both = {pair.measure.id for pair in pairs}
    titles = {
        measure.id: measure.title
        + " of the baseline" * (measure.id in of_both)
        + " (%)" * measure.percent
        for measure in result.measures
    }
    for each in measured:
        points = []
        for pair in (pair for pair in pairs if pair.measure == each.measure):
            over = values_over(each.trend.over, pair.id, result)
            seeds = [seed for seed in pair.differences if seed in over]
            if seeds:
                gains = [pair.differences[seed] for seed in seeds]
                x = [over[seed] for seed in seeds]
                half = student_interval(gains).half
                own = pair.id in each.trend.rows
                points.append(GainPoint(pair.row, tuple(x), tuple(gains), half, own))
        name = f"gain-over-{each.trend.over}-{each.measure.id}"
        pictures.append(gain_over(points, titles[each.trend.over], each.measure.title, name))
    return pictures
