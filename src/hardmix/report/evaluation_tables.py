"""Results of groups of runs, one table for each evaluation: mean, deviation, gain over MoCo-v2.

Results belong to the same evaluation if their `ResultNumber.id` and their protocol are equal;
titles are only shown.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hardmix.evaluation.accuracy import mean_and_deviation
from hardmix.paper.numbers import Beside, paper_beside
from hardmix.report.grouping import Gain, SeedGroup, baseline_key, difference, group_key
from hardmix.report.sentences import NO_NUMBER
from hardmix.runs.reading import RunRecord, number
from hardmix.runs.summary import ENCODERS, ResultNumber, describe_protocol, numbers_of
from hardmix.settings.evaluations import evaluation_kind, result_titles

NO_EVALUATIONS = ("pretrain", "embedding", "queue", "verdict")
"""Result files without an accuracy: the cost of training, measures of features, the verdict."""


@dataclass(frozen=True)
class Score:
    """A group's result in one evaluation, in percent; the deviation of a single seed is None."""

    group: SeedGroup
    values: list[float]
    mean: float
    deviation: float | None
    second: float | None
    gain: Gain
    paper: Beside


@dataclass(frozen=True)
class EvaluationTable:
    """One protocol on one data set, with the scores of all groups that have it."""

    id: str
    title: str
    protocol: str
    metric: str
    second: str
    scores: list[Score]
    floor: list[tuple[str, float]]
    """Untrained baselines, if a result file has them: means over the runs."""

    @property
    def has_paper(self) -> bool:
        """Whether the paper prints a number for any row."""
        return any(score.paper.row is not None for score in self.scores)

    @property
    def beside_paper(self) -> list[tuple[str, str]]:
        """Sentences on the paper's numbers, each with its rows; no rows means all of them."""
        by_sentence: dict[str, list[str]] = {}
        for score in self.scores:
            by_sentence.setdefault(score.paper.sentence, []).append(score.group.label)
        return [
            (sentence, "" if len(by_sentence) == 1 else ", ".join(labels))
            for sentence, labels in by_sentence.items()
        ]


Cells = dict[int, list[ResultNumber]]
"""The numbers of one evaluation, by the group's index."""


def evaluations_of(groups: Sequence[SeedGroup]) -> list[EvaluationTable]:
    """Return every evaluation found in results/*.json, linear and k-NN first."""
    tables: dict[tuple[str, str], Cells] = {}
    for group in groups:
        for run in group.runs:
            for name, result in run.results.items():
                for value in numbers_of(name, result):
                    cells = tables.setdefault((value.id, protocol_key(result)), {})
                    cells.setdefault(group.number, []).append(value)
    by_key = {group_key(group.settings): group.number for group in groups if group.settings}
    baselines = {
        group.number: by_key.get(baseline_key(group.settings)) for group in groups if group.settings
    }
    return [_table(tables[key], groups, baselines) for key in sorted(tables, key=_place)]


def unknown_results(runs: Sequence[RunRecord]) -> list[str]:
    """Return sentences about result files without a known number."""
    return [
        NO_NUMBER.format(run=run.name, name=name)
        for run in runs
        for name, result in run.results.items()
        if name not in NO_EVALUATIONS and not numbers_of(name, result)
    ]


def protocol_key(result: Mapping[str, Any]) -> str:
    """Return what must be equal for results to be comparable: all settings except the seed."""
    settings = result.get("settings")
    if isinstance(settings, dict):
        settings = {name: value for name, value in settings.items() if name != "seed"}
    return describe_protocol(result) + json.dumps(settings, sort_keys=True)


def gain_over(base: int | None, own: int, values: Mapping[int, list[float]]) -> Gain:
    """Return the difference of means of a group and its baseline; `values` are by group."""
    if base == own:
        return Gain("baseline", "baseline")
    if base is None:
        return Gain("no-baseline", "no MoCo-v2 run with these settings")
    if not values.get(base):
        return Gain("not-evaluated", "the MoCo-v2 run lacks this evaluation")
    return difference(values[own], values[base])


def _place(key: tuple[str, str]) -> tuple[int, tuple[str, str]]:
    """Return a sort key: kinds in the order of their titles, then others by name."""
    kinds = list(result_titles())
    kind = evaluation_kind(key[0].partition("/")[0])
    return kinds.index(kind) if kind in kinds else len(kinds), key


def _table(
    cells: Cells, groups: Sequence[SeedGroup], baselines: Mapping[int, int | None]
) -> EvaluationTable:
    values = {number: [100 * each.value for each in cell] for number, cell in cells.items()}
    scores = []
    for group in (group for group in groups if group.number in cells):
        mean, deviation = mean_and_deviation(values[group.number])
        cell = cells[group.number]
        seconds = [100 * each.second_value for each in cell if each.second_value is not None]
        scores.append(
            Score(
                group=group,
                values=values[group.number],
                mean=mean,
                deviation=deviation if len(cell) > 1 else None,
                second=mean_and_deviation(seconds)[0] if seconds else None,
                gain=gain_over(baselines.get(group.number), group.number, values),
                paper=paper_beside(
                    group.settings, *cell[0].paper, cell[0].result, group.runs[0].metrics
                ),
            )
        )
    first = next(iter(cells.values()))[0]
    protocol = describe_protocol(first.result)
    return EvaluationTable(
        first.id, first.title, protocol, first.metric, first.second, scores, _floor(cells)
    )


def _floor(cells: Cells) -> list[tuple[str, float]]:
    """Return the mean accuracy of each untrained baseline, by its title."""
    accuracies: dict[str, list[float]] = {}
    for value in (value for cell in cells.values() for value in cell):
        baselines = value.result.get("baselines")
        for name, result in baselines.items() if isinstance(baselines, dict) else ():
            top1 = number(result.get("top1")) if isinstance(result, dict) else None
            if top1 is not None:
                accuracies.setdefault(name, []).append(100 * top1)
    return [
        (ENCODERS.get(name, name), mean_and_deviation(values)[0])
        for name, values in accuracies.items()
    ]


# -- strips of dots, on which every run of an evaluation has its place


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
