"""The gallery of feature neighbours: a run's RUN/figures/neighbours.json."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hardmix.report.grouping import SeedGroup
from hardmix.report.run_figures import checked_text
from hardmix.report.stored_pictures import Tile, read_tile, some_of
from hardmix.runs.reading import RunRecord

FILE = "neighbours.json"
"""As explore/feature_gallery.py calls it, from where it would bring torchvision along."""
NEIGHBOUR_BYTES = 2_500_000


@dataclass(frozen=True)
class SimilarImages:
    """An image and those with the most similar features."""

    image: Tile
    near: list[Tile]


@dataclass(frozen=True)
class FeatureGallery:
    """Sample images of a run with their neighbours."""

    run: str
    label: str
    group: int
    caption: str
    rows: list[SimilarImages]


def feature_galleries(groups: Sequence[SeedGroup], missing: list[str]) -> list[FeatureGallery]:
    """Return the existing galleries of feature neighbours."""
    return some_of(groups, FILE, NEIGHBOUR_BYTES, _gallery, missing)


def _gallery(group: SeedGroup, run: RunRecord, facts: dict[str, Any]) -> FeatureGallery:
    rows = [
        SimilarImages(read_tile(query), [read_tile(each) for each in query["near"]])
        for query in facts["numbers"]["queries"]
    ]
    return FeatureGallery(run.name, run.label, group.number, checked_text(facts["caption"]), rows)
