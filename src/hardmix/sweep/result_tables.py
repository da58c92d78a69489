"""A sweep's result as text: tables on the terminal, DIR/GRID.csv, DIR/GRID.tex, DIR/GRID.json."""

import csv
import io
import json
import shlex
from pathlib import Path
from typing import Any

from hardmix.errors import InputError
from hardmix.runs.folder import versions
from hardmix.runtime.atomic_files import write_atomically
from hardmix.runtime.console import say, table
from hardmix.sweep.estimates import shown_mix
from hardmix.sweep.measures import Measure
from hardmix.sweep.results import SweepResult, TableCell, TableRow
from hardmix.sweep.sweep_folder import sweep_command

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
    for number, measure in enumerate(result.measures):
        beside = _has_paper(result, number)
        rows = []
        for line in result.lines:
            cell = line.cells[number]
            row = [line.row.label, *shown_mix(line.config), seeds_text(line, result)]
            row += [mean_text(cell, measure), gain_text(cell, measure)]
            rows.append(row + ([paper_text(cell), paper_gain_text(cell)] if beside else []))
        columns = ["", "(N, s, s')", "K", "seeds", "mean ± std", gain_title(measure)]
        columns += ["paper", "paper's gain"] if beside else []
        table(f"{result.options.grid_name}, {measure.title}", columns, rows)
    for line in result.lines:
        if line.row.note:
            say(f"{line.row.label}: {line.row.note}.")


def write_tables(result: SweepResult, out: Path) -> list[Path]:
    """Write the same to files."""
    grid = result.options.grid_name
    texts = {"csv": as_csv(result), "tex": as_latex(result), "json": as_json(result)}
    files = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        for ending, text in texts.items():
            files.append(out / f"{grid}.{ending}")
            write_atomically(files[-1], text.encode())
    except OSError as error:
        raise InputError(f"--out {out} cannot be written: {error.strerror}.") from error
    return files


def as_csv(result: SweepResult) -> str:
    """Return a line for every row and measure, with numbers in full precision."""
    out = io.StringIO()
    lines = [
        {"label": line.row.label, **_setting(line), **facts}
        for line in result.lines
        for measure, cell in zip(result.measures, line.cells, strict=True)
        for facts in [{"measure": measure.id, "title": measure.title, **_cell_facts(cell)}]
    ]
    names = [name for name in lines[0] if name != "values"] if lines else []
    names += ["comparable", "note"]
    writer = csv.DictWriter(out, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    notes = {line.row.label: line.row.note for line in result.lines}
    fits = "yes" if result.comparable else "no"
    for each in lines:
        writer.writerow({**each, "comparable": fits, "note": notes[str(each["label"])]})
    return out.getvalue()


def as_json(result: SweepResult) -> str:
    """Return all results, with what they depend on."""
    options = result.options
    rows = [
        {
            "label": line.row.label,
            **_setting(line),
            "runs": list(line.names.values()),
            "results": {
                measure.id: {"title": measure.title, **_cell_facts(cell)}
                for measure, cell in zip(result.measures, line.cells, strict=True)
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


def as_latex(result: SweepResult) -> str:
    """Return a table environment that needs no LaTeX package."""
    columns = ["", "($N$, $s$, $s'$)", "$K$", "seeds"]
    for number, measure in enumerate(result.measures):
        columns += [escape(measure.title), gain_title(measure)]
        columns += ["paper", "paper's gain"] if _has_paper(result, number) else []
    body = []
    for line in result.lines:
        cells = [line.row.label, *shown_mix(line.config), seeds_text(line, result)]
        for number, (measure, cell) in enumerate(zip(result.measures, line.cells, strict=True)):
            cells += [mean_text(cell, measure), gain_text(cell, measure)]
            if _has_paper(result, number):
                cells += [paper_text(cell), paper_gain_text(cell)]
        body.append(" & ".join(map(escape, cells)) + r" \\")
    caption = " ".join([f"{result.place}.", result.statement, *result.sentences])
    rule = r"\hline"
    lines = [
        r"\begin{table}",
        rf"\begin{{tabular}}{{l{'r' * (len(columns) - 1)}}}",
        *(rule, " & ".join(columns) + r" \\", rule),
        *(*body, rule),
        r"\end{tabular}",
        rf"\caption{{{escape(caption)}}}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def escape(text: str) -> str:
    """Return text escaped for LaTeX."""
    return "".join(LATEX.get(letter, letter) for letter in text)


def mean_text(cell: TableCell, measure: Measure) -> str:
    """Return mean and deviation over seeds; a single seed has no deviation."""
    if cell.mean is None:
        return "-"
    digits = measure.digits
    spread = "" if cell.deviation is None else f" ± {cell.deviation:.{digits}f}"
    return f"{cell.mean:.{digits}f}{spread}"


def gain_text(cell: TableCell, measure: Measure) -> str:
    """Return the points over MoCo-v2 with the standard error of the difference."""
    if cell.gain.points is None:
        return "base" if cell.gain.id == "baseline" else "-"
    digits = measure.digits
    error = "" if cell.gain.error is None else f" ± {cell.gain.error:.{digits}f}"
    return f"{cell.gain.points:+.{digits}f}{error}"


def gain_title(measure: Measure) -> str:
    """Return the title of gains; alignment and uniformity are losses: less is better."""
    return "gain" if measure.percent else "change"


def paper_text(cell: TableCell) -> str:
    """Return the number as the paper prints it."""
    paper = cell.paper
    if paper.value is None:
        return "-"
    return f"{paper.value:.1f}" + ("" if paper.std is None else f" ± {paper.std:.1f}")


def paper_gain_text(cell: TableCell) -> str:
    """Return the paper's gain as printed, or the difference of two printed numbers."""
    return "-" if cell.paper.gain is None else f"{cell.paper.gain:+.1f}"


def seeds_text(line: TableRow, result: SweepResult) -> str:
    """Return finished seeds out of those requested."""
    return f"{len(line.names)}/{result.options.seeds}"


def _has_paper(result: SweepResult, number: int) -> bool:
    papers = [line.cells[number].paper for line in result.lines]
    return any(paper.place for paper in papers)


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
        "seeds_finished": len(line.names),
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
