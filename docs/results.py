"""Every table and figure of the experiments, from the records in docs/results/records.

    python docs/results.py

For each grid in docs/results/grids it writes tables into docs/results/tables and figures into
docs/results/tables/figures, as `hardmix sweep GRID --collect --pairs` does; nothing is trained.
"""

import os
from pathlib import Path

from hardmix.sweep.own_grids import read_grid
from hardmix.sweep.planning import SweepOptions
from hardmix.sweep.sweeping import sweep

FOLDER = Path(os.path.relpath(Path(__file__).parent / "results"))
"""Relative: tables hold their command, and no path of a machine."""


def main() -> None:
    """One grid after another."""
    for file in sorted((FOLDER / "grids").glob("*.toml")):
        grid = read_grid(str(file))
        options = SweepOptions(
            grid=str(file),
            out=FOLDER / "tables",
            records=FOLDER / "records",
            seeds=grid.seeds,
            first_seed=grid.first_seed,
        )
        sweep(options, collect_only=True, pairs=True)


if __name__ == "__main__":
    main()
