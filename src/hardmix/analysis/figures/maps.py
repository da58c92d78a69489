"""Figures of embedding spaces: Fig. 1's toy sphere, the map of a run's features, their spectrum."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from hardmix.analysis.figures.picture import (
    COLOURS,
    INK,
    MARKERS,
    Picture,
    canvas,
    colour,
    legend_below,
    log_scale,
    shown,
)

LOOKS = len(COLOURS) * len(MARKERS)
"""Number of classes that look different: these two numbers have no common divisor."""
MOST_NAMED = 21
"""Classes with an entry in the map's legend."""


class ToyPoints(NamedTuple):
    """Points of one kind in Fig. 1."""

    kind: str
    """memory, hardest negatives, pair points, points with the query, or query."""
    x: list[float]
    """Places in the plane."""
    y: list[float]
    """The same, upwards."""


class MapPoints(NamedTuple):
    """A t-SNE map of images."""

    x: list[float]
    """Places in the plane, one for each image."""
    y: list[float]
    """The same, upwards."""
    label: list[int]
    """Class of each image, -1 if unknown."""
    classes: list[str]
    """Names of the classes."""
    thumbnails: list[dict[str, Any]]
    """`point` (its index), `image` (a data URI), `name` and `file` of some of the images."""


_LOOK: dict[str, dict[str, Any]] = {
    "memory": {"color": "#999999", "marker": ".", "s": 14},
    "hardest negatives": {"color": COLOURS[0], "marker": "o", "s": 22},
    "pair points": {"color": COLOURS[2], "marker": "^", "s": 22},
    "points with the query": {"color": COLOURS[1], "marker": "s", "s": 22},
    "query": {"color": INK, "marker": "*", "s": 260},
}


def fig1(groups: Sequence[ToyPoints], settings: dict[str, Any]) -> Picture:
    """Fig. 1: a query, its memory, its hardest negatives and the synthetic points, by t-SNE."""
    title = "Synthetic hard negatives on a toy sphere (Fig. 1)"
    with canvas(title, 4.6) as figure:
        axes = figure.subplots()
        handles = [
            axes.scatter(
                group.x,
                group.y,
                label=f"{group.kind} ({len(group.x)})" if len(group.x) > 1 else group.kind,
                linewidths=0,
                **_LOOK[group.kind],
            )
            for group in groups
        ]
        axes.set(xlabel="first t-SNE dimension", ylabel="second t-SNE dimension")
        axes.set(xticks=[], yticks=[])
        legend_below(figure, handles, columns=3)
    numbers = {"settings": settings, "groups": [group._asdict() for group in groups]}
    caption = (
        "Random embeddings on the unit sphere. Points that mix two of the hardest negatives are"
        " among them; points mixed with the query are between them and the query. t-SNE keeps"
        " neighbours together; its distances have no unit."
    )
    return Picture("fig1", title, caption, numbers, figure)


def embedding_map(points: MapPoints, of: str) -> Picture:
    """Draw the run's features in the plane; a page shows the thumbnails on hover."""
    title = "Map of the features"
    known = sorted({label for label in points.label if label >= 0})
    with canvas(title, 4.8) as figure:
        axes = figure.subplots()
        handles = []
        for label in [*([-1] if -1 in points.label else []), *known]:
            members = [i for i, each in enumerate(points.label) if each == label]
            handles.append(
                axes.scatter(
                    [points.x[i] for i in members],
                    [points.y[i] for i in members],
                    s=7 if len(points.x) > 1500 else 14,
                    color="#999999" if label < 0 else colour(known.index(label)),
                    marker=MARKERS[known.index(label) % len(MARKERS) if label >= 0 else 0],
                    label=shown(points.classes[label]) if label >= 0 else "class unknown",
                    linewidths=0,
                    rasterized=True,  # thousands of SVG elements would make a page slow
                )
            )
        axes.set(xlabel="first t-SNE dimension", ylabel="second t-SNE dimension")
        axes.set(xticks=[], yticks=[])
        if len(handles) <= MOST_NAMED and known:
            legend_below(figure, handles, columns=4, enlarge=2)
    caption = (
        f"t-SNE of the trunk's features (no head, unit length) of {len(points.x)} {of}: neighbours"
        " are images that the encoder considers similar, distances between clusters have no unit."
    )
    if known:
        caption += " A colour and marker is a class, which the encoder was not told."
    if len(known) > LOOKS:
        caption += f" Beyond {LOOKS} classes, they repeat."
    return Picture("embedding-map", title, caption, points._asdict(), figure)


def feature_spectrum(
    singular_values: Sequence[float], effective_rank: float, warning: str | None
) -> Picture:
    """Draw the singular values and effective rank: how many directions the features use."""
    title = "Spectrum of the features"
    largest = max(singular_values, default=0.0)
    shares = [float(f"{value / (largest or 1.0):.5g}") for value in singular_values]
    floor = 1e-6  # below it is rounding
    with canvas(title, 3.4) as figure:
        axes = figure.subplots()
        ranks = range(1, len(shares) + 1)
        axes.plot(ranks, [max(floor, share) for share in shares], color=COLOURS[0])
        low = effective_rank < 0.6 * len(shares)
        axes.axvline(effective_rank, color=COLOURS[1], linestyle="--")
        axes.annotate(
            f"effective rank {effective_rank:.1f} of {len(shares)}",
            (effective_rank, 0.9),
            xycoords=("data", "axes fraction"),
            xytext=(6 if low else -6, 0),
            textcoords="offset points",
            ha="left" if low else "right",
        )
        axes.set(xlabel="direction, strongest first", ylabel="singular value (largest: 1)")
        log_scale(axes, "y")
        axes.grid()
    numbers = {
        "singular_values": shares,
        "effective_rank": effective_rank,
        "directions": len(shares),
        "warning": warning,
    }
    caption = (
        "Singular values of the features (unit length, then centred). The effective rank is"
        " exp(entropy of the singular values over their sum) (Roy and Vetterli): that many equally"
        " strong directions would have the same entropy. A curve that drops at once means collapse."
    )
    return Picture("feature-spectrum", title, f"{caption} {warning or ''}".strip(), numbers, figure)
