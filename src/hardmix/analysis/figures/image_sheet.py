"""The gallery: images with their hardest negatives, and the parents of their synthetic points.

Images are data URIs: the drawing, its JSON and a page show the same bytes.
"""

import base64
import io
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image

from hardmix.analysis.figures.picture import INK, Drawing, Picture, canvas, shown

TILE = 0.8
"""Inches of a picture in the sheet, with the gap to the next."""
TEXT = 0.42
"""Height of the two lines of text under a picture, in tiles."""
SPACE = 0.35
"""Gap between query, negatives and points, in tiles."""
FRAME = "#777777"
"""Frame of an image of the query's class: a fact, not a fault."""
SHOWN = 12
"""Most characters of a class name."""


class Neighbour(NamedTuple):
    """An image whose key is in the queue."""

    id: int
    """Its number in the data set."""
    image: str
    """A data URI; empty if it can no longer be read."""
    label: str | None
    """Its class, where that is known."""
    similarity: float
    """Similarity of its key to the query."""
    false: bool | None
    """Whether it has the query's class; None if either is unknown."""


class Parents(NamedTuple):
    """A synthetic point and its parents."""

    kind: Literal["pair", "query", "key"]
    """Two negatives (Eq. 3), or one and the query (Sec. 4.2) or its key (App. B.2)."""
    similarity: float
    """Similarity of the point to the query."""
    share: float
    """Share of the second parent."""
    parents: list[Neighbour]
    """Two negatives for a pair, otherwise one."""


class Query(NamedTuple):
    """A sample image with its hardest negatives and synthetic points."""

    id: int
    """Its number in the data set."""
    name: str
    """Its file, or the data set and its number."""
    image: str
    """A data URI."""
    label: str | None
    """Its class, where that is known."""
    hardest: list[Neighbour]
    """Its hardest negatives, the most similar first."""
    synthetic: list[Parents]
    """Its hardest points, the most similar first."""


def gallery(queries: Sequence[Query], note: str = "") -> Picture:
    """Draw a row for each query: its image, hardest negatives, and parents of its points."""
    title = "Sample images and their hardest negatives"
    negatives = max(len(query.hardest) for query in queries)
    points = max(len(query.synthetic) for query in queries)
    width = 1 + SPACE + negatives + (SPACE + 2.25 * points if points else 0)
    height = len(queries) * (1 + TEXT) + 0.3
    with canvas(title, TILE * height + 0.35, TILE * width + 0.2) as figure:
        axes = figure.subplots()
        axes.set_axis_off()
        axes.text(0, -0.1, "query", size=8, weight="bold")
        axes.text(1 + SPACE, -0.1, "hardest negatives in the queue", size=8, weight="bold")
        if points:
            left = 1 + SPACE + negatives + SPACE
            heading = "parents of its hardest synthetic points, and the point's similarity"
            axes.text(left, -0.1, heading, size=8, weight="bold")
        for row, query in enumerate(queries):
            _draw_row(axes, query, row * (1 + TEXT), negatives)
        axes.set(xlim=(0, width), ylim=(height - 0.3, -0.3), aspect="equal")
    caption = (
        "Each image with its similarity to the query; framed images have the query's own class,"
        " which the method is not told (the paper's false negatives). For a synthetic point, the"
        f" similarity is that of the point, and the share that of its second parent.{note}"
    )
    numbers = {"queries": [_plain(query) for query in queries]}
    return Picture("gallery", title, caption, numbers, figure, formats=("png",))


def _draw_row(axes: Drawing, query: Query, top: float, negatives: int) -> None:
    _tile(axes, query.image, 0, top, f"image {query.id}", query.label)
    for column, each in enumerate(query.hardest):
        _neighbour(axes, each, 1 + SPACE + column, top, f"{each.similarity:.2f}")
    left = 1 + SPACE + negatives + SPACE
    for number, point in enumerate(query.synthetic):
        x = left + 2.25 * number
        _neighbour(axes, point.parents[0], x, top, f"{point.similarity:.2f}")
        axes.text(x + 0.98, top + 0.5, "+", ha="center", va="center", size=8)
        if point.kind == "pair":
            _neighbour(axes, point.parents[1], x + 1.02, top, f"share {point.share:.0%}")
        else:
            name = "query" if point.kind == "query" else "its key"
            _tile(axes, query.image, x + 1.02, top, f"share {point.share:.0%}", name)


def _neighbour(axes: Drawing, each: Neighbour, left: float, top: float, text: str) -> None:
    text = f"{text} same class" if each.false else text
    _tile(axes, each.image, left, top, text, each.label, framed=bool(each.false))


def _tile(
    axes: Drawing,
    image: str,
    left: float,
    top: float,
    text: str,
    label: str | None,
    *,
    framed: bool = False,
) -> None:
    from matplotlib.patches import Rectangle

    extent = (left + 0.02, left + 0.94, top + 0.94, top + 0.02)
    if image:
        axes.imshow(_pixels(image), extent=extent, interpolation="nearest")
    else:
        axes.text(left + 0.48, top + 0.5, "cannot\nbe read", ha="center", va="center", size=6)
    frame = {"edgecolor": FRAME, "linewidth": 2.2} if framed else {"edgecolor": INK}
    if framed or not image:
        axes.add_patch(Rectangle((left + 0.02, top + 0.02), 0.92, 0.92, fill=False, **frame))
    look: dict[str, Any] = {"size": 6, "ha": "left", "va": "top"}
    axes.text(left + 0.02, top + 0.98, text, **look, weight="bold" if framed else "normal")
    name = shown(label or "")
    name = name if len(name) <= SHOWN else name[: SHOWN - 1] + "…"
    axes.text(left + 0.02, top + 1.14, name, **look)


def _pixels(uri: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    data = base64.b64decode(uri.partition(",")[2])
    return np.asarray(Image.open(io.BytesIO(data), formats=("WEBP",)).convert("RGB"))


def _plain(query: Query) -> dict[str, Any]:
    points = [
        {**point._asdict(), "parents": [each._asdict() for each in point.parents]}
        for point in query.synthetic
    ]
    return {
        **query._asdict(),
        "hardest": [each._asdict() for each in query.hardest],
        "synthetic": points,
    }
