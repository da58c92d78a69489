"""Figures over training: Fig. 2a, 2b and 2c, the appendix's proxy figure, similarities."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from hardmix.analysis.figures.picture import (
    INK,
    Drawing,
    Picture,
    canvas,
    colour,
    legend_below,
    line_style,
    log_scale,
    ordered_colours,
    shown,
)

MOST_PANELS = 9
"""Most runs that Fig. 2a shows side by side."""
MARKS = 8
"""Approximate number of markers on a line."""

WITH_POINTS = "with synthetic points"
REAL_ONLY = "real negatives only"
FALSE = "false among the highest negatives"
ONE_PARENT = "pair points with a false parent"
BOTH_PARENTS = "pair points with two false parents"
QUERY_PARENT = "query points with a false parent"

_MARKER = {REAL_ONLY: "^", ONE_PARENT: "^", BOTH_PARENTS: "s", QUERY_PARENT: "D"}
"""The paper's markers: triangles and squares in Fig. 2b and 2c; main lines have none."""


class Curve(NamedTuple):
    """One line of a figure over training."""

    run: str
    """The run's label."""
    kind: str
    """What is measured."""
    hue: int
    """The run's index, which sets its colour in every figure."""
    x: list[float]
    """Epochs."""
    y: list[float]
    """Fractions from 0 to 1."""


class Ranks(NamedTuple):
    """Fig. 2a of one epoch."""

    epoch: int
    """From 0."""
    rank: list[int]
    """From 1."""
    probability: list[float]
    """Matching probability of the negative of each rank, averaged over the queries."""


class Histogram(NamedTuple):
    """Similarities at one epoch: counts in equal bins of [-1, 1]."""

    epoch: int
    """From 0."""
    counts: list[int]
    """Count of each bin, from -1 up."""


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
            for each, tint in zip(epochs, colours, strict=True):
                axes.plot(each.rank, each.probability, color=tint, label=f"epoch {each.epoch + 1}")
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
        " (dark: early, light: late). The more steeply a line falls, the fewer negatives"
        " contribute to the loss."
    )
    return Picture("fig2a", title, caption, numbers, f)


def fig2b(lines: Sequence[Curve], note: str = "") -> Picture:
    """Fig. 2b and App. B.1's figure: accuracy on the proxy task over training."""
    caption = (
        "Fraction of queries whose key is more similar than every negative. Lines with triangles"
        f" exclude synthetic points; the lower a line, the harder the task.{note}"
    )
    return _over_training(
        "fig2b", "Proxy task (Fig. 2b, App. B.1)", caption, "queries that find their key (%)", lines
    )


def fig2c(lines: Sequence[Curve], note: str = "") -> Picture:
    """Fig. 2c: false negatives among the highest negatives, and synthetic points from them."""
    caption = (
        "Lines without markers: fraction of the 1024 highest negatives (all, if the queue is"
        " shorter) that have the query's class. Triangles and squares: fraction of the synthetic"
        f" points with at least one and with two such parents.{note}"
    )
    return _over_training("fig2c", "False negatives (Fig. 2c)", caption, "fraction (%)", lines)


def similarity_histograms(label: str, kinds: Sequence[tuple[str, Sequence[Histogram]]]) -> Picture:
    """Similarity to the query of positives, hardest negatives and points, over training."""
    from matplotlib.lines import Line2D

    title = "Similarities over training"
    # Synthetic points come later than the rest: an epoch has one colour in all panels.
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


def _over_training(
    name: str, title: str, caption: str, y_label: str, lines: Sequence[Curve]
) -> Picture:
    from matplotlib.lines import Line2D

    kinds = list(dict.fromkeys(line.kind for line in lines))
    runs = {line.hue: line.run for line in lines}
    with canvas(title, 3.7) as figure:
        axes = figure.subplots()
        for line in lines:
            axes.plot(
                line.x,
                [100 * y for y in line.y],
                color=colour(line.hue),
                linestyle=line_style(line.hue),
                linewidth=1.6 if len(lines) <= MARKS else 1.0,
                marker=_MARKER.get(line.kind) or ("o" if len(line.x) == 1 else None),
                markevery=max(1, len(line.x) // MARKS),
            )
        axes.set(xlabel="epoch", ylabel=y_label)
        axes.set_ylim(bottom=-0.02 * axes.get_ylim()[1])  # 0 is not hidden by the axis
        axes.grid()
        handles = [
            Line2D([], [], color=colour(hue), linestyle=line_style(hue), label=shown(run))
            for hue, run in runs.items()
        ]
        if len(kinds) > 1:
            handles += [
                Line2D([], [], color=INK, linewidth=1, marker=_MARKER.get(kind), label=kind)
                for kind in kinds
            ]
        legend_below(figure, handles)
    numbers = {"x": "epoch", "y": y_label, "lines": [line._asdict() for line in lines]}
    return Picture(name, title, caption, numbers, figure)


def _ends(axes: Drawing) -> tuple[list[Any], list[str]]:
    """Return the first and the last line for the legend, since all would hide the panel."""
    handles, labels = axes.get_legend_handles_labels()
    kept = sorted({0, len(handles) - 1})
    return [handles[i] for i in kept], [labels[i] for i in kept]


def _draw_histograms(axes: Drawing, epochs: Sequence[Histogram], tints: dict[int, str]) -> None:
    for each in epochs:
        shares, edges = [100 * share for share in _shares(each)], _edges(each)
        middles = [(left + right) / 2 for left, right in pairwise(edges)]
        axes.plot(middles, shares, color=tints[each.epoch], linewidth=1.2)
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
