"""Differences by seed: forest plots, and gains over the proxy accuracy."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hardmix.analysis.picture import (
    INK,
    MARKERS,
    WIDTH,
    Drawing,
    Picture,
    canvas,
    colour,
    legend_below,
    shown,
)

FAINT = 0.45
"""Opacity of a single seed."""
FOREST = (
    "Each faint point is the difference of two runs with the same seed, the diamond their mean,"
    " the bar its 95 % interval by Student's t; a difference is significant if the bar does not"
    " touch 0."
)
"""Caption of forest plots."""


class GainLine(NamedTuple):
    """A row of a forest plot."""

    label: str
    differences: tuple[float, ...]
    """Difference of every seed."""
    half: float | None
    """Half of the 95 % interval of their mean; None for a single seed."""


class GainPoint(NamedTuple):
    """A row's gains over another measure, by seed."""

    label: str
    over: tuple[float, ...]
    gains: tuple[float, ...]
    half: float | None
    """Half of the 95 % interval of the mean gain; None for a single seed."""
    in_line: bool = True
    """Whether it takes part in the fit of the line."""


def forest(
    lines: Sequence[GainLine],
    measure: str,
    name: str,
    percent: bool = True,
    what: str = "Differences by seed",
) -> Picture:
    """Draw every row's mean difference with its interval, and each seed as a faint point."""
    measure = _within(measure)
    with canvas(f"{what}, {measure}", _height(lines)) as figure:
        _draw_lines(figure.subplots(), lines, measure, percent)
    numbers = {"measure": measure, "lines": [line._asdict() for line in lines]}
    return Picture(name, f"{what}, {measure}", FOREST, numbers, figure)


def forests_beside(
    panels: Mapping[str, Sequence[GainLine]], name: str, what: str = "Differences by seed"
) -> Picture:
    """Draw the same rows by several measures beside each other, with one column of labels."""
    titles = [_within(measure) for measure in panels]
    lines = max(panels.values(), key=len)
    with canvas(what, _height(lines), WIDTH * 1.35) as figure:
        all_axes = figure.subplots(1, len(panels), sharex=True, sharey=True)
        for axes, title, each in zip(all_axes, titles, panels.values(), strict=True):
            _draw_lines(axes, each, title, percent=True)
    numbers = {
        "panels": [
            {"measure": title, "lines": [line._asdict() for line in each]}
            for title, each in zip(titles, panels.values(), strict=True)
        ]
    }
    return Picture(name, what, FOREST, numbers, figure)


def _height(lines: Sequence[GainLine]) -> float:
    return 1.0 + 0.34 * len(lines)


def _draw_lines(axes: Drawing, lines: Sequence[GainLine], measure: str, percent: bool) -> None:
    for place, line in enumerate(lines):
        mean = sum(line.differences) / len(line.differences)
        spots = [place] * len(line.differences)
        axes.plot(line.differences, spots, "o", color=colour(0), alpha=FAINT, markersize=4)
        axes.errorbar(
            [mean], [place], xerr=line.half, fmt="D", color=colour(1), capsize=3, markersize=6
        )
    axes.axvline(0, color=INK, linestyle="--", linewidth=1)
    axes.set_yticks(range(len(lines)), [_counted(line) for line in lines])
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.set(xlabel=f"difference in {'points' if percent else 'the loss'} of {measure}")
    axes.grid(axis="x")


def gain_over(points: Sequence[GainPoint], over: str, measure: str, name: str) -> Picture:
    """Draw gains over another measure, with the least-squares line of the fitted points."""
    measure = _within(measure)
    title = f"Gain in {measure} over {over}"
    points = sorted(points, key=_middle)
    with canvas(title, 3.6) as figure:
        axes = figure.subplots()
        handles = [_draw_point(axes, point, number) for number, point in enumerate(points)]
        line = _line([point for point in points if point.in_line])
        if line is not None:
            axes.plot(*zip(*line, strict=True), color=INK, linewidth=1, linestyle=":")
        axes.axhline(0, color=INK, linestyle="--", linewidth=1)
        axes.set(xlabel=over, ylabel=f"gain (points of {measure})")
        axes.grid()
        legend_below(figure, handles)
    numbers = {
        "over": over,
        "measure": measure,
        "points": [point._asdict() for point in points],
        "line": line,
    }
    caption = (
        "Faint points are pairs of runs with the same seed, large ones their means with the 95 %"
        " interval of the gain by Student's t. The dotted line is the least-squares line through"
        " the means of the filled points; hollow points are not part of the fit."
    )
    return Picture(name, title, caption, numbers, figure)


def _draw_point(axes: Drawing, point: GainPoint, number: int) -> Drawing:
    from matplotlib.lines import Line2D

    look: dict[str, Any] = {
        "color": colour(number),
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": "none",
    }
    axes.plot(point.over, point.gains, alpha=FAINT, markersize=3.5, **look)
    look |= {"markersize": 7, "markerfacecolor": None if point.in_line else "none"}
    x, y = _middle(point)
    axes.errorbar([x], [y], yerr=point.half, capsize=3, **look)
    return Line2D([], [], label=shown(point.label), **look)


def _line(points: Sequence[GainPoint]) -> list[tuple[float, float]] | None:
    """Return both ends of the least-squares line through the means; None for fewer than three."""
    means = sorted(_middle(point) for point in points)
    if len(means) < 3 or means[0][0] == means[-1][0]:
        return None
    middle_x = sum(x for x, _ in means) / len(means)
    middle_y = sum(y for _, y in means) / len(means)
    slope = sum((x - middle_x) * (y - middle_y) for x, y in means)
    slope /= sum((x - middle_x) ** 2 for x, _ in means)
    return [(x, middle_y + slope * (x - middle_x)) for x in (means[0][0], means[-1][0])]


def _middle(point: GainPoint) -> tuple[float, float]:
    return sum(point.over) / len(point.over), sum(point.gains) / len(point.gains)


def _within(title: str) -> str:
    """Return a title as it is written within a sentence, where k-NN and AP keep their capitals."""
    return title[:1].lower() + title[1:] if title[1:2].islower() else title


def _counted(line: GainLine) -> str:
    return f"{shown(line.label)} ({len(line.differences)})"
