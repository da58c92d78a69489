"""Results of a sweep: mean and deviation over seeds, gain over MoCo-v2, the paper's numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hardmix.evaluation.accuracy import mean_and_deviation
from hardmix.paper.numbers import PLACES, PaperRow
from hardmix.report.gains import Gain, difference
from hardmix.runs.folder import Run
from hardmix.runs.reading import RunRecord, read_run
from hardmix.settings.config import PretrainConfig
from hardmix.sweep.estimates import state_of
from hardmix.sweep.grid_rows import Row, baseline_of, paper_numbers
from hardmix.sweep.grids import grid_named
from hardmix.sweep.measures import MEASURES, Measure
from hardmix.sweep.planning import (
    Plan,
    SweepOptions,
    config_of,
    describe,
    evaluations_of,
    run_name,
    same_run,
)
from hardmix.sweep.records import read_record


@dataclass(frozen=True)
class PaperNumber:
    """The paper's number; a gain that is not printed is the difference of printed numbers."""

    value: float | None = None
    std: float | None = None
    gain: float | None = None
    gain_printed: bool = False
    place: str = ""


@dataclass(frozen=True)
class TableCell:
    """A row in one measure; fractions are in percent."""

    values: dict[int, float]
    """Values by seed."""
    gain: Gain
    baseline: str
    """The row that is the baseline; empty if none."""
    paper: PaperNumber

    @property
    def mean(self) -> float | None:
        """Mean over seeds."""
        return mean_and_deviation(list(self.values.values()))[0] if self.values else None

    @property
    def deviation(self) -> float | None:
        """Sample standard deviation (n - 1); None for a single seed."""
        several = len(self.values) > 1
        return mean_and_deviation(list(self.values.values()))[1] if several else None


@dataclass(frozen=True)
class TableRow:
    """A row with its runs and their results."""

    row: Row
    config: PretrainConfig
    runs: list[RunRecord]
    """Finished runs whose folders are here."""
    names: dict[int, str]
    """Names of all finished runs, by seed."""
    machines: dict[int, str]
    """CPU and threads of the runs that record them, by seed."""
    cells: list[TableCell]
    """One cell for each of the result's measures."""


@dataclass(frozen=True)
class SweepResult:
    """The results of a grid."""

    options: SweepOptions
    place: str
    comparable: bool
    statement: str
    sentences: list[str]
    """How the scale changed the paper's settings, and which rows share runs."""
    measures: list[Measure]
    lines: list[TableRow]

    @property
    def runs(self) -> list[Path]:
        """Every finished run, once."""
        return list(dict.fromkeys(run.run.path for line in self.lines for run in line.runs))


def collect(plan: Plan) -> SweepResult:
    """Read every finished run of the grid with the requested seeds, ignoring --only."""
    options = plan.options
    grid = grid_named(options.grid)
    wanted = {name for row in grid.rows for name in evaluations_of(row, options)}
    wanted |= {"metrics"} if any("proxy" in row.evaluations for row in grid.rows) else set()
    wanted |= {"pretrain"} if any("cost" in row.evaluations for row in grid.rows) else set()
    measures = [measure for measure in MEASURES if measure.file in wanted]
    found = {row.label: _read(row, plan, measures) for row in grid.rows}
    lines = []
    for row in grid.rows:
        runs, names, machines, values = found[row.label]
        if row not in plan.rows and not names:
            continue
        base = baseline_of(row, grid.rows)
        theirs = found[base.label][3] if base is not None else None
        cells = [
            TableCell(
                values[each],
                _gain(row, base, values[each], theirs[each] if theirs else None),
                "" if base is None or base == row else base.label,
                _paper(row, base, measure),
            )
            for each, measure in enumerate(measures)
        ]
        config = config_of(row, options, options.first_seed)
        lines.append(TableRow(row, config, runs, names, machines, cells))
    fits, statement, changes = describe(options)
    sentences = [*changes, *same_run([line.row for line in lines], options)]
    return SweepResult(options, grid.place, fits, statement, sentences, measures, lines)


def _read(
    row: Row, plan: Plan, measures: Sequence[Measure]
) -> tuple[list[RunRecord], dict[int, str], dict[int, str], list[dict[int, float]]]:
    """Return a row's folders, names and machines by seed, and values by measure and seed.

    A run whose folder is not here may have a record.
    """
    runs: list[RunRecord] = []
    names: dict[int, str] = {}
    machines: dict[int, str] = {}
    values: list[dict[int, float]] = [{} for _ in measures]
    for seed in plan.options.every_seed:
        name = run_name(config_of(row, plan.options, seed))
        run = Run(plan.folder(name))
        if state_of(run) == "finished":
            runs.append(read_run(run.path))
            facts = runs[-1].results.get("pretrain", {})
            found = {measure.id: measure.value(runs[-1]) for measure in measures}
        elif (record := read_record(plan.options, name)) is not None:
            found, facts = record["measures"], record
        else:
            continue
        names[seed] = name
        if facts.get("cpu"):
            machines[seed] = f"{facts['cpu']}, threads: {facts.get('threads')}"
        for cell, measure in zip(values, measures, strict=True):
            if (value := found.get(measure.id)) is not None:
                cell[seed] = value
    return runs, names, machines, values


def _gain(
    row: Row, base: Row | None, ours: Mapping[int, float], theirs: Mapping[int, float] | None
) -> Gain:
    if base == row:
        return Gain("baseline", "baseline")
    if base is None:
        return Gain("no-baseline", "the grid has no baseline for this row")
    if not ours or not theirs:
        return Gain("not-evaluated", "not evaluated yet")
    return difference(list(ours.values()), list(theirs.values()))


def _paper(row: Row, base: Row | None, measure: Measure) -> PaperNumber:
    """Return the paper's number for a row; Fig. 3b prints only gains."""
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
