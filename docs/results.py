"""Every table and figure of the experiments, from the records in docs/results/records.

    python docs/results.py

For each grid in docs/results/grids it writes tables into docs/results/tables and figures into
docs/results/tables/figures, as `hardmix sweep GRID --collect --pairs` does; nothing is trained.
Then it draws MoCHi's gains of all questions in one figure for each accuracy, `everywhere-*`.
"""

import json
import os
from pathlib import Path

from hardmix.analysis.figures.paired_gains import GainLine, forest
from hardmix.analysis.figures.picture import save
from hardmix.sweep.own_grids import read_grid
from hardmix.sweep.pairs import student_interval
from hardmix.sweep.planning import SweepOptions
from hardmix.sweep.sweeping import sweep

FOLDER = Path(os.path.relpath(Path(__file__).parent / "results"))
"""Relative: tables hold their command, and no path of a machine."""
TABLES = FOLDER / "tables"

EVERYWHERE = (
    ("question-2-views", "colour-0.08-mochi", "crops from 0.08, colours"),
    ("question-1-strong", "both", "MoCo-v2's own views"),
    ("question-2-views", "colour-0.6-mochi", "crops from 0.6, colours"),
    ("question-2-views", "plain-0.08-mochi", "crops from 0.08"),
    ("question-2-views", "plain-0.2-mochi", "crops from 0.2"),
    ("question-2-views", "plain-0.6-mochi", "crops from 0.6"),
    ("question-5", "strong-mochi", "MoCo-v2's own views, fresh seeds"),
    ("question-5", "weak-mochi", "crops from 0.2, fresh seeds"),
    ("question-2-mass", "tau-0.2-mochi", "crops from 0.2, seeds 3 to 8"),
    ("question-2-mass", "less", "the same, a quarter of the points"),
    ("question-2-mass", "more", "the same, four times the points"),
    ("question-2-mass", "tau-0.4-mochi", "the same, temperature 0.4"),
    ("question-2-mass", "tau-0.1-mochi", "the same, temperature 0.1"),
    ("question-3", "images-500-mochi", "MoCo-v2's views, 500 images"),
    ("question-3", "images-2000-mochi", "MoCo-v2's views, 2,000 images"),
    ("question-3", "quarter-mochi", "MoCo-v2's views, K = 512"),
)
"""Grid, row and what is different there: MoCHi over MoCo-v2, six pairs each."""
ACCURACIES = {"linear-cached": "the linear probe", "knn": "k-NN"}


def main() -> None:
    """One grid after another, then all of them."""
    for file in sorted((FOLDER / "grids").glob("*.toml")):
        grid = read_grid(str(file))
        options = SweepOptions(
            grid=str(file),
            out=TABLES,
            records=FOLDER / "records",
            seeds=grid.seeds,
            first_seed=grid.first_seed,
        )
        sweep(options, collect_only=True, pairs=True)
    for measure, title in ACCURACIES.items():
        lines = [gain(grid, row, label, measure) for grid, row, label in EVERYWHERE]
        save(forest(lines, title, f"everywhere-{measure}"), TABLES / "figures")


def gain(grid: str, row: str, label: str, measure: str) -> GainLine:
    """The differences of a row, as its grid's tables have them."""
    pairs = json.loads((TABLES / f"{grid}-pairs.json").read_text())["pairs"]
    (found,) = (each for each in pairs if (each["id"], each["measure"]) == (row, measure))
    differences = tuple(found["by_seed"].values())
    return GainLine(label, differences, student_interval(differences).half)


if __name__ == "__main__":
    main()
