"""Figures: those that compare runs are drawn here, those of one run are read from its folder.

Every SVG is rewritten from a list of allowed elements. The size of the page is limited; what does
not fit is listed with its path.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from markupsafe import Markup

from hardmix.report.grouping import SeedGroup
from hardmix.report.svg import natural_width, safe_svg
from hardmix.runs.reading import RunRecord
from hardmix.settings.bounded_files import read_file
from hardmix.settings.saved import read_json

Kind = TypeVar("Kind")

FIGURE_BYTES = 2_500_000
NUMBER_BYTES = 60_000
"""Most numbers shown with a figure; longer lists are only in its JSON file."""
WIDE = 560
"""A figure wider than this, in points, gets the page's whole width."""


@dataclass(frozen=True)
class Figure:
    """A figure on the page."""

    title: str
    caption: str
    svg: Markup
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
    from hardmix.analysis.figures.picture import svg

    try:
        found, sentences = compare(runs)
    except Exception as error:  # a faulty run must not prevent the page
        found, sentences = [], [f"The figures of all runs cannot be drawn: {error!r}."]
    missing.extend(sentence for sentence in sentences if sentence not in missing)
    figures = []
    for index, picture in enumerate(found):
        try:
            markup = safe_svg(svg(picture).encode(), f"all{index}-", picture.title)
        except ValueError as error:
            missing.append(f"{picture.title}: the figure cannot be shown: {error}.")
            continue
        figures.append(_figure(markup, picture.title, picture.caption, picture.numbers))
    return [Part("", figures)] if figures else [], {picture.name for picture in found}


def of_each_run(groups: Sequence[SeedGroup], shown: set[str], missing: list[str]) -> list[Part]:
    """Read the figures that `hardmix analyze` wrote, without those in `shown`."""
    parts, room = [], FIGURE_BYTES
    for prefix, (_, run) in enumerate(first_seeds_first(groups)):
        figures = []
        for file in sorted(run.run.figures.glob("*.svg")):
            if file.stem in shown:
                continue
            found = read_or_say(lambda: _stored_figure(file, f"run{prefix}-"), run, file, missing)  # noqa: B023
            if found is not None and len(found.svg) > room:
                missing.append(f"{run.name}: {file} was omitted to keep the page small.")
            elif found is not None:
                room -= len(found.svg)
                figures.append(found)
        if figures:
            parts.append(Part(f"{run.name}, {run.label}", figures))
    return parts


def first_seeds_first(groups: Sequence[SeedGroup]) -> Iterator[tuple[SeedGroup, RunRecord]]:
    """Yield the first run of every group, then the second ones, and so on."""
    for turn in range(max((len(group.runs) for group in groups), default=0)):
        for group in groups:
            if turn < len(group.runs):
                yield group, group.runs[turn]


def read_or_say(
    read: Callable[[], Kind], run: RunRecord, file: Path, missing: list[str]
) -> Kind | None:
    """Read a file in RUN/figures, which may be damaged or foreign; else add a sentence."""
    try:
        return read()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is damaged or not from hardmix"
        missing.append(f"{run.name}: figures/{file.name} cannot be shown: {why}.")
        return None


def checked_text(value: Any) -> str:
    """Return a value that must be text."""
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value


def _stored_figure(file: Path, prefix: str) -> Figure:
    facts = read_json(file.with_suffix(".json"))
    title = checked_text(facts["title"])
    markup = safe_svg(read_file(file, FIGURE_BYTES), f"{prefix}{file.stem}-", title)
    return _figure(markup, title, checked_text(facts["caption"]), facts["numbers"])


def _figure(markup: str, title: str, caption: str, numbers: Any) -> Figure:
    text = json.dumps(numbers)
    wide = natural_width(markup) > WIDE
    # Safe as markup: safe_svg wrote every part of it from its lists, escaped.
    return Figure(title, caption, Markup(markup), text if len(text) <= NUMBER_BYTES else "", wide)
