"""The objects in the lines of a log; what is none is skipped."""

import json
from functools import partial
from typing import Any


def logged_objects(text: str) -> list[dict[str, Any]]:
    """Return a log's objects; lines that are not objects with a step are skipped."""
    lines = []
    names: dict[str, str] = {}  # every line has the same ones: they take memory once
    for each in text.splitlines():
        try:
            line = json.loads(each, object_pairs_hook=partial(_sharing, names))
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines


def _sharing(names: dict[str, str], pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {names.setdefault(name, name): value for name, value in pairs}
