"""Writes every table and figure of the experiments from the records.

    python experiments/results.py

For each file in grids/ it writes tables into tables/ and figures into tables/figures, as `hardmix
sweep GRID --collect --pairs` does; nothing is trained. Then it draws the figures of
docs/results.md, which combine grids, and writes the tables of that page, of the README and, from
loops.jsonl, of docs/library.md. With --check it only reports tables that differ from the records.
"""

import os
import shutil
import sys
from pathlib import Path

from loops_table import loops_table
from page import OWN_VIEWS, WEAK_VIEWS, Evidence, Row, filled, runs_of

from hardmix.analysis.paired_gains import GainLine, GainPoint, forests_beside, gain_over
from hardmix.analysis.picture import save
from hardmix.sweep.own_grids import read_grid
from hardmix.sweep.pairs import refused_pairs, student_interval
from hardmix.sweep.planning import SweepOptions, make_plan
from hardmix.sweep.results import collect
from hardmix.sweep.sweeping import sweep

FOLDER = Path(os.path.relpath(Path(__file__).parent))
"""Folder of the tables; relative, because tables contain their command."""
TABLES, DOCS = FOLDER / "tables", FOLDER.parent / "docs"
PENDING = ("long", "warm-up")
"""Grids whose runs are not complete, and whose results are not read (experiments/plan.md)."""
PAGES = (DOCS / "results.md", DOCS / "family.md", FOLDER.parent / "README.md")

EVERYWHERE = (
    ("question-2-views/colour-0.08-mochi", "crops from 0.08, colours"),
    (OWN_VIEWS, "MoCo-v2's own views"),
    ("question-2-other-means/wider-mochi", "the same, twice as wide"),
    ("question-2-other-means/longer-mochi", "the same, 60 epochs"),
    ("question-3/images-500-mochi", "the same, 500 images"),
    ("question-3/images-2000-mochi", "the same, 2,000 images"),
    ("question-3/quarter-mochi", "the same, K = 512"),
    ("question-2-views/colour-0.6-mochi", "crops from 0.6, colours"),
    ("question-2-views/plain-0.08-mochi", "crops from 0.08"),
    (WEAK_VIEWS, "crops from 0.2"),
    ("question-2-mass/less", "the same, a quarter of the points"),
    ("question-2-mass/more", "the same, four times the points"),
    ("question-2-mass/tau-0.4-mochi", "the same, temperature 0.4"),
    ("question-2-mass/tau-0.1-mochi", "the same, temperature 0.1"),
    ("question-2-views/plain-0.6-mochi", "crops from 0.6"),
)
"""Runs and what differs in them: MoCHi over MoCo-v2, six pairs or more."""
OVER_PROXY = (
    ("question-2-views/colour-0.08-mochi", "crops from 0.08, colours", True),
    (OWN_VIEWS, "crops from 0.2, colours: MoCo-v2's own views", True),
    ("question-2-views/colour-0.6-mochi", "crops from 0.6, colours", True),
    ("question-2-views/plain-0.08-mochi", "crops from 0.08", True),
    (WEAK_VIEWS, "crops from 0.2", True),
    ("question-2-views/plain-0.6-mochi", "crops from 0.6", True),
    ("question-3/images-500-mochi", "MoCo-v2's views, 500 images", False),
    ("question-3/images-2000-mochi", "MoCo-v2's views, 2,000 images", False),
    ("question-3/quarter-mochi", "MoCo-v2's views, K = 512", False),
    ("question-2-other-means/wider-mochi", "MoCo-v2's views, twice as wide", False),
    ("question-2-other-means/longer-mochi", "MoCo-v2's views, 60 epochs", False),
)
"""Runs at temperature 0.2 with six pairs or more, their labels, and whether only views differ."""
ACCURACIES = {"linear-cached": "the linear probe", "knn": "k-NN"}


def main() -> None:
    """Write the tables and figures of each grid, then those that combine grids."""
    grids = complete_grids()
    evidence = read_all(grids)
    pages = {page: filled(page.read_text(), evidence, {"loops": loops_table()}) for page in PAGES}
    if "--check" in sys.argv:
        stale = [page.name for page, text in pages.items() if text != page.read_text()]
        if stale:
            sys.exit(f"{', '.join(stale)}: old tables, run `python experiments/results.py`.")
        return
    for page, text in pages.items():
        page.write_text(text)
    for options in grids:
        sweep(options, collect_only=True, pairs=True)
    draw(evidence)


def complete_grids() -> list[SweepOptions]:
    """Return the grids whose runs are complete; those of `PENDING` are not read."""
    files = sorted((FOLDER / "grids").glob("*.toml"))
    return [options_of(file, FOLDER / "records") for file in files if file.stem not in PENDING]


def options_of(file: Path, records: Path) -> SweepOptions:
    """Return what reads a grid's rows from a folder of records."""
    grid = read_grid(str(file))
    return SweepOptions(
        grid=str(file),
        out=TABLES,
        records=records,
        seeds=grid.seeds,
        first_seed=grid.first_seed,
    )


def read_all(grids: list[SweepOptions]) -> Evidence:
    """Return the rows of all grids as GRID/ROW."""
    return {name: row for options in grids for name, row in read(options).items()}


def read(options: SweepOptions) -> Evidence:
    """Return every row of a grid with its runs and its baseline's."""
    result = collect(make_plan(options))
    if refused := refused_pairs(result):
        sys.exit("\n".join(refused))
    rows = {}
    for line in result.lines:
        runs: dict[int, dict[str, float]] = {}
        for measure, cell in line.cells.items():
            for seed, value in cell.values.items():
                runs.setdefault(seed, {})[measure] = value
        rows[line.row.id] = (runs, line.row.baseline)
    return {
        f"{options.grid_name}/{name}": Row(runs, rows[base][0] if base else {})
        for name, (runs, base) in rows.items()
    }


def draw(evidence: Evidence) -> None:
    """Draw all gains of MoCHi, and those at temperature 0.2 over the proxy accuracy."""
    panels = {
        title: [_line(label, runs_of(runs, evidence), measure) for runs, label in EVERYWHERE]
        for measure, title in ACCURACIES.items()
    }
    everywhere = forests_beside(panels, "everywhere", "MoCHi minus MoCo-v2, by seed")
    save(everywhere, TABLES / "figures")
    for measure, title in ACCURACIES.items():
        points = [
            _point(runs_of(runs, evidence), label, views, measure)
            for runs, label, views in OVER_PROXY
        ]
        over = "proxy accuracy of MoCo-v2 (%)"
        save(gain_over(points, over, title, f"over-proxy-{measure}"), TABLES / "figures")
    for name, figure in {
        "results-gain": "over-proxy-linear-cached",
        "results-everywhere": "everywhere",
    }.items():
        shutil.copyfile(TABLES / "figures" / f"{figure}.png", DOCS / f"{name}.png")


def _line(label: str, row: Row, measure: str) -> GainLine:
    gains = tuple(row.gains(measure).values())
    return GainLine(label, gains, student_interval(gains).half)


def _point(row: Row, label: str, views: bool, measure: str) -> GainPoint:
    gains = row.gains(measure)
    over = tuple(row.base[seed]["proxy_accuracy"] for seed in gains)
    half = student_interval(list(gains.values())).half
    return GainPoint(label, over, tuple(gains.values()), half, in_line=views)


if __name__ == "__main__":
    main()
