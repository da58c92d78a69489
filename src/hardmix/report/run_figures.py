"""Figures: those that compare runs are drawn here, those of one run are read from its folder.

Each is an SVG in an <img>: a browser runs no script in it and fetches nothing for it, whatever the
file contains. The size of the page is limited; figures that do not fit are listed with their paths.
"""

import base64
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hardmix.report.grouping import SeedGroup
from hardmix.report.sentences import NOT_SHOWN, OMITTED
from hardmix.runs.reading import RunRecord
from hardmix.runtime.files import read_file, read_json

Kind = TypeVar("Kind")

FIGURE_BYTES, MOST_BYTES = 2_500_000, 2_000_000
"""Most bytes of all figures of single runs, and of one figure."""
NUMBER_BYTES = 60_000
"""Most numbers shown with a figure; longer lists are only in its JSON file."""
WIDE = 560
"""A figure wider than this, in points, gets the page's whole width."""


@dataclass(frozen=True)
class Figure:
    """A figure on the page."""

    title: str
    caption: str
    source: str
    """The SVG as a data URI."""
    numbers: str
    wide: bool


@dataclass(frozen=True)
class Part:
    """Figures under a heading: those of all runs, or of one."""

    heading: str
    figures: list[Figure]


def comparison(runs: Sequence[RunRecord], missing: list[str]) -> tuple[list[Part], set[str]]:
    """Draw the paper's figures of all runs; returns them and their names."""
    # Imported here: it takes seconds, and a page that is refreshed draws nothing.
    from hardmix.analysis.analyze import compare
    from hardmix.analysis.picture import svg

    try:
        pictures, sentences = compare(runs)
    except Exception as error:  # a faulty run must not prevent the page
        pictures, sentences = [], [f"The figures of all runs cannot be drawn: {error!r}."]
    missing.extend(sentence for sentence in sentences if sentence not in missing)
    figures = []
    for picture in pictures:
        try:
            content = svg(picture).encode()
            figures.append(figure_of(content, picture.title, picture.caption, picture.numbers))
        except ValueError as error:
            missing.append(f"{picture.title}: the figure cannot be shown: {error}.")
    return [Part("", figures)] if figures else [], {picture.name for picture in pictures}


def of_each_run(groups: Sequence[SeedGroup], shown: set[str], missing: list[str]) -> list[Part]:
    """Read the figures that `hardmix analyze` wrote, without those in `shown`."""
    parts, room = [], FIGURE_BYTES
    for _, run in first_seeds_first(groups):
        figures = []
        for file in sorted(run.run.figures.glob("*.svg")):
            if file.stem in shown:
                continue
            figure = read_or_explain(lambda: _stored_figure(file), run, file, missing)  # noqa: B023
            if figure is not None and len(figure.source) > room:
                missing.append(OMITTED.format(run=run.name, file=file))
            elif figure is not None:
                room -= len(figure.source)
                figures.append(figure)
        if figures:
            parts.append(Part(f"{run.name}, {run.label}", figures))
    return parts


def figure_of(content: bytes, title: str, caption: str, numbers: Any) -> Figure:
    """Return a figure; raises ValueError if the content is not an SVG."""
    if len(content) > MOST_BYTES:
        raise ValueError(f"it is larger than {MOST_BYTES // 1_000_000} MB")
    if b"<!ENTITY" in content:
        raise ValueError("it declares entities")
    try:
        root = ET.fromstring(content)
    except ET.ParseError as error:
        raise ValueError("it is not valid XML") from error
    if root.tag not in ("svg", "{http://www.w3.org/2000/svg}svg"):
        raise ValueError("it is not an SVG picture")
    source = f"data:image/svg+xml;base64,{base64.b64encode(content).decode()}"
    text = json.dumps(numbers)
    wide = _width(root) > WIDE
    return Figure(title, caption, source, text if len(text) <= NUMBER_BYTES else "", wide)


def first_seeds_first(groups: Sequence[SeedGroup]) -> Iterator[tuple[SeedGroup, RunRecord]]:
    """Yield the first run of every group, then the second ones, and so on."""
    for turn in range(max((len(group.runs) for group in groups), default=0)):
        for group in groups:
            if turn < len(group.runs):
                yield group, group.runs[turn]


def read_or_explain(
    read: Callable[[], Kind], run: RunRecord, file: Path, missing: list[str]
) -> Kind | None:
    """Read a file in RUN/figures, which may be damaged or foreign; if so, add a sentence."""
    try:
        return read()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        damaged = "it is damaged or not from hardmix"
        reason = error.strerror if isinstance(error, OSError) else damaged
        missing.append(NOT_SHOWN.format(run=run.name, file=file.name, reason=reason))
        return None


def checked_text(value: Any) -> str:
    """Return a value that must be text."""
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value


def _stored_figure(file: Path) -> Figure:
    facts = read_json(file.with_suffix(".json"))
    title, caption = checked_text(facts["title"]), checked_text(facts["caption"])
    return figure_of(read_file(file, FIGURE_BYTES), title, caption, facts["numbers"])


def _width(root: ET.Element) -> float:
    """Return the picture's width, from its viewBox; 0 if it has none."""
    box = re.fullmatch(r"\S+[ ,]+\S+[ ,]+([\d.]+)[ ,]+\S+", root.get("viewBox", "").strip())
    return float(box[1]) if box else 0.0
