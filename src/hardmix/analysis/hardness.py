"""Sec. 3.2, the hardness of negatives: Fig. 2a and the similarities, from hardness.jsonl."""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from hardmix.analysis.picture import (
    INK,
    Drawing,
    Found,
    Picture,
    canvas,
    legend_below,
    log_scale,
    ordered_colours,
    shown,
)
from hardmix.runs.reading import RunRecord

MOST_PANELS = 12
"""Most runs that Fig. 2a shows side by side."""
MOST_RANKS = 160
"""Number of ranks drawn, evenly spaced on the logarithmic axis."""

KINDS = {
    "positive": "positives (keys)",
    "hardest": "hardest negatives",
    "pairs": "pair points",
    "with_query": "points mixed with the query",
}
"""Histograms of hardness.jsonl, in words."""


class Ranks(NamedTuple):
    """Fig. 2a of one epoch."""

    epoch: int
    """The epoch, counted from 0; -1 is before training."""
    rank: list[int]
    """Ranks, counted from 1."""
    probability: list[float]
    """Matching probability of the negative of each rank, averaged over the queries."""


class Histogram(NamedTuple):
    """Similarities at one epoch: counts in equal bins of [-1, 1]."""

    epoch: int
    """The epoch, counted from 0."""
    counts: list[int]
    """Count of each bin, from -1 up."""


def matching_probabilities(records: Sequence[RunRecord]) -> Found:
    """Draw Fig. 2a for these runs, and name those that it omits."""
    with_ranks = [(record, _ranks(record)) for record in records]
    without = [str(record.run.path) for record, ranks in with_ranks if not ranks]
    missing = []
    if without:
        missing.append(
            f"Fig. 2a omits {', '.join(without)}: no matching probabilities (hardness.jsonl)."
        )
    runs = [(record.label, ranks) for record, ranks in with_ranks if ranks]
    if len(runs) > MOST_PANELS:
        missing.append(f"Fig. 2a shows only the first {MOST_PANELS} of {len(runs)} runs.")
    return [fig2a(runs)] if runs else [], missing


def half_holders(record: RunRecord) -> list[float]:
    """Return, by epoch, the fraction of negatives with half of the matching probability."""
    fractions = []
    for line in record.hardness:
        probability: list[float] = line.get("matching_probability", [])
        if _are_shares(probability) and sum(probability) > 0:
            half = sum(probability) / 2
            before = sum(held < half for held in accumulate(probability))
            fractions.append((before + 1) / len(probability))
    return fractions


def similarities(record: RunRecord) -> Found:
    """Draw histograms of similarities over training, if they were recorded."""
    kinds = []
    for key, words in KINDS.items():
        epochs = [
            Histogram(line["epoch"], line[key])
            for line in record.hardness
            if isinstance(line.get("epoch"), int) and _are_counts(line.get(key))
        ]
        if epochs:
            kinds.append((words, epochs))
    if not kinds:
        return [], [f"{record.run.path} has no histograms of similarities (hardness.jsonl)."]
    return [similarity_histograms(record.label, kinds)], []


def _ranks(record: RunRecord) -> list[Ranks]:
    return [
        _thin(line["epoch"], line["matching_probability"])
        for line in record.hardness
        if isinstance(line.get("epoch"), int) and _are_shares(line.get("matching_probability"))
    ]


def _thin(epoch: int, probability: list[float]) -> Ranks:
    """Return ranks evenly spaced on a logarithmic axis, without probabilities of 0."""
    last = len(probability)
    ranks = sorted({round(last ** (i / (MOST_RANKS - 1))) for i in range(MOST_RANKS)})
    kept = [rank for rank in ranks if probability[rank - 1] > 0]
    return Ranks(epoch, kept, [probability[rank - 1] for rank in kept])


def _are_shares(values: Any) -> bool:
    return (
        isinstance(values, list)
        and bool(values)
        and all(isinstance(value, int | float) and math.isfinite(value) for value in values)
    )


def _are_counts(values: Any) -> bool:
    return (
        isinstance(values, list)
        and all(isinstance(value, int) for value in values)
        and sum(values) > 0
    )


