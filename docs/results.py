"""Every table and figure of the experiments, from the records in docs/results/records.

    python docs/results.py

For each grid in docs/results/grids it writes tables into docs/results/tables and figures into
docs/results/tables/figures, as `hardmix sweep GRID --collect --pairs` does; nothing is trained.
Then it draws the figures of docs/results.md, which combine grids, and writes the tables of the page
and of the README. With --check it only says whether these are as the records have them.
"""

import os
import shutil
import sys
from pathlib import Path

from results_page import Evidence, Row, filled, runs_of
from results_tables import OWN_VIEWS, WEAK_VIEWS

from hardmix.analysis.figures.paired_gains import GainLine, GainPoint, forest, gain_over
from hardmix.analysis.figures.picture import save
from hardmix.sweep.own_grids import read_grid
from hardmix.sweep.pairs import refused_pairs, student_interval
from hardmix.sweep.planning import SweepOptions, make_plan
from hardmix.sweep.results import collect
from hardmix.sweep.sweeping import sweep

HERE = Path(__file__).parent
FOLDER = Path(os.path.relpath(HERE / "results"))
"""Relative: tables hold their command, and no path of a machine."""
TABLES = FOLDER / "tables"
PENDING = ("long", "warm-up")
"""Grids whose runs are not complete: nobody looks at them before (see the plan, 2026-11-18)."""
PAGES = (HERE / "results.md", HERE.parent / "README.md")

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
"""Runs, and what is different there: MoCHi over MoCo-v2, six pairs or more."""
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
"""Runs at temperature 0.2, six pairs or more; what they are; whether only their views differ."""
ACCURACIES = {"linear-cached": "the linear probe", "knn": "k-NN"}


def main() -> None:
    """One grid after another, then what combines them."""
    grids = complete_grids()
    evidence = {name: row for options in grids for name, row in read(options).items()}
    pages = {page: filled(page.read_text(), evidence) for page in PAGES}
    if "--check" in sys.argv:
        stale = [page.name for page, text in pages.items() if text != page.read_text()]
        sys.exit(f"{', '.join(stale)}: old tables, run `python docs/results.py`." if stale else 0)
    for page, text in pages.items():
        page.write_text(text)
    for options in grids:
        sweep(options, collect_only=True, pairs=True)
    draw(evidence)


def complete_grids() -> list[SweepOptions]:
    """Return the grids whose runs are complete; `PENDING` are not read before they are."""
    files = sorted((FOLDER / "grids").glob("*.toml"))
    return [_options(file) for file in files if file.stem not in PENDING]


def _options(file: Path) -> SweepOptions:
    grid = read_grid(str(file))
    return SweepOptions(
        grid=str(file),
        out=TABLES,
        records=FOLDER / "records",
        seeds=grid.seeds,
        first_seed=grid.first_seed,
    )


def read(options: SweepOptions) -> Evidence:
    """Return every row of a grid with its runs and its baseline's."""
    result = collect(make_plan(options))
    if refused := refused_pairs(result):
        sys.exit("\n".join(refused))
    found = {}
    for line in result.lines:
        runs: dict[int, dict[str, float]] = {}
        for measure, values in zip(result.measures, line.cells, strict=True):
            for seed, value in values.values.items():
                runs.setdefault(seed, {})[measure.id] = value
        found[line.row.id] = (runs, line.row.baseline)
    return {
        f"{options.grid_name}/{name}": Row(runs, found[base][0] if base else {})
        for name, (runs, base) in found.items()
    }


def draw(evidence: Evidence) -> None:
    """Draw all of MoCHi's gains, and those at temperature 0.2 over the proxy accuracy."""
    for measure, title in ACCURACIES.items():
        lines = []
        for runs, label in EVERYWHERE:
            differences = tuple(runs_of(runs, evidence).differences(measure))
            lines.append(GainLine(label, differences, student_interval(differences).half))
        name, what = f"everywhere-{measure}", "MoCHi minus MoCo-v2 by seed"
        save(forest(lines, title, name, what=what), TABLES / "figures")
        points = [
            _point(runs_of(runs, evidence), label, views, measure)
            for runs, label, views in OVER_PROXY
        ]
        over = "proxy accuracy of MoCo-v2 (%)"
        save(gain_over(points, over, title, f"over-proxy-{measure}"), TABLES / "figures")
    for name, figure in {
        "results-gain": "over-proxy-linear-cached",
        "results-everywhere": "everywhere-linear-cached",
        "results-everywhere-knn": "everywhere-knn",
    }.items():
        shutil.copyfile(TABLES / "figures" / f"{figure}.png", HERE / f"{name}.png")


def _point(row: Row, label: str, views: bool, measure: str) -> GainPoint:
    seeds = [seed for seed in row.ours if seed in row.base]
    over = tuple(row.base[seed]["proxy_accuracy"] for seed in seeds)
    gains = tuple(row.differences(measure))
    return GainPoint(label, over, gains, student_interval(gains).half, in_line=views)


if __name__ == "__main__":
    main()
