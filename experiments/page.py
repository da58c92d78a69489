"""The tables of docs/results.md and of the README, as they follow from the records of the runs.

A table is written between <!-- table NAME --> and <!-- end -->. Its rows name runs as GRID/ROW,
GRID being a file of experiments/grids; the seeds of several joined by + are pooled. Its cells are

    MEASURE          mean over seeds, ± their standard deviation
    base MEASURE     the same of the row's baseline, for seeds that both have
    gain MEASURE     mean difference by seed with its 95 % interval, bold if that excludes 0
    pairs            number of differences

A cell is empty if its row has no such measure.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from hardmix.evaluation.accuracy import mean_and_deviation
from hardmix.sweep.pairs import student_interval

BOTH = "linear-cached | gain linear-cached | knn | gain knn"
PAIRED = "base linear-cached | linear-cached | gain linear-cached | base knn | knn | gain knn"
BASE_AND_GAINS = (
    "proxy accuracy, MoCo-v2 | probe, MoCo-v2 | MoCHi | gain | k-NN, MoCo-v2 | MoCHi | gain"
)
COST = "proxy accuracy | images/s | peak MB"
COST_CELLS = "proxy_accuracy | images_per_second | peak_mb"
KINDS_OF_POINTS = {
    "both": "(128, 128, 16)",
    "pairs": "(128, 128, 0), pairs only",
    "with-query": "(128, 32, 64), many with the query",
    "small-n": "(8, 8, 0), very small N",
}
OWN_VIEWS = "question-1-strong/both + question-5/strong-mochi"
WEAK_VIEWS = (
    "question-2-views/plain-0.2-mochi + question-2-mass/tau-0.2-mochi + question-5/weak-mochi"
)


class Table(NamedTuple):
    """Titles and cells are separated by |; a row's text may itself have several cells."""

    titles: str
    cells: str
    rows: tuple[tuple[str, str], ...]
    """The text of the first cells, and the runs."""


