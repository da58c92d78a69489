"""Where images are, said so that it holds in whichever folder a later command is started."""

import os
import re
from contextlib import suppress
from pathlib import Path

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
"""How a URL or a command ("pipe:") begins."""
_HUB = "hf:"


def absolute_root(root: str | None) -> str | None:
    """`data.root` from the top of the file system: a folder, a file, or a pattern of shards.

    URLs, commands and names on a hub stay as they are, and so do patterns that begin with a choice.
    """
    if root is None or "::" in root:
        return root and "::".join(absolute_root(part) or part for part in root.split("::"))
    if root.startswith(_HUB):
        folder = os.path.expanduser(root.removeprefix(_HUB))
        return f"{_HUB}{_absolute(folder)}" if os.path.isdir(folder) else root
    if root.startswith(("{", "$")) or (_ADDRESS.match(root) and not os.path.exists(root)):
        return root
    return _absolute(os.path.expanduser(root))


def root_near(root: str | None, run: Path) -> str | None:
    """A relative `data.root` of an older run: from here, or from a folder above the run."""
    whole = absolute_root(root)
    if root is None or whole is None or whole == root or _is_there(whole):
        return whole
    above = run.resolve().parents[:-1]  # not "/": /data is hardly what "data" meant
    near = (str(folder / root) for folder in above)
    return next(filter(_is_there, near), root)


def _absolute(path: str) -> str:
    with suppress(OSError):  # the folder we are in may be gone
        return str(Path(path).absolute())
    return path


def _is_there(path: str) -> bool:
    """Of a pattern, whether the folder of its files is."""
    fixed, brace, _ = path.partition("{")
    return os.path.isdir(os.path.dirname(fixed)) if brace else os.path.exists(path)
