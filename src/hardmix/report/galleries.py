"""Pictures made of images: the gallery of hardest negatives, and the map of a run's features.

Both are read from RUN/figures and checked value by value. The size of each on the page is limited;
what does not fit is listed with its path.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hardmix.report.grouping import SeedGroup
from hardmix.report.run_figures import Kind, checked_text, first_seeds_first, read_or_say
from hardmix.report.svg import DATA_IMAGE
from hardmix.runs.reading import RunRecord, number
from hardmix.settings.saved import read_json

GALLERY_BYTES = 3_000_000
MAP_BYTES = 2_000_000
CLASS_COLOURS = 12
MOST_CLASSES = 24
"""Classes named below a map."""


@dataclass(frozen=True)
class Tile:
    """An image of the gallery; `false` means that it has the query's class."""

    source: str
    name: str
    similarity: str
    false: bool

    @property
    def alt(self) -> str:
        """Alternative text."""
        words = [self.name or "image without a label", self.similarity]
        return ", ".join(filter(None, [*words, "false negative" if self.false else ""]))


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
    def false(self) -> str:
        """How many parents are false, in words; empty if none."""
        count = sum(parent.false for parent in self.parents)
        if count == 0:
            return ""
        return ("false parent", "both parents false")[count - 1]


@dataclass(frozen=True)
class GalleryRow:
    """An image, its hardest negatives and its hardest synthetic points."""

    image: Tile
    negatives: list[Tile]
    points: list[Point]


@dataclass(frozen=True)
class Gallery:
    """A run's RUN/figures/gallery.json."""

    run: str
    label: str
    group: int
    caption: str
    queries: list[GalleryRow]


@dataclass(frozen=True)
class Dots:
    """The points of one class: an SVG path of zero-length strokes, which are round dots."""

    d: str
    colour: int


@dataclass(frozen=True)
class FeatureMap:
    """A run's RUN/figures/embedding-map.json, and `data` for page.js."""

    run: str
    label: str
    group: int
    caption: str
    count: int
    paths: list[Dots]
    classes: list[tuple[str, int]]
    data: dict[str, Any]


def galleries(groups: Sequence[SeedGroup], missing: list[str]) -> list[Gallery]:
    """Return the existing galleries, one of each group before a second of any."""
    return _some(groups, "gallery.json", GALLERY_BYTES, _gallery, missing)


def feature_maps(groups: Sequence[SeedGroup], missing: list[str]) -> list[FeatureMap]:
    """Return the existing maps of features."""
    return _some(groups, "embedding-map.json", MAP_BYTES, _feature_map, missing)


def _some(
    groups: Sequence[SeedGroup],
    name: str,
    room: int,
    build: Callable[[SeedGroup, RunRecord, dict[str, Any]], Kind],
    missing: list[str],
) -> list[Kind]:
    found, absent = [], []
    for group, run in first_seeds_first(groups):
        file = run.run.figures / name
        if not file.exists():
            absent.append(run.name)
            continue
        size = file.stat().st_size
        if size > room:
            missing.append(f"{run.name}: {file} was omitted to keep the page small.")
            continue
        built = read_or_say(lambda: build(group, run, read_json(file)), run, file, missing)  # noqa: B023
        if built is not None:
            room -= size
            found.append(built)
    if absent:
        what = name.removesuffix(".json").replace("-", " ")
        missing.append(f"No {what} of {', '.join(absent)}: run hardmix analyze RUN to create it.")
    return found


def _gallery(group: SeedGroup, run: RunRecord, facts: dict[str, Any]) -> Gallery:
    queries = [
        GalleryRow(
            _tile(query),
            [_tile(each) for each in query["hardest"]],
            [_point(each) for each in query["synthetic"]],
        )
        for query in facts["numbers"]["queries"]
    ]
    return Gallery(run.name, run.label, group.number, checked_text(facts["caption"]), queries)


def _tile(facts: dict[str, Any]) -> Tile:
    label = facts.get("label")
    similarity = number(facts.get("similarity"))
    return Tile(
        _image(facts["image"]),
        "" if label is None else checked_text(label),
        "" if similarity is None else f"{similarity:.3f}",
        facts.get("false") is True,
    )


def _point(facts: dict[str, Any]) -> Point:
    others = {"pair": "", "query": "query", "key": "key"}
    share, similarity = number(facts["share"]), number(facts["similarity"])
    return Point(
        "" if share is None else f"share {share:.2f}",
        "" if similarity is None else f"{similarity:.3f}",
        [_tile(each) for each in facts["parents"]],
        others[facts["kind"]],
    )


def _feature_map(group: SeedGroup, run: RunRecord, facts: dict[str, Any]) -> FeatureMap:
    numbers = facts["numbers"]
    x, y = _scaled(numbers["x"]), [1000 - value for value in _scaled(numbers["y"])]
    labels = [int(label) for label in numbers["label"]]
    names = [checked_text(name) for name in numbers["classes"]]
    if not len(x) == len(y) == len(labels):
        raise ValueError("the numbers of places and labels differ")
    known = sorted({label for label in labels if 0 <= label < len(names)})
    paths = []
    for order, label in enumerate(known):
        here = (f"M{x[n]} {y[n]}h0" for n, each in enumerate(labels) if each == label)
        paths.append(Dots("".join(here), order % CLASS_COLOURS))
    unknown = (f"M{x[n]} {y[n]}h0" for n, label in enumerate(labels) if label not in known)
    paths.append(Dots("".join(unknown), CLASS_COLOURS))
    images = {int(each["point"]): _image(each["image"]) for each in numbers["thumbnails"]}
    legend = [(names[label], order % CLASS_COLOURS) for order, label in enumerate(known)]
    return FeatureMap(
        run.name,
        run.label,
        group.number,
        checked_text(facts["caption"]),
        len(x),
        [path for path in paths if path.d],
        legend if len(legend) <= MOST_CLASSES else [],
        {"x": x, "y": y, "label": labels, "classes": names, "images": images},
    )


def _scaled(values: Sequence[Any]) -> list[int]:
    """Return values scaled to 25 to 975, as in the picture's view box."""
    known = [number(value) for value in values]
    checked = [value for value in known if value is not None]
    if len(checked) != len(known) or not checked:
        raise ValueError("a place is NaN or infinite")
    low, high = min(checked), max(checked)
    return [round(25 + 950 * (value - low) / ((high - low) or 1)) for value in checked]


def _image(source: Any) -> str:
    """Return a picture's data URI; empty if it could not be read when the figure was made."""
    if source == "" or (isinstance(source, str) and DATA_IMAGE.fullmatch(source)):
        return str(source)
    raise ValueError("an image is not a data URI")