def fig2a(runs: Sequence[tuple[str, Sequence[Ranks]]]) -> Picture:
    """Fig. 2a: matching probability by rank at several epochs; a panel for each run."""
    title = "Hardness of the negatives (Fig. 2a)"
    runs = runs[:MOST_PANELS]
    columns = min(3, len(runs)) if len(runs) != 4 else 2
    rows = -(-len(runs) // columns)
    with canvas(title, 0.9 + (3.0 if columns == 1 else 2.1) * rows, 6.4 + 1.2 * (columns > 2)) as f:
        grid = f.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flatten()
        for axes, (label, epochs) in zip(grid, runs, strict=False):
            colours = ordered_colours(len(epochs))
            for ranks, tint in zip(epochs, colours, strict=True):
                when = "before training" if ranks.epoch < 0 else f"epoch {ranks.epoch + 1}"
                axes.plot(ranks.rank, ranks.probability, color=tint, label=when)
            log_scale(axes, "x")
            log_scale(axes, "y")
            axes.set_title(shown(label), loc="left", size="small" if columns > 1 else "medium")
            axes.grid()
            if len(runs) > 1:
                axes.legend(*_ends(axes), fontsize="x-small", handlelength=1.2, loc="lower left")
        for axes in grid[len(runs) :]:
            axes.set_axis_off()
        for axes in grid[max(0, len(runs) - columns) : len(runs)]:
            axes.xaxis.set_tick_params(labelbottom=True)
            axes.set_xlabel("rank, hardest negative first")
        f.supylabel("matching probability", size="medium", color=INK)
        if len(runs) == 1:
            legend_below(f, grid[0].get_lines(), columns=5)
    numbers = {"runs": [{"run": k, "epochs": [e._asdict() for e in v]} for k, v in runs]}
    caption = (
        "Mean matching probability of a query's highest negatives, by rank, one line per epoch"
        " (dark: early, light: late). A line is the mean over the queries of up to 64 steps of"
        " the epoch; the first is that of the first step, before any weight is changed. The more"
        " steeply a line falls, the fewer negatives contribute to the loss."
    )
    return Picture("fig2a", title, caption, numbers, f)


def _ends(axes: Drawing) -> tuple[list[Any], list[str]]:
    """Return the first and the last line for the legend, since all would hide the panel."""
    handles, labels = axes.get_legend_handles_labels()
    kept = sorted({0, len(handles) - 1})
    return [handles[i] for i in kept], [labels[i] for i in kept]


def similarity_histograms(label: str, kinds: Sequence[tuple[str, Sequence[Histogram]]]) -> Picture:
    """Similarity to the query of positives, hardest negatives and points, over training."""
    from matplotlib.lines import Line2D

    title = "Similarities over training"
    # An epoch has one colour in all panels, though synthetic points come later than the rest.
    times = sorted({each.epoch for _, epochs in kinds for each in epochs})
    tints = dict(zip(times, ordered_colours(len(times)), strict=True))
    low, high = _occupied([each.counts for _, epochs in kinds for each in epochs])
    with canvas(title, 0.8 + 1.9 * -(-len(kinds) // 2)) as figure:
        grid = figure.subplots(-(-len(kinds) // 2), 2, squeeze=False, sharex=True).flatten()
        for axes, (kind, epochs) in zip(grid, kinds, strict=False):
            _draw_histograms(axes, epochs, tints)
            axes.set_title(kind, loc="left", size="small")
            axes.set_xlim(low, high)
        for axes in grid[len(kinds) :]:
            axes.set_axis_off()
        for axes in grid[max(0, len(kinds) - 2) : len(kinds)]:
            axes.xaxis.set_tick_params(labelbottom=True)
            axes.set_xlabel("similarity to the query")
        figure.supylabel("fraction (%)", size="medium", color=INK)
        handles = [Line2D([], [], color=tints[time], label=f"epoch {time + 1}") for time in times]
        legend_below(figure, handles, columns=5)
    numbers = {
        "run": label,
        "kinds": [
            {
                "kind": kind,
                "epochs": [
                    {"epoch": each.epoch, "edges": _edges(each), "share": _shares(each)}
                    for each in epochs
                ],
            }
            for kind, epochs in kinds
        ],
    }
    caption = (
        "Similarity to the query of keys, hardest negatives and synthetic points; one line per"
        " epoch (dark: early, light: late). Training works if positives move right and away from"
        " the negatives; points mixed with the query are to the right of their negatives."
    )
    return Picture("similarity-histograms", title, caption, numbers, figure)


def _draw_histograms(axes: Drawing, epochs: Sequence[Histogram], tints: dict[int, str]) -> None:
    for histogram in epochs:
        shares, edges = [100 * share for share in _shares(histogram)], _edges(histogram)
        middles = [(left + right) / 2 for left, right in pairwise(edges)]
        axes.plot(middles, shares, color=tints[histogram.epoch], linewidth=1.2)
    axes.set_ylim(bottom=0)
    axes.grid()


def _edges(histogram: Histogram) -> list[float]:
    bins = len(histogram.counts)
    return [round(-1 + 2 * i / bins, 6) for i in range(bins + 1)]


def _shares(histogram: Histogram) -> list[float]:
    total = max(1, sum(histogram.counts))
    return [round(count / total, 6) for count in histogram.counts]


def _occupied(histograms: list[list[int]]) -> tuple[float, float]:
    """Return the occupied part of [-1, 1], with a small margin."""
    places = [
        (-1 + 2 * i / len(counts), -1 + 2 * (i + 1) / len(counts))
        for counts in histograms
        for i, count in enumerate(counts)
        if count
    ]
    low, high = min(places, default=(-1.0, 1.0))[0], max(places, default=(-1.0, 1.0))[1]
    return max(-1.0, low - 0.05), min(1.0, high + 0.05)
