"""The map of a run's features, with thumbnails on it: RUN/figures/embedding-map.json."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hardmix.report.grouping import SeedGroup
from hardmix.report.run_figures import checked_text
from hardmix.report.stored_pictures import file_link, image_source, is_small, some_of
from hardmix.runs.reading import RunRecord, number

MAP_BYTES = 2_500_000
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
    return some_of(groups, "embedding-map.json", MAP_BYTES, _feature_map, missing)


def _feature_map(group: SeedGroup, run: RunRecord, facts: dict[str, Any]) -> FeatureMap:
    numbers = facts["numbers"]
    x, y = _scaled(numbers["x"]), [1000 - value for value in _scaled(numbers["y"])]
    labels = [int(label) for label in numbers["label"]]
    names = [checked_text(name) for name in numbers["classes"]]
    if not len(x) == len(y) == len(labels):
        raise ValueError("the numbers of places and labels differ")
    known = sorted({label for label in labels if 0 <= label < len(names)})
    colours = {label: order % CLASS_COLOURS for order, label in enumerate(known)}
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
    known = [number(value) for value in values]
    checked = [value for value in known if value is not None]
    if len(checked) != len(known) or not checked:
        raise ValueError("a place is NaN or infinite")
    low, high = min(checked), max(checked)
    return [round(25 + 950 * (value - low) / ((high - low) or 1)) for value in checked]
