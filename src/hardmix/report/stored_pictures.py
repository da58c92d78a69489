"""Pictures made of images, read from RUN/figures and checked value by value.

The size of each kind on the page is limited; what does not fit is listed with its path.
"""

import base64
import binascii
import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from hardmix.report.grouping import SeedGroup
from hardmix.report.run_figures import Kind, checked_text, first_seeds_first, read_or_say
from hardmix.report.svg import DATA_IMAGE
from hardmix.runs.reading import RunRecord, number
from hardmix.settings.saved import read_json

WORDS = {"neighbours.json": "neighbours", "embedding-map.json": "map", "gallery.json": "gallery"}
"""Files with pictures, in the words of `looking.py`."""
SMALL = 96
"""Images with fewer pixels than this are enlarged without blur."""


@dataclass(frozen=True)
class Tile:
    """An image with what is known of it; unknown texts are empty."""

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


def some_of(
    groups: Sequence[SeedGroup],
    name: str,
    room: int,
    build: Callable[[SeedGroup, RunRecord, dict[str, Any]], Kind],
    missing: list[str],
) -> list[Kind]:
    """Return what RUN/figures/NAME contains, one of each group before a second of any."""
    found, absent = [], []
    for group, run in first_seeds_first(groups):
        file = run.run.figures / name
        if not file.exists():
            absent += [run.name] if not _is_said(name, run, missing) else []
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
        missing.append(f"No {WORDS[name]} of {', '.join(absent)}: hardmix report RUN creates it.")
    return found


def _is_said(name: str, run: RunRecord, missing: list[str]) -> bool:
    """Return whether the reason why a run has no such picture is already given."""
    start = f"No {WORDS[name]} of {run.run.path}:"
    return any(sentence.startswith(start) for sentence in missing)


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
