"""What the runs of a sweep show: mean and deviation over seeds, gain over MoCo-v2, the paper's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hardmix.analysis.over_training import epoch_means
from hardmix.evaluation.accuracy import mean_and_deviation
from hardmix.paper.numbers import PLACES, PaperRow
from hardmix.report.gains import Gain, difference
from hardmix.runs.folder import Run
from hardmix.runs.reading import RunRecord, number, read_run
from hardmix.settings.config import PretrainConfig
from hardmix.settings.titles import accuracy_titles
from hardmix.sweep.estimates import state_of
from hardmix.sweep.evaluating import is_present
from hardmix.sweep.grid_rows import Row, baseline_of, paper_numbers
from hardmix.sweep.grids import grid_named
from hardmix.sweep.planning import Plan, SweepOptions, config_of, evaluations_of, run_name, same_run
from hardmix.sweep.scales import comparable, describe_scale


@dataclass(frozen=True)
class Measure:
    """A number of a result file, and where the paper has it."""

    id: str
    """What it is joined by; titles are only shown."""
    title: str
    file: str
    """Result file; "metrics" is metrics.jsonl, of whose last epoch the mean is taken."""
    path: tuple[str, ...]
    paper: tuple[str, str] | None = None
    """Task and metric in the paper's numbers."""
    percent: bool = True


@dataclass(frozen=True)
class PaperNumber:
    """What the paper prints; a gain that it does not print is the difference of what it prints."""

    value: float | None = None
    std: float | None = None
    gain: float | None = None
    gain_printed: bool = False
    place: str = ""


@dataclass(frozen=True)
class TableCell:
    """A row in one measure; shares are in percent."""

    values: dict[int, float]
    """By seed."""
    gain: Gain
    baseline: str
    """The row that the gain is over; empty: none."""
    paper: PaperNumber

    @property
    def mean(self) -> float | None:
        """Over seeds."""
        return mean_and_deviation(list(self.values.values()))[0] if self.values else None

    @property
    def deviation(self) -> float | None:
        """Of a sample (n - 1); None for a single seed."""
        several = len(self.values) > 1
        return mean_and_deviation(list(self.values.values()))[1] if several else None


@dataclass(frozen=True)
class TableRow:
    """A row with its runs and what they show."""

    row: Row
    config: PretrainConfig
    runs: list[RunRecord]
    """Finished ones."""
    cells: list[TableCell]
    """One for each of the result's measures."""


@dataclass(frozen=True)
class SweepResult:
    """A grid's table, before it is text."""

    options: SweepOptions
    place: str
    comparable: bool
    statement: str
    sentences: list[str]
    """How the scale changed the paper's settings, and which rows became one."""
    measures: list[Measure]
    lines: list[TableRow]

    @property
    def runs(self) -> list[Path]:
        """Every finished run once."""
        return list(dict.fromkeys(run.run.path for line in self.lines for run in line.runs))


def _detection(file: str, metric: str, task: str, name: str, words: str) -> list[Measure]:
    paper = {"ap": "", "ap50": "50", "ap75": "75"}
    return [
        Measure(
            f"{file}/{metric}/{key}",
            f"{words} AP{end}",
            file,
            ("metrics", metric, key, "mean"),
            (task, f"{name}{end}") if task else None,
        )
        for key, end in paper.items()
    ]


PAPER_ACCURACIES = dict.fromkeys(("linear", "linear-cached"), ("linear", "top1"))
"""Beside which of the paper's numbers an accuracy stands, by the kind of its file."""

MEASURES: list[Measure] = [
    Measure("proxy_accuracy", "proxy accuracy", "metrics", ("proxy_accuracy",)),
    Measure(
        "proxy_accuracy_mixed",
        "proxy accuracy, synthetic points too",
        "metrics",
        ("proxy_accuracy_mixed",),
    ),
    *(
        Measure(kind, title, kind, ("top1",), PAPER_ACCURACIES.get(kind))
        for kind, title in accuracy_titles().items()
    ),
    *_detection("detection-voc-24k", "VOC07 11-point", "voc_detection", "AP", "VOC"),
    *_detection("detection-coco-1x", "COCO box", "coco_detection", "APbb", "COCO 1x box"),
    *_detection("detection-coco-1x", "COCO mask", "coco_segmentation", "APmk", "COCO 1x mask"),
    *_detection("detection-coco-2x", "COCO box", "", "", "COCO 2x box"),
    *_detection("detection-coco-2x", "COCO mask", "", "", "COCO 2x mask"),
    Measure("alignment", "alignment", "embedding", ("alignment",), percent=False),
    Measure("uniformity", "uniformity", "embedding", ("uniformity",), percent=False),
]
"""Losses of App. A have Wang and Isola's sign: lower is better."""


