"""Curves from metrics.jsonl: the proxy task (Fig. 2b, App. B.1) and false negatives (Fig. 2c).

Sec. 3.2 asks how many queries find their key, Sec. 3.3 what a class oracle sees.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

from hardmix.analysis.picture import (
    INK,
    MOST_TOGETHER,
    Drawing,
    Found,
    Picture,
    canvas,
    colour,
    legend_below,
    line_style,
    shown,
)
from hardmix.runs.reading import RunRecord, number

COLUMNS = 3
"""Panels side by side."""
GREY = "#a6a6a6"
"""The other runs in a panel."""
MARKS = 8
"""Approximate number of markers on a line."""
WITH_POINTS = "with synthetic points"
REAL_ONLY = "real negatives only"
FALSE = "false among the highest negatives"
ONE_PARENT = "pair points with a false parent"
BOTH_PARENTS = "pair points with two false parents"
QUERY_PARENT = "query points with a false parent"

_MARKER = {REAL_ONLY: "^", ONE_PARENT: "^", BOTH_PARENTS: "s", QUERY_PARENT: "D"}
"""The paper's markers, triangles and squares in Fig. 2b and 2c; main lines have none."""

MOST_POINTS = 400
"""Most points of a curve; longer ones become the means of as many parts."""
EPOCHS_TO_AVERAGE = 8
"""Fewest epochs whose lines are averaged; a shorter run is drawn line by line."""

FALSE_SHARES = {
    "false_negatives_top": FALSE,
    "synthetic_one_false": ONE_PARENT,
    "synthetic_both_false": BOTH_PARENTS,
    "synthetic_query_false": QUERY_PARENT,
}
"""Keys of metrics.jsonl, and what they measure. Oracle runs count discarded negatives too."""


class Curve(NamedTuple):
    """One line of a figure over training."""

    run: str
    """The run's label."""
    kind: str
    """The quantity that is measured."""
    hue: int
    """The run's index, which sets its colour in every figure."""
    x: list[float]
    """Epochs."""
    y: list[float]
    """Fractions from 0 to 1."""


def proxy_task(records: Sequence[RunRecord]) -> Found:
    """Draw Fig. 2b: the proxy accuracy over training of every run that logged it."""
    lines = []
    for record in records:
        epochs, mixed = curve(record.metrics, "proxy_accuracy_mixed")
        real_epochs, real = curve(record.metrics, "proxy_accuracy")
        # Without synthetic points, both lines are the same, and only one is drawn, without markers.
        if not mixed or (epochs, mixed) == (real_epochs, real):
            epochs, mixed, real = real_epochs, real, []
        if mixed:
            lines.append(Curve(record.label, WITH_POINTS, record.hue, epochs, mixed))
        if real:
            lines.append(Curve(record.label, REAL_ONLY, record.hue, real_epochs, real))
    if not lines:
        return [], ["No Fig. 2b: no run logged the proxy task."]
    if not any(len(line.x) > 1 for line in lines):
        return [], ["No Fig. 2b: the runs logged the proxy task only once."]
    return [fig2b(lines, _temperatures(records))], []


def false_negatives(records: Sequence[RunRecord]) -> Found:
    """Draw Fig. 2c: false negatives over training of every run whose images have labels."""
    lines = []
    for record in records:
        for key, kind in FALSE_SHARES.items():
            epochs, shares = curve(record.metrics, key)
            if shares:
                lines.append(Curve(record.label, kind, record.hue, epochs, shares))
    if not lines:
        return [], ["No Fig. 2c: no run logged false negatives, which need labels."]
    if not any(len(line.x) > 1 for line in lines):
        return [], ["No Fig. 2c: the runs logged false negatives only once."]
    oracle = any(record.settings.get("oracle") is True for record in records)
    note = " Oracle runs discard them in training; here they are counted." if oracle else ""
    return [fig2c(lines, note)], []


def curve(lines: Sequence[Mapping[str, Any]], key: str) -> tuple[list[float], list[float]]:
    """Return a metric over training: fractional epochs and values; non-numbers are skipped.

    A line of metrics.jsonl describes the steps since the line before. In runs of
    `EPOCHS_TO_AVERAGE` epochs or more, a point is the mean of an epoch's lines, at its middle.
    """
    lines = [line for line in lines if (at := number(line.get("epoch"))) is not None and at >= 0]
    if len({line["epoch"] for line in lines}) >= EPOCHS_TO_AVERAGE:
        points = [(epoch + 0.5, fmean(values)) for epoch, values in _by_epoch(lines, key)]
    else:
        steps = steps_per_epoch(lines)
        pairs = [(number(line.get("step")), number(line.get(key))) for line in lines]
        points = [(step / steps, y) for step, y in pairs if step is not None and y is not None]
    return thin([x for x, _ in points]), thin([y for _, y in points])


def steps_per_epoch(lines: Sequence[Mapping[str, Any]]) -> float:
    """Return the steps per epoch: step / (epoch + 1) is largest at the end of an epoch."""
    largest = 0.0
    for line in lines:
        step, epoch = number(line.get("step")), number(line.get("epoch"))
        if step is not None and epoch is not None and epoch >= 0:
            largest = max(largest, step / (epoch + 1))
    return largest or 1.0