TABLES = {
    "views": Table(
        "views (crops from, colours) | proxy accuracy, MoCo-v2 | MoCHi, real negatives"
        " | with the points | probe, MoCo-v2 | MoCHi | gain | k-NN, MoCo-v2 | MoCHi | gain",
        f"base proxy_accuracy | proxy_accuracy | proxy_accuracy_mixed | {PAIRED}",
        (
            ("0.08, colours", "question-2-views/colour-0.08-mochi"),
            ("0.6, colours", "question-2-views/colour-0.6-mochi"),
            ("0.08", "question-2-views/plain-0.08-mochi"),
            ("0.2", "question-2-views/plain-0.2-mochi"),
            ("0.6", "question-2-views/plain-0.6-mochi"),
        ),
    ),
    "all-pairs": Table(
        "all pairs, seeds 1 to 14 | pairs | proxy accuracy, MoCo-v2 | gain, probe | gain, k-NN",
        "pairs | base proxy_accuracy | gain linear-cached | gain knn",
        (
            ("crops from 0.2, colours: MoCo-v2's own views", OWN_VIEWS),
            ("crops from 0.2", WEAK_VIEWS),
        ),
    ),
    "other-means": Table(
        f"MoCo-v2's own views | pairs | {BASE_AND_GAINS}",
        f"pairs | base proxy_accuracy | {PAIRED}",
        (
            ("20 epochs, as above", "question-2-other-means/views-2-mochi"),
            ("a network twice as wide", "question-2-other-means/wider-mochi"),
            ("60 epochs", "question-2-other-means/longer-mochi"),
        ),
    ),
    "points": Table(
        "views | MoCHi (N, s, s') | proxy accuracy | softmax, % | probe | gain | k-NN | gain",
        f"proxy_accuracy | synthetic_mass | {BOTH}",
        tuple(
            (f"{views * (not place)} | {label}", f"question-1-fresh/{row}")
            for views, base in (("crops from 0.2", "weak"), ("crops from 0.2, colours", "strong"))
            for place, (label, row) in enumerate(
                [
                    ("MoCo-v2", base),
                    *((label, f"{base}-{kind}") for kind, label in KINDS_OF_POINTS.items()),
                ]
            )
        ),
    ),
    "points-all": Table(
        "views | MoCHi (N, s, s') | pairs | gain, probe | gain, k-NN",
        "pairs | gain linear-cached | gain knn",
        tuple(
            (
                f"{views * (kind == 'both')} | {label}",
                f"question-1-{base}/{kind} + question-1-fresh/{base}-{kind}",
            )
            for views, base in (("crops from 0.2", "weak"), ("crops from 0.2, colours", "strong"))
            for kind, label in KINDS_OF_POINTS.items()
        ),
    ),
    "mass": Table(
        " | proxy accuracy | softmax, % | probe | gain | k-NN | gain",
        f"proxy_accuracy | synthetic_mass | {BOTH}",
        (
            ("MoCo-v2, tau = 0.2", "question-2-mass/tau-0.2"),
            ("MoCHi (128, 32, 4)", "question-2-mass/less"),
            ("MoCHi (128, 128, 16)", "question-2-mass/tau-0.2-mochi"),
            ("MoCHi (128, 512, 64)", "question-2-mass/more"),
            ("MoCo-v2, tau = 0.4, over 0.2", "question-2-mass/tau-0.4"),
            ("MoCHi (128, 128, 16), tau = 0.4", "question-2-mass/tau-0.4-mochi"),
            ("MoCo-v2, tau = 0.1, over 0.2", "question-2-mass/tau-0.1"),
            ("MoCHi (128, 128, 16), tau = 0.1", "question-2-mass/tau-0.1-mochi"),
        ),
    ),
    "few-images": Table(
        f"images | K | MoCHi | {BASE_AND_GAINS}",
        f"base proxy_accuracy | {PAIRED}",
        (
            ("500, 400 epochs | 128 | (8, 8, 1)", "question-3/images-500-mochi"),
            ("2,000, 100 epochs | 512 | (32, 32, 4)", "question-3/images-2000-mochi"),
            ("10,000, 20 epochs | 2048 | (128, 128, 16)", "question-3/images-10000-mochi"),
            ("10,000, 20 epochs | 512 | (128, 128, 16)", "question-3/quarter-mochi"),
        ),
    ),
    "few-negatives": Table(
        "over MoCo-v2 with K = 2048 | gain, probe | gain, k-NN",
        "gain linear-cached | gain knn",
        (
            ("MoCo-v2, K = 512", "question-3/quarter"),
            ("MoCHi (128, 128, 16), K = 512", "question-3/quarter-mochi-over-whole"),
        ),
    ),
    "from-weights": Table(
        f"images | {BASE_AND_GAINS}",
        f"base proxy_accuracy | {PAIRED}",
        (
            ("500, 400 epochs", "question-3-init/images-500-mochi"),
            ("2,000, 100 epochs", "question-3-init/images-2000-mochi"),
        ),
    ),
    "transfer": Table(
        "views | proxy accuracy, MoCo-v2 | CIFAR-10, MoCo-v2 | MoCHi | gain | CIFAR-100, gain"
        " | k-NN, gain",
        "base proxy_accuracy | base transfer | transfer | gain transfer | gain linear-cached"
        " | gain knn",
        (
            ("crops from 0.2, colours: MoCo-v2's own", "question-5/strong-mochi"),
            ("crops from 0.2", "question-5/weak-mochi"),
        ),
    ),
    "advice": Table(
        "views | | probe | gain | k-NN | gain | transfer | gain",
        f"{BOTH} | transfer | gain transfer",
        (
            ("crops from 0.2, colours | MoCo-v2", "advice-views/strong"),
            (" | MoCHi (128, 128, 16)", "question-5/strong-mochi"),
            (" | MoCo-v2, tau = 0.1", "advice-views/strong-tau-0.1"),
            (" | hardness weighting", "advice-views/strong-hardness"),
            ("crops from 0.2 | MoCo-v2", "advice-views/weak"),
            (" | MoCHi (128, 128, 16)", "question-5/weak-mochi"),
            (" | MoCo-v2, tau = 0.1", "advice-views/weak-tau-0.1"),
            (" | MoCo-v2, tau = 0.05, over 0.1", "advice-views/weak-tau-0.05"),
            (" | hardness weighting", "family-lead/hardness"),
            (" | the same, over tau = 0.1", "family-lead/hardness-over-tau"),
            (" | the same, over tau = 0.05", "advice-views/weak-hardness"),
        ),
    ),
    "oracle": Table(
        "views | | probe | gain | k-NN | gain",
        BOTH,
        (
            (
                "crops from 0.2 | MoCo-v2, oracle, over MoCo-v2",
                "question-4-oracle-weak/moco-oracle",
            ),
            (" | MoCHi, oracle, over MoCo-v2, oracle", "question-4-oracle-weak/mochi-oracle"),
            (
                "crops from 0.2, colours | MoCo-v2, oracle, over MoCo-v2",
                "question-4-oracle-strong/moco-oracle",
            ),
            (" | MoCHi, oracle, over MoCo-v2, oracle", "question-4-oracle-strong/mochi-oracle"),
        ),
    ),
    "sampling": Table(
        "over MoCHi (128, 128, 16) | pairs | gain, probe | gain, k-NN",
        "pairs | gain linear-cached | gain knn",
        (
            ("negatives sampled, tau' = 0.05", "question-4-sampling/alone-0.05"),
            ("negatives sampled, tau' = 0.02", "question-4-sampling/alone-0.02"),
            ("parents sampled, tau' = 0.05", "question-4-sampling/sampled-0.05"),
            ("parents sampled, tau' = 0.2", "question-4-sampling/sampled-0.2"),
        ),
    ),
    "large": Table(
        f"pairs | {BASE_AND_GAINS}",
        f"pairs | base proxy_accuracy | {PAIRED}",
        (("", "question-1-50000/mochi"),),
    ),
    "reverse": Table(
        "CIFAR-100, MoCo-v2 | MoCHi | gain | CIFAR-10, gain",
        "base transfer | transfer | gain transfer | gain linear-cached",
        (("", "question-5-reverse/mochi"),),
    ),
    "family": Table(
        f"method, over MoCo-v2 | probe | gain | k-NN | gain | {COST}",
        f"{BOTH} | {COST_CELLS}",
        (
            ("MoCo-v2", "family/moco"),
            ("MoCHi (128, 128, 16)", "family/mochi"),
            ("HCL", "family/hcl"),
            ("hardness weighting", "family/hardness"),
            ("decoupled", "family/decoupled"),
            ("debiased", "family/debiased"),
            ("dual temperature", "family/dual-temperature"),
            ("SynCo", "family/synco"),
            ("Image Mixture", "family/unmix"),
            ("CO2", "family/co2"),
            ("SimCLR", "family/simclr"),
            ("BYOL", "family/byol"),
        ),
    ),
    "family-mixed": Table(
        f"method, over itself without mixing | probe | gain | k-NN | gain | {COST}",
        f"{BOTH} | {COST_CELLS}",
        (
            ("hardness weighting + MoCHi", "family/hardness-mochi"),
            ("HCL + MoCHi", "family/hcl-mochi"),
        ),
    ),
}