def collect(plan: Plan) -> SweepResult:
    """Read every finished run of the grid with the seeds asked for, chosen by --only or not."""
    options = plan.options
    grid = grid_named(options.grid)
    wanted = {name for row in grid.rows for name in evaluations_of(row, options)}
    wanted |= {"metrics"} if any("proxy" in row.evaluations for row in grid.rows) else set()
    measures = [measure for measure in MEASURES if measure.file in wanted]
    found = {row.label: _read(row, plan, measures) for row in grid.rows}
    lines = []
    for row in grid.rows:
        runs, values = found[row.label]
        if row not in plan.rows and not runs:
            continue
        base = baseline_of(row, grid.rows)
        theirs = found[base.label][1] if base is not None else None
        cells = [
            TableCell(
                values[each],
                _gain(row, base, values[each], theirs[each] if theirs else None),
                "" if base is None or base == row else base.label,
                _paper(row, base, measure),
            )
            for each, measure in enumerate(measures)
        ]
        lines.append(TableRow(row, config_of(row, options, options.first_seed), runs, cells))
    fits, statement = comparable(options.scale)
    sentences = [
        *describe_scale(grid.rows[0], options.scale, options.epochs, options.temperature),
        *same_run([line.row for line in lines], options),
    ]
    return SweepResult(options, grid.place, fits, statement, sentences, measures, lines)


def _read(
    row: Row, plan: Plan, measures: Sequence[Measure]
) -> tuple[list[RunRecord], list[dict[int, float]]]:
    """Finished runs of a row, and for every measure its values by seed."""
    runs: list[RunRecord] = []
    values: list[dict[int, float]] = [{} for _ in measures]
    for seed in plan.options.every_seed:
        run = Run(plan.folder(run_name(config_of(row, plan.options, seed))))
        if state_of(run) != "finished":
            continue
        runs.append(read_run(run.path))
        for cell, measure in zip(values, measures, strict=True):
            value = _value(runs[-1], measure)
            if value is not None:
                cell[seed] = 100 * value if measure.percent else value
    return runs, values


def _value(record: RunRecord, measure: Measure) -> float | None:
    if measure.file == "metrics":
        means = epoch_means(record.metrics, measure.path[0])
        return means[-1] if means else None
    if not is_present(record, measure.file):
        return None
    inside: Any = record.results[measure.file]
    for name in measure.path:
        inside = inside.get(name) if isinstance(inside, Mapping) else None
    return number(inside)


def _gain(
    row: Row, base: Row | None, ours: Mapping[int, float], theirs: Mapping[int, float] | None
) -> Gain:
    if base == row:
        return Gain("baseline", "baseline")
    if base is None:
        return Gain("no-baseline", "the grid has no MoCo-v2 row with this K and length")
    if not ours or not theirs:
        return Gain("not-evaluated", "not evaluated yet")
    return difference(list(ours.values()), list(theirs.values()))


def _paper(row: Row, base: Row | None, measure: Measure) -> PaperNumber:
    """The paper's number of a row: Fig. 3b prints gains alone."""
    if measure.paper is None:
        return PaperNumber()
    task, metric = measure.paper
    printed = paper_numbers(row)
    own, gain = printed.get((task, metric)), printed.get((task, f"{metric}_gain"))
    if gain is not None:
        return PaperNumber(None, None, gain.value, True, _place(gain))
    if own is None:
        return PaperNumber()
    found = PaperNumber(own.value, own.std, own.gain, own.gain is not None, _place(own))
    if own.gain is not None or base is None or base == row:
        return found
    theirs = paper_numbers(base).get((task, metric))
    return replace(found, gain=round(own.value - theirs.value, 1)) if theirs else found


def _place(row: PaperRow) -> str:
    return PLACES[row.source]
