"""Compute what qualifies the claims of the page, from the records.

    python docs/results/audit.py

- the slope of the probe's gain over the proxy accuracy within crop and flip alone, and over all
  five strengths of views with a constant of its own for colours (question 2);
- weak minus strong views: the difference of the two gains, by seed;
- which gains of the page remain after Holm's correction for all of them.
"""

import math
import os
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from results import complete_grids, read  # noqa: E402
from results_page import Evidence, Row, runs_of  # noqa: E402
from results_tables import OWN_VIEWS, TABLES, WEAK_VIEWS  # noqa: E402

from hardmix.sweep.pairs import Interval, student_interval, student_probability  # noqa: E402

PLAIN = tuple(f"question-2-views/plain-{scale}-mochi" for scale in ("0.08", "0.2", "0.6"))
COLOUR = tuple(f"question-2-views/colour-{scale}-mochi" for scale in ("0.08", "0.6"))
PROBE = "linear-cached"


def main() -> None:
    """Print every number."""
    os.chdir(HERE.parents[1])
    evidence: Evidence = {
        name: row for options in complete_grids() for name, row in read(options).items()
    }
    print("Slope of the probe's gain, points per 10 % of proxy accuracy, by seed 1 to 6:")
    for title, rows, coloured in (
        ("five strengths of views (planned, 2a)", (*PLAIN, *COLOUR), False),
        ("crop and flip alone", PLAIN, False),
        ("five strengths, adjusted for colours", (*PLAIN, *COLOUR), True),
    ):
        print(f"  {title}: {slope(evidence, rows, coloured).text(3)}")
    weak, strong = (gains(runs_of(runs, evidence)) for runs in (WEAK_VIEWS, OWN_VIEWS))
    differences = [weak[seed] - strong[seed] for seed in sorted(weak.keys() & strong.keys())]
    interval = student_interval(differences)
    print(f"Weak minus strong views, {len(differences)} pairs: {interval.text(2)}")
    for measure, title in ((PROBE, "linear probe"), ("knn", "k-NN")):
        holm(evidence, measure, title)


def gains(row: Row, measure: str = PROBE) -> dict[int, float]:
    """Return the gains by seed."""
    return {
        seed: values[measure] - row.base[seed][measure]
        for seed, values in row.ours.items()
        if measure in values and measure in row.base.get(seed, {})
    }


def slope(evidence: Evidence, names: tuple[str, ...], coloured: bool) -> Interval:
    """Return the interval over seeds of the least-squares slope."""
    rows = [evidence[name] for name in names]
    seeds = set.intersection(*(set(gains(row)) for row in rows))
    slopes = []
    for seed in sorted(seeds):
        over = [row.base[seed]["proxy_accuracy"] / 10 for row in rows]
        colour = [float(name in COLOUR) for name in names]
        columns = [np.ones(len(over)), over, *([colour] if coloured else [])]
        target = [gains(row)[seed] for row in rows]
        slopes.append(float(np.linalg.lstsq(np.stack(columns, axis=1), target, rcond=None)[0][1]))
    return student_interval(slopes)


def holm(evidence: Evidence, measure: str, title: str) -> None:
    """Print which gains of the page's tables remain after Holm's correction, at 5 %."""
    names = {runs for table in TABLES.values() for _, runs in table.rows}
    found = {}
    for name in sorted(names):
        differences = list(gains(runs_of(name, evidence), measure).values())
        if len(differences) >= 6:
            found[name] = probability(differences)
    kept = 0
    ranked = sorted(found, key=lambda each: found[each])
    for rank, name in enumerate(ranked):
        if found[name] > 0.05 / (len(ranked) - rank):
            break
        kept += 1
    alone = sum(value < 0.05 for value in found.values())
    print(f"{title}: {len(found)} gains of six pairs or more; {alone} exclude 0, {kept} by Holm:")
    for name in ranked[:kept]:
        interval = student_interval(list(gains(runs_of(name, evidence), measure).values()))
        print(f"  {interval.text(2)}  {name}")


def probability(differences: list[float]) -> float:
    """Return the two-sided p-value of Student's t for a mean of 0."""
    mean, deviation = float(np.mean(differences)), float(np.std(differences, ddof=1))
    t = abs(mean) / (deviation / math.sqrt(len(differences)))
    return 1 - student_probability(t, len(differences) - 1)


if __name__ == "__main__":
    main()
