"""metrics.jsonl as curves over epochs, thinned for a page.

Every number that a method logs has a curve: known ones have a title and a sentence here, others
their name.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hardmix.analysis.over_training import steps_per_epoch
from hardmix.report.grouping import SeedGroup
from hardmix.runs.reading import RunRecord, number

MOST_POINTS = 300
MOST_OTHERS, LONGEST_NAME = 50, 60
"""Most metrics without words of their own, and characters of their names: a log may be foreign."""
DIGITS = 5
"""Significant digits of values on the page."""


@dataclass(frozen=True)
class Metric:
    """A key of metrics.jsonl in words; fractions are shown in percent."""

    key: str
    name: str
    about: str = "A number that the method logs in metrics.jsonl."
    percent: bool = False
    main: bool = False
    """Whether the menu shows it at once; the others are folded."""


METRICS = [
    Metric(
        "loss",
        "Loss",
        "Mean over the steps between two log lines, including synthetic points.",
        main=True,
    ),
    Metric(
        "knn",
        "k-NN accuracy",
        "On test images during training, by the votes of a sample of training images.",
        percent=True,
        main=True,
    ),
    Metric(
        "probe_accuracy",
        "Accuracy of the online probe",
        "A linear classifier that learns beside the method (train.probe), on each batch of training"
        " images before it learns from it.",
        percent=True,
        main=True,
    ),
    Metric(
        "proxy_accuracy",
        "Proxy accuracy",
        "Fraction of queries whose key outranks every real negative (Fig. 2b).",
        percent=True,
        main=True,
    ),
    Metric(
        "proxy_accuracy_mixed",
        "Proxy accuracy, mixed",
        "The same, including synthetic points (Fig. 2b).",
        True,
    ),
    Metric(
        "false_negatives_top",
        "False negatives",
        "Fraction of a query's min(1024, K // 16) hardest negatives that have its class (Fig. 2c).",
        True,
    ),
    Metric(
        "synthetic_one_false",
        "One parent false",
        "Fraction of pair points with at least one false parent (Fig. 2c).",
        True,
    ),
    Metric(
        "synthetic_both_false",
        "Both parents false",
        "Fraction of pair points with two false parents (Fig. 2c).",
        True,
    ),
    Metric(
        "synthetic_query_false",
        "Parent with query false",
        "Fraction of points mixed with the query whose negative is false.",
        True,
    ),
    Metric(
        "pairs_harder",
        "Harder pairs",
        "Fraction of queries whose hardest pair point is harder than their hardest negative.",
        True,
    ),
    Metric(
        "with_query_harder",
        "Harder points with query",
        "The same for points mixed with the query: max l(h') > max l(n) (Sec. 4.3).",
        True,
    ),
    Metric(
        "synthetic_mass",
        "Mass of synthetic points",
        "Share of the softmax that synthetic points hold; the rest is real negatives and the key.",
        True,
    ),
    Metric(
        "effective_negatives",
        "Effective negatives",
        "Number of equally hard negatives that would weigh as the negatives and points do.",
    ),
    Metric(
        "gradient_top_10",
        "Push of the 10 hardest",
        "Share of the push away from negatives that comes from the 10 hardest.",
        True,
    ),
    Metric(
        "gradient_top_100",
        "Push of the 100 hardest",
        "The same for the 100 hardest.",
        True,
    ),
    Metric(
        "positive_similarity",
        "Similarity of the key",
        "Cosine of query and key, mean over the batch.",
    ),
    Metric(
        "hardest_similarity",
        "Similarity of the hardest",
        "Cosine of the query and its hardest negative, mean over the batch.",
    ),
    Metric(
        "spread", "Spread of the keys", "1 for a uniform sphere; near 0, all images look the same."
    ),
    Metric("lr", "Learning rate", "Learning rate at the logged step."),
    Metric("images_per_second", "Images per second", "Mean between two log lines."),
]
"""Metrics with words of their own, in the order of the menu. Others follow by their names; those of
which no run has two points are omitted."""
NOT_METRICS = ("step", "epoch")
"""Keys of a line that say when it was logged."""


def curves_of(groups: Sequence[SeedGroup]) -> dict[str, Any]:
    """Return the data for page.js: metrics, runs, and the points of each pair (x in epochs)."""
    runs = [(group, seed, run) for group in groups for seed, run in enumerate(group.runs)]
    metrics = all_metrics([run for _, _, run in runs])
    curves = [curves_of_run(run, metrics) for _, _, run in runs]
    points = {metric.key: [each[metric.key] for each in curves] for metric in metrics}
    shown = [m for m in metrics if any(len(curve) > 1 for curve in points[m.key])]
    return {
        "metrics": [asdict(metric) for metric in shown],
        "runs": [
            {"name": run.name, "label": run.label, "group": group.number, "seed": seed}
            for group, seed, run in runs
        ],
        "points": {metric.key: points[metric.key] for metric in shown},
    }


def all_metrics(runs: Sequence[RunRecord]) -> list[Metric]:
    """Return the metrics with words of their own, then all others that the runs have logged."""
    keys = {key: None for run in runs for line in run.metrics for key in line}
    known = {*NOT_METRICS, *(metric.key for metric in METRICS)}
    others = [key for key in keys if key not in known][:MOST_OTHERS]
    names = [key[:LONGEST_NAME].replace("_", " ").capitalize() for key in others]
    return METRICS + [Metric(key, name) for key, name in zip(others, names, strict=True)]


def curves_of_run(
    run: RunRecord, metrics: Sequence[Metric]
) -> dict[str, list[tuple[float, float]]]:
    """Return (epoch, value) pairs by key, at most MOST_POINTS each; fractions in percent."""
    steps = steps_per_epoch(run.metrics)
    by_key: dict[str, list[tuple[float, float]]] = {metric.key: [] for metric in metrics}
    for line in run.metrics:
        step = number(line.get("step"))
        for key in line.keys() & by_key.keys():
            value = number(line[key])
            if step is not None and value is not None:
                by_key[key].append((step / steps, value))
    curves = {}
    for metric in metrics:
        scale = 100 if metric.percent else 1
        points = thinned(sorted(by_key[metric.key]), MOST_POINTS)
        curves[metric.key] = [(rounded(x), rounded(scale * y)) for x, y in points]
    return curves


def thinned(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Return at most `most` points, as means of equally many neighbours."""
    size = math.ceil(len(points) / most)
    if size <= 1:
        return list(points)
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return [
        (sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts
    ]


def rounded(value: float) -> float:
    """Return a value rounded to DIGITS significant digits."""
    return float(f"{value:.{DIGITS}g}")


def sample_table(curves: Mapping[str, Any], metric: str, most: int = 12) -> list[list[str]]:
    """Return a header and about `most` rows: every run's values nearest to some epochs."""
    points = curves["points"][metric]
    longest = max(points, key=len)
    every = max(1, math.ceil(len(longest) / most))
    chosen = [x for x, _ in longest[::-1][::every][::-1]]
    rows = [["Epoch", *(run["name"] for run in curves["runs"])]]
    for epoch in chosen:
        rows.append([f"{epoch:.4g}", *(_nearest(each, epoch) for each in points)])
    return rows


def _nearest(points: Sequence[tuple[float, float]], epoch: float) -> str:
    """Return the value measured nearest to an epoch, if within one epoch; else an empty text."""
    near = min(points, key=lambda point: abs(point[0] - epoch), default=None)
    return f"{near[1]:.4g}" if near is not None and abs(near[0] - epoch) <= 1 else ""
