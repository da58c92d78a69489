"""The settings of runs, where they differ, and how to reproduce them."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hardmix.runs.reading import RunRecord

NOT_RECORDED = "not recorded"


@dataclass(frozen=True)
class Command:
    """A shell command, and what it does."""

    about: str
    line: str


def shown(value: Any) -> str:
    """Return a setting's value as text."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)


def differences(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Return the settings in which the runs differ, with every run's value."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    rows = []
    for name in names:
        values = [run.settings.get(name, NOT_RECORDED) for run in runs]
        if any(value != values[0] for value in values):
            texts = [v if v is NOT_RECORDED else shown(v) for v in values]
            rows.append((name, [str(text) for text in texts]))
    return rows


def versions_of(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Return every set of versions that results were written with, and its runs."""
    found: dict[str, list[str]] = {}
    for run in runs:
        for result in run.results.values():
            versions = result.get("versions")
            if isinstance(versions, dict):
                text = ", ".join(f"{name} {value}" for name, value in versions.items())
                names = found.setdefault(text, [])
                if run.name not in names:
                    names.append(run.name)
    return list(found.items())


def commands_of(run: RunRecord) -> list[Command]:
    """Return the commands that reproduce a run and its evaluations, in order."""
    commands = []
    if run.settings:
        again = f"{run.run.path}-again"
        words = ["hardmix", "pretrain", "--config", str(run.run.config_file), "--out", again]
        commands.append(Command("Train it again", shlex.join(words)))
    ordered = sorted(run.results.items(), key=lambda item: str(item[1].get("written", "")))
    for name, result in ordered:
        line = result.get("command")
        if isinstance(line, str) and line.strip():
            about = "Original command" if name == "pretrain" else f"results/{name}.json"
            commands.append(Command(about, line))
    return commands
