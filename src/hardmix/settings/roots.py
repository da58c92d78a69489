"""Absolute paths of images, so that a run can be evaluated from any folder."""

import os
import re
from contextlib import suppress
from pathlib import Path

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
"""The beginning of a URL or of a command ("pipe:")."""
_HUB = "hf:"


def absolute_root(root: str | None) -> str | None:
    """Return `data.root` as an absolute path: of a folder, a file, or a pattern of shards.

    URLs, commands, names on a hub, and patterns that begin with a choice are left unchanged.
    """
    if root is None or "::" in root:
        return root and "::".join(absolute_root(part) or part for part in root.split("::"))
    if root.startswith(_HUB):
        folder = os.path.expanduser(root.removeprefix(_HUB))
        return f"{_HUB}{_absolute(folder)}" if os.path.isdir(folder) else root
    if root.startswith(("{", "$")) or (_ADDRESS.match(root) and not os.path.exists(root)):
        return root
    return _absolute(os.path.expanduser(root))


def is_command(root: str) -> bool:
    """Return whether a stream of images may start a command: a pipe's, or curl for a URL.

    Braces and variables can hide the beginning of either, so every colon and dollar counts.
    """
    return any(sign in part for part in root.split("::") for sign in ":$")


def root_near(root: str | None, run: Path) -> str | None:
    """Return an older run's relative `data.root` as it exists from here or above the run."""
    whole = absolute_root(root)
    if root is None or whole is None or whole == root or _is_there(whole):
        return whole
    above = run.resolve().parents[:-1]  # not "/": "data" is unlikely to mean /data
    near = (str(folder / root) for folder in above)
    return next(filter(_is_there, near), root)


def _absolute(path: str) -> str:
    with suppress(OSError):  # the current folder may have been deleted
        return str(Path(path).absolute())
    return path


def _is_there(path: str) -> bool:
    """Return whether a path exists; for a pattern, whether the folder of its files does."""
    fixed, brace, _ = path.partition("{")
    return os.path.isdir(os.path.dirname(fixed)) if brace else os.path.exists(path)
