"""The tables of docs/results.md, and the README's, as they follow from the records of the runs.

A table is written between <!-- table NAME --> and <!-- end -->. Its rows name runs as GRID/ROW,
GRID being a file of docs/results/grids; the seeds of several joined by + are pooled. Its cells are

    MEASURE          mean over seeds, ± their standard deviation
    base MEASURE     the same of the row's baseline, for seeds that both have
    gain MEASURE     mean difference by seed with its 95 % interval, bold if that excludes 0
    pairs            number of differences

A cell that a row has nothing for is empty.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from results_tables import TABLES, Table

from hardmix.evaluation.accuracy import mean_and_deviation
from hardmix.sweep.pairs import student_interval

BLOCK = re.compile(r"(?P<begin><!-- table (?P<name>\S+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)
WHOLE = ("synthetic_mass", "images_per_second", "peak_mb")
"""Shown without decimals and without a deviation."""
ONE_DIGIT = ("proxy_accuracy", "proxy_accuracy_mixed")


class Row(NamedTuple):
    """The runs of a row by seed and measure, and those of its baseline."""

    ours: dict[int, dict[str, float]]
    base: dict[int, dict[str, float]]

    def differences(self, measure: str) -> list[float]:
        """By seed, for those that both have."""
        return [
            values[measure] - self.base[seed][measure]
            for seed, values in self.ours.items()
            if measure in values and measure in self.base.get(seed, {})
        ]


Evidence = Mapping[str, Row]
"""By GRID/ROW."""


def filled(page: str, evidence: Evidence) -> str:
    """Return the page with every table as the records have it."""

    def block(match: re.Match[str]) -> str:
        return f"{match['begin']}{render(TABLES[match['name']], evidence)}\n{match['end']}"

    return BLOCK.sub(block, page)


def render(table: Table, evidence: Evidence) -> str:
    """Return a table as Markdown."""
    titles = _split(table.titles)
    lines = [titles, ["---"] * len(titles)]
    for text, runs in table.rows:
        row = runs_of(runs, evidence)
        start = _split(text) if text else []
        lines.append([*start, *(cell(row, each) for each in _split(table.cells))])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _split(cells: str) -> list[str]:
    return [each.strip() for each in cells.split("|")]


def runs_of(names: str, evidence: Evidence) -> Row:
    """Return the runs that a row of a table or a figure names."""
    return pooled([evidence[name] for name in names.split(" + ")])


def pooled(rows: list[Row]) -> Row:
    """Return the runs of all seeds; a seed that two grids have must be the same run."""
    ours: dict[int, dict[str, float]] = {}
    base: dict[int, dict[str, float]] = {}
    for row in rows:
        for all_runs, runs in ((ours, row.ours), (base, row.base)):
            for seed, values in runs.items():
                known = all_runs.setdefault(seed, values)
                if any(known[measure] != values[measure] for measure in known.keys() & values):
                    raise ValueError(f"seed {seed} is not the same run in all of these rows")
    return Row(ours, base)


def cell(row: Row, what: str) -> str:
    """Return a cell's text."""
    kind, _, measure = what.rpartition(" ")
    if measure == "pairs":
        return str(len(row.differences("linear-cached")) or "")
    if kind == "gain":
        return gain(row.differences(measure))
    runs = row.ours.values()
    if kind == "base":
        runs = [row.base[seed] for seed in row.ours if seed in row.base]
    return mean([values[measure] for values in runs if measure in values], measure)


def gain(differences: list[float]) -> str:
    """Return the mean difference with its interval, bold if it counts."""
    if not differences:
        return ""
    interval = student_interval(differences)
    return f"**{interval.text(2)}**" if interval.sign else interval.text(2)


def mean(values: list[float], measure: str) -> str:
    """Return the mean, with its deviation where readers need it."""
    if not values:
        return ""
    middle, deviation = mean_and_deviation(values)
    if measure in WHOLE:
        return f"{middle:.0f}"
    digits = 1 if measure in ONE_DIGIT else 2
    return f"{middle:.{digits}f}" + (f" ± {deviation:.{digits}f}" if len(values) > 1 else "")
