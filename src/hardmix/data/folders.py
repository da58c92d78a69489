"""Which files are images, and of which class: by folders, or by a text file of paths.

Nothing is decoded here. A listing is sorted, so that a folder gives the same one on every machine.
"""

import os
import re
from collections import deque
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from hardmix.data.image_files import IMAGE_SUFFIXES, printable
from hardmix.data.imagenet100 import SYNSETS
from hardmix.errors import InputError
from hardmix.settings.config import DataName

TEST_FOLDERS = ("test", "val", "valid", "validation")
"""Names of the folder of test images beside `train`; the first that exists is taken."""


class Listing(NamedTuple):
    """Paths of images, and the class of each; None where it is unknown."""

    files: list[str]
    classes: list[str | None]


def list_folder(root: Path, only: Collection[str] | None = None) -> Listing:
    """All images under a folder; `only` names the direct subfolders to be looked into.

    The class is the direct subfolder of `root` that an image lies in, at any depth below. Where an
    image lies in `root` itself, or all of them in one subfolder, nothing is known about classes.
    """
    direct = subfolders(root)
    looked_into = direct if only is None else [name for name in direct if name in only]
    files = find_images([root] if only is None else [root / name for name in looked_into])
    if not files:
        raise InputError(f"data.root={printable(root)} {_emptiness(root)}.")
    start = len(os.path.join(root, ""))
    parts = [file[start:].split(os.sep, 1) for file in files]
    classes = {part[0] for part in parts}
    if len(classes) < 2 or min(map(len, parts)) == 1:
        return Listing(files, [None] * len(files))
    empty = [printable(name) for name in looked_into if name not in classes]
    if empty:
        raise InputError(
            f"data.root={printable(root)}: {len(empty)} of {len(looked_into)} class folders hold no"
            f" image of their own ({', '.join(empty[:3])}): fill or remove them."
        )
    return Listing(files, [part[0] for part in parts])


def list_paths(file: Path) -> Listing:
    """A text file with a path on each line, relative to its folder, and after a tab its class."""
    try:
        # surrogateescape: a path may hold bytes that are no UTF-8.
        text = file.read_text(encoding="utf-8-sig", errors="surrogateescape")
    except OSError as error:
        raise InputError(f"data.root={printable(file)}: {error.strerror}.") from error
    lines = [line.split("\t", 1) for line in text.split("\n") if line.strip()]
    if not lines:
        raise InputError(
            f"data.root={printable(file)} names no image: write one path on each line, and if you"
            " like a tab and its class."
        )
    files = [os.path.join(file.absolute().parent, line[0].rstrip("\r")) for line in lines]
    classes = [line[1].strip() or None if len(line) == 2 else None for line in lines]
    return Listing(files, classes)


def find_images(folders: Iterable[Path]) -> list[str]:
    """Sorted paths of all files below that end as images do; hidden ones are left out.

    Links are followed, yet every folder is entered once, however many links lead to it: a link to
    a folder above would list its images without end. Of several ways the shortest counts.
    """
    found = []
    waiting = deque(os.fspath(folder) for folder in folders)
    seen = {os.path.realpath(folder) for folder in waiting}
    while waiting:
        for entry in _entries(waiting.popleft()):
            if _is_folder(entry):
                real = os.path.realpath(entry.path)
                if real not in seen:
                    seen.add(real)
                    waiting.append(entry.path)
            elif Path(entry.name).suffix.lower() in IMAGE_SUFFIXES and _is_file(entry):
                found.append(entry.path)
    return sorted(found)


def subfolders(root: Path) -> list[str]:
    """Sorted names of the visible folders, and links to folders, directly in `root`."""
    if not root.is_dir():
        what = "is not a folder" if os.path.lexists(root) else "does not exist"
        raise InputError(f"data.root={printable(root)} {what}: name a folder of images.")
    return sorted(entry.name for entry in _entries(os.fspath(root)) if _is_folder(entry))


def recognise(root: Path) -> DataName:
    """Which data set a folder or file is, by the names in it."""
    if root.is_file():
        return "list"
    for mark, name in _MARKS.items():
        if (root / mark).is_dir() or root.name == mark:
            return name
    classes = subfolders(root / "train") if (root / "train").is_dir() else []
    if not classes or not all(re.fullmatch(r"n\d{8}", synset) for synset in classes):
        return "folder"
    return "imagenet100" if set(classes) == set(SYNSETS) else "imagenet"


_MARKS: dict[str, DataName] = {
    "cifar-10-batches-py": "cifar10",
    "cifar-100-python": "cifar100",
    "stl10_binary": "stl10",
}


def split_folder(root: Path, split: str) -> Path | None:
    """Where a folder of images keeps a split; None where it has no such split.

    A folder is divided if `train` stands beside a test folder, or alone; among other folders
    "train" may be the class of railways. One that is not divided is all training images.
    """
    names = subfolders(root)
    tests = [name for name in TEST_FOLDERS if name in names]
    divided = "train" in names and (bool(tests) or names == ["train"])
    if split == "train":
        return root / "train" if divided else root
    return root / tests[0] if divided and tests else None


def _emptiness(root: Path) -> str:
    if not any(os.scandir(root)):
        return "is an empty folder: name a folder of images"
    return f"holds no image: none of its files ends in {', '.join(sorted(IMAGE_SUFFIXES))}"


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise InputError(
            f"data.root: the folder {printable(folder)} cannot be read ({error.strerror}): change"
            " its permissions or take it away."
        ) from error


def _is_folder(entry: os.DirEntry[str]) -> bool:
    # The second way asks the disk, and never raises: a link may lead in a circle.
    return entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and os.path.isdir(entry.path))


def _is_file(entry: os.DirEntry[str]) -> bool:
    # A link that leads nowhere counts, to be reported as unreadable; a pipe would wait for ever.
    return entry.is_symlink() or entry.is_file()
