"""Galleries and maps of images, read from RUN/figures and checked value by value.

The size of each kind on the page is limited; files that do not fit are listed with their paths.
"""

import base64
import binascii
import io
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from hardmix.report import sentences
from hardmix.report.grouping import SeedGroup
from hardmix.report.run_figures import Kind, checked_text, first_seeds_first, read_or_explain
from hardmix.runs.reading import RunRecord, number
from hardmix.runtime.files import read_json

KINDS = {"neighbours.json": "neighbours", "embedding-map.json": "map", "gallery.json": "gallery"}
"""The kind of pictures in each file."""
MOST_BYTES = 2_500_000
"""Bytes of one kind on the page."""
SMALL = 96
"""Images with fewer pixels than this are enlarged without blur."""
DATA_IMAGE = re.compile(r"data:image/(png|jpeg|webp);base64,[A-Za-z0-9+/=\s]+")


@dataclass(frozen=True)
class Tile:
    """An image and its facts; unknown texts are empty."""

    source: str
    name: str
    """Its file, or the data set and its number."""
    label: str
    similarity: str
    link: str
    """URL of its file."""
    small: bool
    same: bool = False
    """Whether it has the query's class."""

    @property
    def title(self) -> str:
        """Its class if that is known, otherwise the last part of its name."""
        return self.label or os.path.basename(self.name)

    @property
    def alt(self) -> str:
        """Alternative text."""
        words = [self.title or "image without a label", self.similarity]
        return ", ".join(filter(None, [*words, "same class" if self.same else ""]))


def read_tile(facts: dict[str, Any]) -> Tile:
    """Return an image of a gallery's JSON."""
    similarity = number(facts.get("similarity"))
    source = image_source(facts["image"])
    return Tile(
        source,
        optional_text(facts.get("name")),
        optional_text(facts.get("label")),
        "" if similarity is None else f"{similarity:.3f}",
        file_link(facts.get("file")),
        is_small(source),
        facts.get("false") is True,
    )


def stored(
    groups: Sequence[SeedGroup],
    name: str,
    build: Callable[[SeedGroup, RunRecord, dict[str, Any]], Kind],
    missing: list[str],
) -> list[Kind]:
    """Return the contents of RUN/figures/NAME, one of each group before a second of any."""
    pictures, absent, room = [], [], MOST_BYTES
    for group, run in first_seeds_first(groups):
        file = run.run.figures / name
        if not file.exists():
            # `looking.py` may have given the reason already.
            start = sentences.NOT_MADE.format(pictures=KINDS[name], path=run.run.path, reason="")
            absent += [] if any(each.startswith(start) for each in missing) else [run.name]
            continue
        size = file.stat().st_size
        if size > room:
            missing.append(sentences.OMITTED.format(run=run.name, file=file))
            continue
        picture = read_or_explain(
            lambda: build(group, run, read_json(file)),  # noqa: B023
            run,
            file,
            missing,
        )
        if picture is not None:
            room -= size
            pictures.append(picture)
    if absent:
        runs = ", ".join(absent)
        missing.append(sentences.NO_PICTURES.format(pictures=KINDS[name], runs=runs))
    return pictures


def image_source(source: Any) -> str:
    """Return a picture's data URI; empty if it could not be read when the figure was made."""
    if source == "" or (isinstance(source, str) and DATA_IMAGE.fullmatch(source)):
        return str(source)
    raise ValueError("an image is not a data URI")


def is_small(source: str) -> bool:
    """Return whether a picture has so few pixels that enlarging would blur it."""
    try:
        data = base64.b64decode(source.partition(",")[2])
        with Image.open(io.BytesIO(data), formats=("WEBP", "PNG", "JPEG")) as image:
            return min(image.size) < SMALL
    except (OSError, ValueError, binascii.Error):
        return False


def file_link(file: Any) -> str:
    """Return the URL of a file; empty unless it is an absolute path."""
    return Path(file).as_uri() if isinstance(file, str) and os.path.isabs(file) else ""


def optional_text(value: Any) -> str:
    """Return a value that must be text or None."""
    return "" if value is None else checked_text(value)


# -- galleries


@dataclass(frozen=True)
class Point:
    """A synthetic point and the images it was mixed from."""

    share: str
    """Share of its second parent."""
    similarity: str
    parents: list[Tile]
    other: str
    """The query or its key, if that is the second parent."""

    @property
    def same(self) -> str:
        """How many parents have the query's class, in words; empty if none."""
        count = sum(parent.same for parent in self.parents)
        if count == 0:
            return ""
        if len(self.parents) == 1:
            return "parent of the same class"
        return ("one parent of the same class", "both parents of the same class")[count - 1]


@dataclass(frozen=True)
class GalleryRow:
    """An image, those near to it, and the synthetic points of its hardest negatives."""

    image: Tile
    near: list[Tile]
    points: list[Point]


@dataclass(frozen=True)
class ClusterRow:
    """A cluster's name, its size and its most typical images."""

    name: str
    size: int
    images: list[Tile]


@dataclass(frozen=True)
class Gallery:
    """Sample images of a run with their neighbours or hardest negatives, and its clusters."""

    run: str
    label: str
    group: int
    caption: str
    rows: list[GalleryRow]
    clusters: tuple[ClusterRow, ...] = ()


def feature_galleries(groups: Sequence[SeedGroup], missing: list[str]) -> list[Gallery]:
    """Return the existing galleries of feature neighbours."""
    return stored(groups, "neighbours.json", _feature_gallery, missing)


def galleries(groups: Sequence[SeedGroup], missing: list[str]) -> list[Gallery]:
    """Return the existing galleries of hardest negatives."""
    return stored(groups, "gallery.json", _gallery, missing)


