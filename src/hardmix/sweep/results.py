"""Results of a sweep: mean and deviation over seeds, gain over MoCo-v2, the paper's numbers.

They are shown as tables on the terminal, and written to DIR/GRID.csv and GRID.json; for LaTeX to
GRID.tex, with the paper's columns and order, GRID-beside.tex, with every measure beside the paper's
numbers, and GRID-cost.tex, with speed, memory and time.
"""

import csv
import io
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hardmix.errors import InputError
from hardmix.evaluation.accuracy import mean_and_deviation
from hardmix.paper.numbers import PLACES
from hardmix.report.grouping import Gain, difference
from hardmix.runs.folder import Run, versions
from hardmix.runs.reading import RunRecord, number, read_run
from hardmix.runtime.console import say, table
from hardmix.runtime.files import write_atomically
from hardmix.settings.config import PretrainConfig
from hardmix.sweep.grid_rows import PAPER_COLUMNS, Row, baseline_of, paper_numbers
from hardmix.sweep.grids import grid_named
from hardmix.sweep.measures import MEASURES, Measure
from hardmix.sweep.planning import (
    Plan,
    SweepOptions,
    config_of,
    describe,
    evaluations_of,
    name_of,
    same_run,
)
from hardmix.sweep.sweep_folder import read_record, shown_mix, state_of, sweep_command


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
    """The row that is the baseline; empty if there is none."""
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


@dataclass
class FinishedRuns:
    """The finished runs of a row."""

    records: list[RunRecord] = field(default_factory=list)
    """Runs whose folders are here."""
    names: dict[int, str] = field(default_factory=dict)
    """Names of all runs, by seed."""
    machines: dict[int, str] = field(default_factory=dict)
    """CPU and threads of the runs that record them, by seed."""
    values: dict[str, dict[int, float]] = field(default_factory=dict)
    """Results by measure and seed."""


@dataclass(frozen=True)
class TableRow:
    """A row with its runs and their results."""

    row: Row
    config: PretrainConfig
    finished: FinishedRuns
    cells: dict[str, TableCell]
    """Cells by the id of a measure."""


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
        """The folder of every finished run, once."""
        records = (record for line in self.lines for record in line.finished.records)
        return list(dict.fromkeys(record.run.path for record in records))


def collect(plan: Plan) -> SweepResult:
    """Read every finished run of the grid with the requested seeds, ignoring --only."""
    options = plan.options
    grid = grid_named(options.grid)
    files = {name for row in grid.rows for name in evaluations_of(row, options)}
    files |= {"metrics"} if any("proxy" in row.evaluations for row in grid.rows) else set()
    files |= {"pretrain"} if any("cost" in row.evaluations for row in grid.rows) else set()
    measures = [measure for measure in MEASURES if measure.file in files]
    finished = {row.label: _read(row, plan, measures) for row in grid.rows}
    lines = []
    for row in grid.rows:
        if row not in plan.rows and not finished[row.label].names:
            continue
        base = baseline_of(row, grid.rows)
        cells = {measure.id: _cell(row, base, measure, finished) for measure in measures}
        config = config_of(row, options, options.first_seed)
        lines.append(TableRow(row, config, finished[row.label], cells))
    fits, statement, changes = describe(options)
    sentences = [*changes, *same_run([line.row for line in lines], options)]
    return SweepResult(options, grid.place, fits, statement, sentences, measures, lines)


def _read(row: Row, plan: Plan, measures: Sequence[Measure]) -> FinishedRuns:
    """Return the finished runs of a row; a run whose folder is not here may have a record."""
    finished = FinishedRuns(values={measure.id: {} for measure in measures})
    if row.read:
        return _read_from_others(row, plan, measures, finished)
    for seed in plan.options.every_seed:
        name = name_of(config_of(row, plan.options, seed), plan.options)
        run = Run(plan.folder(name))
        values: Mapping[str, float | None]
        if state_of(run) == "finished":
            record = read_run(run.path)
            finished.records.append(record)
            facts = record.results.get("pretrain", {})
            values = {measure.id: measure.value(record) for measure in measures}
        elif (saved := read_record(plan.options, name)) is not None:
            values, facts = saved["measures"], saved
        else:
            continue
        finished.names[seed] = name
        if facts.get("cpu"):
            finished.machines[seed] = f"{facts['cpu']}, threads: {facts.get('threads')}"
        for measure, by_seed in finished.values.items():
            if (value := values.get(measure)) is not None:
                by_seed[seed] = value
    return finished


