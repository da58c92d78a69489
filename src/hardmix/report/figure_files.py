"""Files in RUN/figures, which may come from anybody and may be broken or absent."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hardmix.report.grouping import Group
from hardmix.report.reading import RunFacts

Kind = TypeVar("Kind")


def first_seeds_first(groups: Sequence[Group]) -> Iterator[tuple[Group, RunFacts]]:
    """One run of every group, then the second ones, ..."""
    for turn in range(max((len(group.runs) for group in groups), default=0)):
        for group in groups:
            if turn < len(group.runs):
                yield group, group.runs[turn]


def read_or_say(
    read: Callable[[], Kind], run: RunFacts, file: Path, missing: list[str]
) -> Kind | None:
    """What a file holds, or a sentence."""
    try:
        return read()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not whole or not ours"
        missing.append(f"{run.name}: figures/{file.name} cannot be shown: {why}.")
        return None


def checked_text(value: Any) -> str:
    """Text, and nothing else."""
    if not isinstance(value, str):
        raise TypeError("text is needed")
    return value