def epoch_means(lines: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """Return the mean of a metric over each epoch that has it, in order."""
    return [fmean(values) for _, values in _by_epoch(lines, key)]


def thin(values: list[float]) -> list[float]:
    """Return at most `MOST_POINTS` values: means of consecutive parts."""
    count = len(values)
    if count <= MOST_POINTS:
        return [float(f"{value:.6g}") for value in values]
    ends = [round(i * count / MOST_POINTS) for i in range(MOST_POINTS + 1)]
    parts = [values[start:end] for start, end in pairwise(ends)]
    return [float(f"{sum(part) / len(part):.6g}") for part in parts]


def _by_epoch(lines: Sequence[Mapping[str, Any]], key: str) -> list[tuple[int, list[float]]]:
    epochs: dict[int, list[float]] = {}
    for line in lines:
        value = number(line.get(key))
        if value is not None and isinstance(line.get("epoch"), int):
            epochs.setdefault(line["epoch"], []).append(value)
    return sorted(epochs.items())


def _temperatures(records: Sequence[RunRecord]) -> str:
    """Return a note if temperatures differ; App. B.1 compares runs at a single one."""
    temperatures = sorted(
        {
            record.config.train.temperature
            for record in records
            if record.config is not None and record.config.uses("train.temperature")
        }
    )
    if len(temperatures) < 2:
        return ""
    words = ", ".join(f"{temperature:g}" for temperature in temperatures)
    return f" These runs have different temperatures ({words}), which changes the task too."


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
        "Lines without markers: fraction of the highest negatives, 1024 or a sixteenth of a"
        " queue shorter than 16384, that have the query's class. Triangles and squares: fraction of"
        f" the synthetic points with at least one and with two such parents.{note}"
    )
    return _over_training("fig2c", "False negatives (Fig. 2c)", caption, "fraction (%)", lines)


def _over_training(
    name: str, title: str, caption: str, y_label: str, lines: Sequence[Curve]
) -> Picture:
    """Draw all lines on one pair of axes, or a panel for each run if there are many runs."""
    kinds = list(dict.fromkeys(line.kind for line in lines))
    runs = {line.hue: line.run for line in lines}
    if len(runs) > MOST_TOGETHER:
        figure = _panels(title, y_label, lines, runs, kinds)
        caption += " One panel per run; the grey lines are those of all other runs."
    else:
        figure = _together(title, y_label, lines, runs, kinds)
    numbers = {"x": "epoch", "y": y_label, "lines": [line._asdict() for line in lines]}
    return Picture(name, title, caption, numbers, figure)


def _together(
    title: str, y_label: str, lines: Sequence[Curve], runs: dict[int, str], kinds: list[str]
) -> Drawing:
    from matplotlib.lines import Line2D

    with canvas(title, 3.7) as figure:
        axes = figure.subplots()
        for line in lines:
            _draw_line(axes, line, 1.6 if len(lines) <= MARKS else 1.0)
        axes.set(xlabel="epoch", ylabel=y_label)
        axes.set_ylim(bottom=-0.02 * axes.get_ylim()[1])  # so that the axis does not hide 0
        axes.grid()
        handles = [
            Line2D([], [], color=colour(hue), linestyle=line_style(hue), label=shown(run))
            for hue, run in runs.items()
        ]
        legend_below(figure, handles + (_kind_handles(kinds) if len(kinds) > 1 else []))
    return figure


def _panels(
    title: str, y_label: str, lines: Sequence[Curve], runs: dict[int, str], kinds: list[str]
) -> Drawing:
    """Draw a panel for each run, with the first kind of line of all others in grey."""
    rows = -(-len(runs) // COLUMNS)
    with canvas(title, 0.9 + 1.7 * rows, 7.6) as figure:
        grid = figure.subplots(rows, COLUMNS, squeeze=False, sharex=True, sharey=True).flatten()
        for axes, (hue, run) in zip(grid, runs.items(), strict=False):
            for line in lines:
                if line.hue == hue:
                    _draw_line(axes, line, 1.4)
                elif line.kind == kinds[0]:
                    axes.plot(line.x, [100 * y for y in line.y], color=GREY, linewidth=0.6)
            axes.set_title(shown(run), loc="left", size="x-small")
            axes.grid()
        grid[0].set_ylim(bottom=-0.02 * grid[0].get_ylim()[1])
        for axes in grid[len(runs) :]:
            axes.set_axis_off()
        for axes in grid[max(0, len(runs) - COLUMNS) : len(runs)]:
            axes.xaxis.set_tick_params(labelbottom=True)
            axes.set_xlabel("epoch")
        figure.supylabel(y_label, size="medium", color=INK)
        if len(kinds) > 1:
            legend_below(figure, _kind_handles(kinds))
    return figure


def _draw_line(axes: Drawing, line: Curve, width: float) -> None:
    axes.plot(
        line.x,
        [100 * y for y in line.y],
        color=colour(line.hue),
        linestyle=line_style(line.hue),
        linewidth=width,
        marker=_MARKER.get(line.kind) or ("o" if len(line.x) == 1 else None),
        markevery=max(1, len(line.x) // MARKS),
    )


def _kind_handles(kinds: list[str]) -> list[Drawing]:
    from matplotlib.lines import Line2D

    return [
        Line2D([], [], color=INK, linewidth=1, marker=_MARKER.get(kind), label=kind)
        for kind in kinds
    ]