def _read_from_others(
    row: Row, plan: Plan, measures: Sequence[Measure], finished: FinishedRuns
) -> FinishedRuns:
    """Read a row's results from the first run in DIR that has them under the row's suffix."""
    seed = plan.options.first_seed
    for folder in sorted(plan.options.out.glob("runs/*")):
        if seed in finished.names or not any(folder.glob(f"results/*-{row.read}.json")):
            continue
        record = read_run(folder)
        for measure in measures:
            value = replace(measure, file=f"{measure.file}-{row.read}").value(record)
            if value is not None:
                finished.values[measure.id][seed] = value
                finished.names[seed] = folder.name
    return finished


def _cell(
    row: Row, base: Row | None, measure: Measure, finished: Mapping[str, FinishedRuns]
) -> TableCell:
    ours = finished[row.label].values[measure.id]
    theirs = {} if base is None else finished[base.label].values[measure.id]
    label = "" if base is None or base == row else base.label
    return TableCell(ours, _gain(row, base, ours, theirs), label, _paper(row, base, measure))


def _gain(row: Row, base: Row | None, ours: dict[int, float], theirs: dict[int, float]) -> Gain:
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
        return PaperNumber(None, None, gain.value, True, PLACES[gain.source])
    if own is None:
        return PaperNumber()
    found = PaperNumber(own.value, own.std, own.gain, own.gain is not None, PLACES[own.source])
    if own.gain is not None or base is None or base == row:
        return found
    theirs = paper_numbers(base).get((task, metric))
    return replace(found, gain=round(own.value - theirs.value, 1)) if theirs else found


# -- the result as text


LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
}
"""Characters that are special in LaTeX, or that some of its fonts lack."""


def show_tables(result: SweepResult) -> None:
    """Print whether the numbers are comparable with the paper's, then a table per measure."""
    say(result.statement)
    for measure in result.measures:
        columns = ["", "(N, s, s')", "K", "seeds", "mean ± std", gain_title(measure)]
        columns += ["paper", "paper's gain"] if _has_paper(result, measure) else []
        rows = [[*_start(line, result), *_texts(line, measure, result)] for line in result.lines]
        table(f"{result.options.grid_name}, {measure.title}", columns, rows)
    for line in result.lines:
        if line.row.note:
            say(f"{line.row.label}: {line.row.note}.")


def write_tables(result: SweepResult, out: Path) -> list[Path]:
    """Write the result to GRID.csv, GRID.tex and GRID.json; returns their paths."""
    texts = {".csv": as_csv(result), ".tex": as_latex(result), ".json": as_json(result)}
    results, costs = measures_by_kind(result)
    if printed_measures(result):
        texts["-beside.tex"] = beside_latex(result, results)
    if costs:
        texts["-cost.tex"] = beside_latex(result, costs)
    grid = result.options.grid_name
    return write_files({out / f"{grid}{ending}": text for ending, text in texts.items()})


def write_files(texts: Mapping[Path, str]) -> list[Path]:
    """Write texts to the files of a sweep's folder; returns their paths."""
    for file, text in texts.items():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, text.encode())
        except OSError as error:
            raise InputError(f"--out {file.parent} cannot be written: {error.strerror}.") from error
    return list(texts)


