"""Figures of results: Fig. 3a and 3b over (N, s, s'), Fig. 3c in the embedding space."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from hardmix.analysis.figures.picture import (
    INK,
    MARKERS,
    Drawing,
    Picture,
    canvas,
    colour,
    legend_below,
    line_style,
    shown,
)

GAINS = "PuOr"
"""Gains in violet, losses in orange, which colour-blind people can distinguish."""


class MochiSetting(NamedTuple):
    """One setting of MoCHi, over its seeds."""

    num_hardest: int
    """N: hardest negatives that may be mixed."""
    num_pairs: int
    """s: pair points."""
    num_with_query: int
    """s': points mixed with the query."""
    accuracy: float
    """Mean accuracy, from 0 to 1."""
    deviation: float
    """Standard deviation over the runs; 0 for one."""
    runs: int
    """Number of runs."""


class Place(NamedTuple):
    """A run in Fig. 3c: Wang and Isola's losses, lower is better."""

    run: str
    """The run's label."""
    hue: int
    """The run's index, which sets its colour."""
    alignment: float
    """L_align (App. A)."""
    uniformity: float
    """L_uniform (App. A)."""


def fig3a(cells: Sequence[MochiSetting], baseline: MochiSetting | None, measure: str) -> Picture:
    """Fig. 3a: accuracy over N, for each (s, s'); MoCo-v2 is the dashed line."""
    from matplotlib.lines import Line2D

    title = "Accuracy over N and s (Fig. 3a)"
    kinds = sorted({(cell.num_pairs, cell.num_with_query) for cell in cells})
    sizes = sorted({cell.num_hardest for cell in cells})
    with canvas(title, 3.5) as figure:
        axes = figure.subplots()
        handles = []
        for number, kind in enumerate(kinds):
            some = sorted(c for c in cells if (c.num_pairs, c.num_with_query) == kind)
            look: dict[str, Any] = {
                "color": colour(number),
                "marker": MARKERS[number % len(MARKERS)],
                "linestyle": line_style(number),
                "linewidth": 1,
            }
            x, y = [c.num_hardest for c in some], [100 * c.accuracy for c in some]
            axes.errorbar(x, y, yerr=[100 * c.deviation for c in some], capsize=3, **look)
            handles.append(Line2D([], [], label=f"s = {kind[0]}, s' = {kind[1]}", **look))
        if baseline is not None:
            axes.axhline(100 * baseline.accuracy, color=INK, linestyle="--", linewidth=1)
            handles.append(Line2D([], [], color=INK, linestyle="--", label="MoCo-v2"))
        axes.set(xlabel="N, hardest negatives that may be mixed", ylabel=f"{measure} (%)")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.grid()
        legend_below(figure, handles, columns=3)
    numbers = {
        "measure": measure,
        "cells": [cell._asdict() for cell in cells],
        "baseline": None if baseline is None else baseline._asdict(),
    }
    caption = (
        "Accuracy of MoCHi runs over N, one line for each s (pair points) and s' (points with the"
        " query); bars are the standard deviation over seeds, the dashed line is MoCo-v2."
    )
    return Picture("fig3a", title, caption, numbers, figure)


def fig3b(cells: Sequence[MochiSetting], baseline: MochiSetting, measure: str) -> Picture:
    """Fig. 3b: gains over MoCo-v2 for one N, s in rows and s' in columns."""
    size = cells[0].num_hardest
    title = f"Gains over MoCo-v2, N = {size} (Fig. 3b)"
    rows = sorted({0} | {cell.num_pairs for cell in cells})
    columns = sorted({0} | {cell.num_with_query for cell in cells})
    gains = {
        (c.num_pairs, c.num_with_query): round(100 * (c.accuracy - baseline.accuracy), 4)
        for c in cells
    } | {(0, 0): 0.0}
    reach = max(1.0, max(abs(gain) for gain in gains.values()))
    with canvas(title, 1.0 + 0.5 * len(rows)) as figure:
        axes = figure.subplots()
        image = axes.imshow(
            [[gains.get((s, q), float("nan")) for q in columns] for s in rows],
            cmap=GAINS,
            vmin=-reach,
            vmax=reach,
            aspect="auto",
        )
        _write_gains(axes, image, gains, rows, columns)
        axes.set_xticks(range(len(columns)), [str(q) for q in columns])
        axes.set_yticks(range(len(rows)), [str(s) for s in rows])
        axes.set(xlabel="s', points mixed with the query", ylabel="s, pair points")
        axes.tick_params(length=0)
    numbers = {
        "measure": measure,
        "num_hardest": size,
        "baseline": baseline._asdict(),
        "cells": [
            {"num_pairs": s, "num_with_query": q, "gain": gain}
            for (s, q), gain in sorted(gains.items())
        ],
    }
    caption = (
        f"Gain over MoCo-v2 ({100 * baseline.accuracy:.1f} %, top left) in points of {measure}, for"
        " every s and s' that was run (violet: better, orange: worse); empty cells were not run."
    )
    return Picture("fig3b", title, caption, numbers, figure)


def fig3c(places: Sequence[Place]) -> Picture:
    """Fig. 3c: alignment against uniformity, both negated: up and right is better."""
    from matplotlib.lines import Line2D

    title = "Alignment and uniformity (Fig. 3c)"
    with canvas(title, 3.6) as figure:
        axes = figure.subplots()
        handles = []
        for place in places:
            look: dict[str, Any] = {
                "color": colour(place.hue),
                "marker": MARKERS[place.hue % len(MARKERS)],
                "markersize": 8,
                "linestyle": "none",
            }
            axes.plot([-place.uniformity], [-place.alignment], **look)
            handles.append(Line2D([], [], label=shown(place.run), **look))
        axes.set(xlabel="uniformity (minus L uniform)", ylabel="alignment (minus L align)")
        axes.margins(0.15)
        axes.grid()
        legend_below(figure, handles)
    numbers = {"places": [place._asdict() for place in places]}
    caption = (
        "Each point is a run's features of the evaluation images. Further up, images of one class"
        " are closer together; further right, all images fill the sphere more evenly. The axes show"
        " the negated losses."
    )
    return Picture("fig3c", title, caption, numbers, figure)


def _write_gains(
    axes: Drawing,
    image: Drawing,
    gains: dict[tuple[int, int], float],
    rows: list[int],
    columns: list[int],
) -> None:
    for (s, q), gain in gains.items():
        red, green, blue, _ = image.cmap(image.norm(gain))
        bright = 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.45
        place = columns.index(q), rows.index(s)
        text = f"{gain:+.1f}" if (s, q) != (0, 0) else "0.0"
        axes.text(*place, text, ha="center", va="center", color="black" if bright else "white")
