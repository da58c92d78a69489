"""Judges the decisive experiment by the plan's rule of 2026-11-18, and not before its end.

    python experiments/decisive.py

Until sixteen pairs lie in pending/ it says which seeds are missing and reads no measure. Then it
prints the verdict on the probe's gain, and the gains of the other measures, which are secondary.
The rule was written before the first run, and this program before anybody had seen a pair.
"""

import re
import statistics
import sys
from collections.abc import Iterable

from results import FOLDER, options_of, read

from hardmix.sweep.pairs import Interval, student_interval

GRID = FOLDER / "grids" / "long.toml"
PENDING = FOLDER / "pending"
SEEDS = range(21, 37)
KNN_AFTER_60_EPOCHS = 20.8
"""MoCo-v2's k-NN accuracy in percent, k = 200: below it, 200 epochs have trained no better."""
SECONDARY = ("knn", "knn-20", "transfer", "uniformity", "proxy_accuracy")


def main() -> None:
    """Print what is missing, or the verdict."""
    if missing := sorted(set(SEEDS) - complete_seeds(file.name for file in PENDING.glob("*.json"))):
        sys.exit(f"{len(SEEDS) - len(missing)} of {len(SEEDS)} pairs; missing: {missing}.")
    rows = read(options_of(GRID, records=PENDING))
    mochi = rows[f"{GRID.stem}/mochi"]
    gain = student_interval(list(mochi.gains("linear-cached").values()))
    knn = statistics.mean(run["knn"] for run in mochi.base.values())
    print(f"Main test, the probe's gain in points: {gain.text(2)}. {verdict(gain, knn)}")
    print(f"MoCo-v2's mean k-NN accuracy is {knn:.1f} %. Secondary:")
    for measure in SECONDARY:
        differences = list(mochi.gains(measure).values())
        print(f"  {measure}: {student_interval(differences).text(3)}")


def complete_seeds(names: Iterable[str]) -> set[int]:
    """Return the seeds of which there are records of both methods."""
    methods: dict[int, set[str]] = {}
    for name in names:
        if run := re.fullmatch(r"cifar100-(moco-v2|mochi)-.*-seed(\d+)\.json", name):
            methods.setdefault(int(run[2]), set()).add(run[1])
    return {seed for seed, found in methods.items() if len(found) == 2}


def verdict(gain: Interval, base_knn: float) -> str:
    """Return the plan's verdict; the first rule that fits holds."""
    assert gain.low is not None
    assert gain.high is not None
    if base_knn <= KNN_AFTER_60_EPOCHS:
        return "Void: MoCo-v2 is no better than after 60 epochs."
    if gain.low > 0 and gain.mean >= 0.7:
        return "For the paper's claim."
    if gain.high < 0.5:
        return "Against: longer training does not help mixing."
    return "Partly: a gain, smaller than the paper's." if gain.low > 0 else "Not known."


if __name__ == "__main__":
    main()