BLOCK = re.compile(r"(?P<begin><!-- table (?P<name>\S+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)
WHOLE = ("synthetic_mass", "images_per_second", "peak_mb")
"""Measures shown without decimals and without a deviation."""
ONE_DIGIT = ("proxy_accuracy", "proxy_accuracy_mixed")


class Row(NamedTuple):
    """The runs of a row by seed and measure, and those of its baseline."""

    ours: dict[int, dict[str, float]]
    base: dict[int, dict[str, float]]

    def gains(self, measure: str) -> dict[int, float]:
        """Return the differences by seed, for the seeds that both have."""
        return {
            seed: values[measure] - self.base[seed][measure]
            for seed, values in self.ours.items()
            if measure in values and measure in self.base.get(seed, {})
        }


Evidence = Mapping[str, Row]
"""Results by GRID/ROW."""


def filled(page: str, evidence: Evidence, more: Mapping[str, str]) -> str:
    """Return the page with every table as it follows from the records; `more` are not of grids."""

    def block(match: re.Match[str]) -> str:
        name = match["name"]
        text = more[name] if name in more else render(TABLES[name], evidence)
        return f"{match['begin']}{text}\n{match['end']}"

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
                first = all_runs.setdefault(seed, values)
                if any(first[measure] != values[measure] for measure in first.keys() & values):
                    raise ValueError(f"seed {seed} is not the same run in all of these rows")
    return Row(ours, base)


def cell(row: Row, content: str) -> str:
    """Return the text of a cell, given its MEASURE, base MEASURE, gain MEASURE or pairs."""
    kind, _, measure = content.rpartition(" ")
    if measure == "pairs":
        return str(len(row.gains("linear-cached")) or "")
    if kind == "gain":
        return gain(list(row.gains(measure).values()))
    runs = row.ours.values()
    if kind == "base":
        runs = [row.base[seed] for seed in row.ours if seed in row.base]
    return mean([values[measure] for values in runs if measure in values], measure)


def gain(differences: list[float]) -> str:
    """Return the mean difference with its interval, bold if that excludes 0."""
    if not differences:
        return ""
    interval = student_interval(differences)
    return f"**{interval.text(2)}**" if interval.sign else interval.text(2)


def mean(values: list[float], measure: str) -> str:
    """Return the mean, and its deviation unless the measure is a whole number."""
    if not values:
        return ""
    middle, deviation = mean_and_deviation(values)
    if measure in WHOLE:
        return f"{middle:.0f}"
    digits = 1 if measure in ONE_DIGIT else 2
    return f"{middle:.{digits}f}" + (f" ± {deviation:.{digits}f}" if len(values) > 1 else "")