def _feature_gallery(group: SeedGroup, run: RunRecord, facts: dict[str, Any]) -> Gallery:
    queries = facts["numbers"]["queries"]
    rows = [GalleryRow(read_tile(each), [*map(read_tile, each["near"])], []) for each in queries]
    clusters = tuple(
        ClusterRow(checked_text(each["name"]), int(each["size"]), [*map(read_tile, each["images"])])
        for each in facts.get("clusters", [])
    )
    caption = checked_text(facts["caption"])
    return Gallery(run.name, run.label, group.number, caption, rows, clusters)


def _gallery(group: SeedGroup, run: RunRecord, facts: dict[str, Any]) -> Gallery:
    rows = [
        GalleryRow(
            read_tile(query),
            [read_tile(image) for image in query["hardest"]],
            [_point(point) for point in query["synthetic"]],
        )
        for query in facts["numbers"]["queries"]
    ]
    return Gallery(run.name, run.label, group.number, checked_text(facts["caption"]), rows)


def _point(facts: dict[str, Any]) -> Point:
    others = {"pair": "", "query": "query", "key": "key"}
    share, similarity = number(facts["share"]), number(facts["similarity"])
    return Point(
        "" if share is None else f"share {share:.2f}",
        "" if similarity is None else f"{similarity:.3f}",
        [read_tile(image) for image in facts["parents"]],
        others[facts["kind"]],
    )


# -- the map of the features: RUN/figures/embedding-map.json


CLASS_COLOURS = 12
MOST_CLASSES = 24
"""Classes named below a map."""
PICTURE = 60
"""Side of a thumbnail on the map, in thousandths of the map's."""
MOST_PICTURES = 110


@dataclass(frozen=True)
class Dots:
    """The points of one class: an SVG path of zero-length strokes, which are round dots."""

    d: str
    colour: int


@dataclass(frozen=True)
class PlacedImage:
    """A thumbnail on the map."""

    point: int
    x: int
    """Left edge."""
    y: int
    """Top edge."""
    source: str
    name: str
    link: str
    colour: int
    small: bool


@dataclass(frozen=True)
class FeatureMap:
    """A map, and `data` for page.js."""

    run: str
    label: str
    group: int
    caption: str
    count: int
    paths: list[Dots]
    pictures: list[PlacedImage]
    classes: list[tuple[str, int]]
    data: dict[str, Any]


def feature_maps(groups: Sequence[SeedGroup], missing: list[str]) -> list[FeatureMap]:
    """Return the existing maps of features."""
    return stored(groups, "embedding-map.json", _feature_map, missing)


def _feature_map(group: SeedGroup, run: RunRecord, facts: dict[str, Any]) -> FeatureMap:
    numbers = facts["numbers"]
    x, y = _scaled(numbers["x"]), [1000 - value for value in _scaled(numbers["y"])]
    labels = [int(label) for label in numbers["label"]]
    names = [checked_text(name) for name in numbers["classes"]]
    if not len(x) == len(y) == len(labels):
        raise ValueError("the numbers of places and labels differ")
    classes = sorted({label for label in labels if 0 <= label < len(names)})
    colours = {label: order % CLASS_COLOURS for order, label in enumerate(classes)}
    of_point = [colours.get(label, CLASS_COLOURS) for label in labels]
    images = {
        int(each["point"]): (
            image_source(each["image"]),
            checked_text(each.get("name", "")),
            file_link(each.get("file")),
        )
        for each in numbers["thumbnails"]
    }
    placed = _placed(images, x, y, of_point)
    on_map = {each.point for each in placed}
    legend = [(names[label], colour) for label, colour in colours.items()]
    return FeatureMap(
        run.name,
        run.label,
        group.number,
        checked_text(facts["caption"]),
        len(x),
        _dots(x, y, of_point),
        placed,
        legend if len(legend) <= MOST_CLASSES else [],
        {
            "x": x,
            "y": y,
            "label": labels,
            "classes": names,
            "images": {n: each[0] for n, each in images.items() if n not in on_map},
            "names": {n: each[1] for n, each in images.items()},
            "links": {n: each[2] for n, each in images.items() if each[2]},
        },
    )


def _dots(x: Sequence[int], y: Sequence[int], colours: Sequence[int]) -> list[Dots]:
    paths: dict[int, list[str]] = {}
    for across, down, colour in zip(x, y, colours, strict=True):
        paths.setdefault(colour, []).append(f"M{across} {down}h0")
    return [Dots("".join(path), colour) for colour, path in sorted(paths.items())]


def _placed(
    images: dict[int, tuple[str, str, str]], x: list[int], y: list[int], colours: list[int]
) -> list[PlacedImage]:
    """Return thumbnails that do not overlap, in the order of the file, which is random."""
    taken: list[PlacedImage] = []
    for point, (source, name, link) in images.items():
        left, top = (min(max(value[point] - PICTURE // 2, 4), 996 - PICTURE) for value in (x, y))
        gap = PICTURE + 6
        free = all(abs(left - each.x) >= gap or abs(top - each.y) >= gap for each in taken)
        if source and free:
            small = is_small(source)
            taken.append(PlacedImage(point, left, top, source, name, link, colours[point], small))
        if len(taken) == MOST_PICTURES:
            break
    return taken


def _scaled(values: Sequence[Any]) -> list[int]:
    """Return values scaled to 25 to 975, as in the picture's view box."""
    numbers = [place for value in values if (place := number(value)) is not None]
    if len(numbers) != len(values) or not numbers:
        raise ValueError("a place is NaN or infinite")
    low, high = min(numbers), max(numbers)
    return [round(25 + 950 * (value - low) / ((high - low) or 1)) for value in numbers]
