"""Computes from the records how far the claims of docs/results.md hold.

    python experiments/audit.py

- the slope of the probe's gain over the proxy accuracy with crop and flip alone, and over all five
  strengths of views with a separate constant for colours (question 2);
- weak minus strong views: the difference of the two gains, by seed;
- the gains of the page that remain after Holm's correction for all of them.
"""

import numpy as np
from page import OWN_VIEWS, TABLES, WEAK_VIEWS, Evidence, runs_of
from results import complete_grids, read_all
from scipy.stats import ttest_1samp

from hardmix.sweep.pairs import Interval, student_interval

PLAIN = tuple(f"question-2-views/plain-{scale}-mochi" for scale in ("0.08", "0.2", "0.6"))
COLOUR = tuple(f"question-2-views/colour-{scale}-mochi" for scale in ("0.08", "0.6"))
PROBE = "linear-cached"


def main() -> None:
    """Print every number."""
    evidence = read_all(complete_grids())
    print("Slope of the probe's gain, points per 10 % of proxy accuracy, by seed 1 to 6:")
    for title, rows, coloured in (
        ("five strengths of views (planned, 2a)", (*PLAIN, *COLOUR), False),
        ("crop and flip alone", PLAIN, False),
        ("five strengths, adjusted for colours", (*PLAIN, *COLOUR), True),
    ):
        print(f"  {title}: {slope(evidence, rows, coloured).text(3)}")
    weak, strong = (runs_of(runs, evidence).gains(PROBE) for runs in (WEAK_VIEWS, OWN_VIEWS))
    differences = [weak[seed] - strong[seed] for seed in sorted(weak.keys() & strong.keys())]
    interval = student_interval(differences)
    print(f"Weak minus strong views, {len(differences)} pairs: {interval.text(2)}")
    for measure, title in ((PROBE, "linear probe"), ("knn", "k-NN")):
        holm(evidence, measure, title)


def slope(evidence: Evidence, names: tuple[str, ...], coloured: bool) -> Interval:
    """Return the interval over seeds of the least-squares slope."""
    rows = [evidence[name] for name in names]
    seeds = set.intersection(*(set(row.gains(PROBE)) for row in rows))
    slopes = []
    for seed in sorted(seeds):
        over = [row.base[seed]["proxy_accuracy"] / 10 for row in rows]
        colour = [float(name in COLOUR) for name in names]
        columns = [np.ones(len(over)), over, *([colour] if coloured else [])]
        target = [row.gains(PROBE)[seed] for row in rows]
        slopes.append(float(np.linalg.lstsq(np.stack(columns, axis=1), target, rcond=None)[0][1]))
    return student_interval(slopes)


def holm(evidence: Evidence, measure: str, title: str) -> None:
    """Print the gains of the page's tables that remain after Holm's correction, at 5 %."""
    names = {runs for table in TABLES.values() for _, runs in table.rows}
    gains = {name: list(runs_of(name, evidence).gains(measure).values()) for name in sorted(names)}
    gains = {name: values for name, values in gains.items() if len(values) >= 6}
    probabilities = {name: ttest_1samp(values, 0).pvalue for name, values in gains.items()}
    kept = 0
    ranked = sorted(probabilities, key=lambda each: probabilities[each])
    for rank, name in enumerate(ranked):
        if probabilities[name] > 0.05 / (len(ranked) - rank):
            break
        kept += 1
    alone = sum(value < 0.05 for value in probabilities.values())
    print(f"{title}: {len(gains)} gains of six pairs or more; {alone} exclude 0, {kept} by Holm:")
    for name in ranked[:kept]:
        print(f"  {student_interval(gains[name]).text(2)}  {name}")


if __name__ == "__main__":
    main()