def as_csv(result: SweepResult) -> str:
    """Return a line for every row and measure, with numbers in full precision."""
    out = io.StringIO()
    lines: list[dict[str, Any]] = [
        {
            "label": line.row.label,
            **_setting(line),
            "measure": measure.id,
            "title": measure.title,
            **_cell_facts(line.cells[measure.id]),
            "comparable": "yes" if result.comparable else "no",
            "note": line.row.note,
        }
        for line in result.lines
        for measure in result.measures
    ]
    names = [name for name in lines[0] if name != "values"] if lines else []
    writer = csv.DictWriter(out, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def as_json(result: SweepResult) -> str:
    """Return all results, with what they depend on."""
    options = result.options
    rows = [
        {
            "label": line.row.label,
            **_setting(line),
            "runs": list(line.finished.names.values()),
            "results": {
                measure.id: {"title": measure.title, **_cell_facts(line.cells[measure.id])}
                for measure in result.measures
            },
            "note": line.row.note,
        }
        for line in result.lines
    ]
    facts = {
        "grid": options.grid_name,
        "place": result.place,
        "scale": options.scale,
        "comparable": result.comparable,
        "statement": result.statement,
        "scaling": result.sentences,
        "seeds": list(options.every_seed),
        "rows": rows,
        "command": shlex.join(sweep_command(options, anywhere=False)),
        "versions": versions(),
    }
    return json.dumps(facts, indent=2, allow_nan=False) + "\n"


def measures_by_kind(result: SweepResult) -> tuple[list[Measure], list[Measure]]:
    """Return the measures of encoders, and those of what training cost."""
    costs = [measure for measure in result.measures if measure.file == "pretrain"]
    return [measure for measure in result.measures if measure not in costs], costs


def printed_measures(result: SweepResult) -> list[Measure]:
    """Return the measures of the paper's columns, in its order."""
    found = {each.paper: each for each in result.measures if _has_paper(result, each)}
    return [found[key] for key in PAPER_COLUMNS if key in found]


def as_latex(result: SweepResult) -> str:
    """Return the table as the paper prints it: its columns, its sections, its order.

    A grid without a table in the paper has all measures side by side.
    """
    measures = printed_measures(result)
    if not measures:
        return beside_latex(result, measures_by_kind(result)[0])
    alone = len(measures) == 1
    columns = ["Method", *(_printed_title(measure) for measure in measures)]
    columns += ["diff"] if alone else []
    rows: list[str | list[str]] = []
    section = None
    for line in result.lines:
        if (begun := _section(line, result)) != section:
            section = begun
            rows += [section] if section else []
        cells = [_printed_label(line)]
        for measure in measures:
            gain = _printed_gain(line, measure)
            text = _mean_text(line.cells[measure.id], measure, _spread(line, measure))
            cells += [text, gain] if alone else [f"{text} ({gain})" if gain else text]
        rows.append(cells)
    caption = " ".join([f"{result.place}.", result.statement, *result.sentences])
    return latex_table(columns, "l" + "l" * (len(columns) - 1), rows, caption)


def _printed_title(measure: Measure) -> str:
    assert measure.paper is not None
    return escape(PAPER_COLUMNS[measure.paper])


def _section(line: TableRow, result: SweepResult) -> str:
    """Return the paper's heading above a row; empty if its table has none there."""
    row, lengths = line.row, {each.row.epochs for each in result.lines}
    if row.oracle or (row.method == "supervised" and not row.read):
        return "Using Class Oracle"
    if row.read:
        return "Supervised"
    if len({each.row.queue_size for each in result.lines if each.row.mix}) > 1:
        usual = max(each.row.queue_size for each in result.lines)
        if row.queue_size != usual and not row.printed:
            return f"K = {row.queue_size}"
    return f"{row.epochs} epoch training" if len(lengths) > 1 else ""


def _printed_label(line: TableRow) -> str:
    """Return a row's name as the paper prints it, without what its section says."""
    row = line.row
    label = row.label if row.oracle else row.label.removesuffix(f", {row.epochs} epochs")
    label = label.removesuffix(f", K = {row.queue_size}").replace(", oracle", "")
    return f"+ {label}" if row.mix and label.startswith("MoCHi") else label


def _printed_gain(line: TableRow, measure: Measure) -> str:
    """Return the difference to MoCo-v2; as in the paper, only rows that mix have one."""
    gain = line.cells[measure.id].gain.points
    return "" if gain is None or line.row.mix is None else f"{gain:+.1f}"


def _spread(line: TableRow, measure: Measure) -> float | None:
    """Return the deviation of a cell; of a single run, that of its detectors, as in the paper."""
    cell = line.cells[measure.id]
    if cell.deviation is not None or len(line.finished.records) != 1:
        return cell.deviation
    metric, key = measure.path[1:3] if measure.file.startswith("detection-") else ("", "")
    metrics = line.finished.records[0].results.get(measure.file, {}).get("metrics", {})
    spread = number(metrics.get(metric, {}).get(key, {}).get("std"))
    return None if spread is None else 100 * spread


def beside_latex(result: SweepResult, measures: Sequence[Measure]) -> str:
    """Return measures side by side, beside the paper's numbers, as a table of LaTeX."""
    columns = ["", "($N$, $s$, $s'$)", "$K$", "seeds"]
    for measure in measures:
        columns += [escape(measure.title), gain_title(measure)]
        columns += ["paper", "paper's gain"] if _has_paper(result, measure) else []
    rows = []
    for line in result.lines:
        cells = _start(line, result)
        for measure in measures:
            cells += _texts(line, measure, result)
        rows.append(cells)
    caption = " ".join([f"{result.place}.", result.statement, *result.sentences])
    return latex_table(columns, "l" + "r" * (len(columns) - 1), rows, caption)


def latex_table(
    columns: Sequence[str], alignment: str, rows: Sequence[str | Sequence[str]], caption: str
) -> str:
    """Return a table environment that needs no LaTeX package; `columns` are LaTeX already.

    A row that is a single string is the heading of those below it.
    """
    rule = r"\hline"
    lines_of_rows = [
        rf"\multicolumn{{{len(columns)}}}{{c}}{{\emph{{{escape(row)}}}}} \\"
        if isinstance(row, str)
        else " & ".join(map(escape, row)) + r" \\"
        for row in rows
    ]
    lines = [
        r"\begin{table}",
        rf"\begin{{tabular}}{{{alignment}}}",
        *(rule, " & ".join(columns) + r" \\", rule),
        *lines_of_rows,
        rule,
        r"\end{tabular}",
        rf"\caption{{{escape(caption)}}}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def escape(text: str) -> str:
    """Return text escaped for LaTeX."""
    return "".join(LATEX.get(letter, letter) for letter in text)


def gain_title(measure: Measure) -> str:
    """Return the title of gains; alignment and uniformity are losses: less is better."""
    return "gain" if measure.percent else "change"


def _start(line: TableRow, result: SweepResult) -> list[str]:
    """Return the first cells: label, (N, s, s'), K, finished seeds out of those requested."""
    seeds = f"{len(line.finished.names)}/{result.options.seeds}"
    return [line.row.label, *shown_mix(line.config), seeds]


def _texts(line: TableRow, measure: Measure, result: SweepResult) -> list[str]:
    """Return a measure's cells: mean and gain, and the paper's if it has any."""
    cell = line.cells[measure.id]
    ours = [_mean_text(cell, measure), _gain_text(cell, measure)]
    return ours + _paper_texts(cell.paper) if _has_paper(result, measure) else ours


def _mean_text(cell: TableCell, measure: Measure, spread_of_one: float | None = None) -> str:
    """Return mean and deviation over seeds; a single seed has that of its detectors, if any."""
    if cell.mean is None:
        return "-"
    digits = measure.digits
    deviation = spread_of_one if cell.deviation is None else cell.deviation
    spread = "" if deviation is None else f" ± {deviation:.{digits}f}"
    return f"{cell.mean:.{digits}f}{spread}"


def _gain_text(cell: TableCell, measure: Measure) -> str:
    """Return the points over MoCo-v2 with the standard error of the difference."""
    if cell.gain.points is None:
        return "base" if cell.gain.id == "baseline" else "-"
    digits = measure.digits
    error = "" if cell.gain.error is None else f" ± {cell.gain.error:.{digits}f}"
    return f"{cell.gain.points:+.{digits}f}{error}"


def _paper_texts(paper: PaperNumber) -> list[str]:
    """Return the paper's number, and its gain, printed or the difference of printed numbers."""
    gain = "-" if paper.gain is None else f"{paper.gain:+.1f}"
    if paper.value is None:
        return ["-", gain]
    return [f"{paper.value:.1f}" + ("" if paper.std is None else f" ± {paper.std:.1f}"), gain]


def _has_paper(result: SweepResult, measure: Measure) -> bool:
    return any(line.cells[measure.id].paper.place for line in result.lines)


def _setting(line: TableRow) -> dict[str, Any]:
    """Return the settings as trained; None if the method has no such setting."""
    config = line.config
    mixes = config.mixes
    return {
        "num_hardest": config.mix.num_hardest if mixes else None,
        "num_pairs": config.mix.num_pairs if mixes else None,
        "num_with_query": config.mix.num_with_query if mixes else None,
        "queue_size": config.train.queue_size if config.uses("train.queue_size") else None,
        "epochs": config.train.stop_epoch or config.train.epochs,
        "seeds_finished": len(line.finished.names),
    }


def _cell_facts(cell: TableCell) -> dict[str, Any]:
    return {
        "values": {str(seed): value for seed, value in cell.values.items()},
        "mean": cell.mean,
        "std": cell.deviation,
        "gain": cell.gain.points,
        "gain_error": cell.gain.error,
        "gain_over": cell.baseline,
        "gain_word": cell.gain.word,
        "paper": cell.paper.value,
        "paper_std": cell.paper.std,
        "paper_gain": cell.paper.gain,
        "paper_gain_printed": cell.paper.gain_printed,
        "paper_place": cell.paper.place,
    }
