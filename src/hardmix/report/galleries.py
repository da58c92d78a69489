"""The gallery of hardest negatives: a run's RUN/figures/gallery.json."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hardmix.report.grouping import SeedGroup
from hardmix.report.run_figures import checked_text
from hardmix.report.stored_pictures import Tile, read_tile, some_of
from hardmix.runs.reading import RunRecord, number

GALLERY_BYTES = 2_500_000


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
    """An image, its hardest negatives and its hardest synthetic points."""

    image: Tile
    negatives: list[Tile]
    points: list[Point]


@dataclass(frozen=True)
class Gallery:
    """Sample images of a run with their hardest negatives."""

    run: str
    label: str
    group: int
    caption: str
    queries: list[GalleryRow]


def galleries(groups: Sequence[SeedGroup], missing: list[str]) -> list[Gallery]:
    """Return the existing galleries, one of each group before a second of any."""
    return some_of(groups, "gallery.json", GALLERY_BYTES, _gallery, missing)


def _gallery(group: SeedGroup, run: RunRecord, facts: dict[str, Any]) -> Gallery:
    queries = [
        GalleryRow(
            read_tile(query),
            [read_tile(each) for each in query["hardest"]],
            [_point(each) for each in query["synthetic"]],
        )
        for query in facts["numbers"]["queries"]
    ]
    return Gallery(run.name, run.label, group.number, checked_text(facts["caption"]), queries)


def _point(facts: dict[str, Any]) -> Point:
    others = {"pair": "", "query": "query", "key": "key"}
    share, similarity = number(facts["share"]), number(facts["similarity"])
    return Point(
        "" if share is None else f"share {share:.2f}",
        "" if similarity is None else f"{similarity:.3f}",
        [read_tile(each) for each in facts["parents"]],
        others[facts["kind"]],
    )
