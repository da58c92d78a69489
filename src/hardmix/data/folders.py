"""Which files of a folder are images, and of which class; which are not is said, never silent.

Nothing is decoded here. A listing is sorted, so that a folder gives the same one on every machine.
"""

import os
import re
from collections import Counter, deque
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from hardmix.data.image_files import IMAGE_SUFFIXES, missing_reader, printable
from hardmix.data.imagenet100 import SYNSETS
from hardmix.data.video_frames import VIDEO_SUFFIXES, frame_names
from hardmix.errors import InputError
from hardmix.runtime.console import say, warn
from hardmix.settings.named_choices import DataName

TEST_FOLDERS = ("test", "val", "valid", "validation")
"""Names of the folder of test images beside `train`; the first that exists is taken."""


READ = IMAGE_SUFFIXES | VIDEO_SUFFIXES
"""Endings of files that are read, where what they need is installed."""
SHOWN = 5
"""Kinds of ignored files that have a line each."""


class Listing(NamedTuple):
    """Paths of images, and the class of each; None where it is unknown."""

    files: list[str]
    classes: list[str | None]


def list_folder(
    root: Path, only: Collection[str] | None = None, frames_per_second: float = 1.0
) -> Listing:
    """All images under a folder; `only` names the direct subfolders to be looked into.

    The class is the direct subfolder of `root` that an image lies in, at any depth below. Where an
    image lies in `root` itself, or all of them in one subfolder, nothing is known about classes.
    Of a video, as many frames as said are images.
    """
    direct = subfolders(root)
    looked_into = direct if only is None else [name for name in direct if name in only]
    found = find_images([root] if only is None else [root / name for name in looked_into])
    if not found.files:
        raise InputError(f"data.root={printable(root)} {_emptiness(root, found.ignored)}.")
    tell_ignored(root, found.ignored)
    files = with_frames(found.files, frames_per_second)
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


class FolderContents(NamedTuple):
    """The contents of a folder."""

    files: list[str]
    """Sorted paths of images and videos."""
    ignored: Counter[str]
    """Number of other files by extension."""


def find_images(folders: Iterable[Path]) -> FolderContents:
    """Find all images and videos below a folder by extension, except hidden ones.

    Links are followed, yet every folder is entered once, however many links lead to it: a link to
    a folder above would list its images without end. Of several ways the shortest counts.
    """
    found, ignored = [], Counter[str]()
    waiting = deque(os.fspath(folder) for folder in folders)
    seen = {os.path.realpath(folder) for folder in waiting}
    while waiting:
        for entry in _entries(waiting.popleft()):
            if _is_folder(entry):
                real = os.path.realpath(entry.path)
                if real not in seen:
                    seen.add(real)
                    waiting.append(entry.path)
            elif _is_file(entry):
                suffix = os.path.splitext(entry.name)[1].lower()
                if suffix in READ and not missing_reader(suffix):
                    found.append(entry.path)
                else:
                    ignored[suffix] += 1
    return FolderContents(sorted(found), ignored)


def with_frames(files: Iterable[str], frames_per_second: float) -> list[str]:
    """Return the same paths, each video replaced by the names of its frames."""
    names: list[str] = []
    for file in files:
        video = os.path.splitext(file)[1].lower() in VIDEO_SUFFIXES
        names += frame_names(file, frames_per_second) if video else [file]
    return names


def tell_ignored(root: Path, ignored: Counter[str]) -> None:
    """Report once which files are ignored and, if a reader is missing, how to install it."""
    if root in _told or not ignored:
        return
    _told.add(root)
    missing = [suffix for suffix in sorted(ignored) if missing_reader(suffix)]
    others = [suffix for suffix, _ in ignored.most_common() if suffix not in missing]
    for suffix in missing:
        warn(f"ignored: {_count(ignored[suffix], suffix)} ({missing_reader(suffix)})")
    for suffix in others[:SHOWN]:
        say(f"ignored: {_count(ignored[suffix], suffix)}")
    if others[SHOWN:]:
        rest = sum(ignored[suffix] for suffix in others[SHOWN:])
        say(f"ignored: {rest} files of {len(others[SHOWN:])} other kinds")


_told: set[Path] = set()
"""Folders whose ignored files have already been reported."""


def _count(number: int, suffix: str) -> str:
    name = printable(suffix) or "extensionless"
    return f"{number} {name} file{'s' * (number > 1)}"


def subfolders(root: Path) -> list[str]:
    """Sorted names of the visible folders, and links to folders, directly in `root`."""
    if not root.is_dir():
        what = "is not a folder" if os.path.lexists(root) else "does not exist"
        raise InputError(f"data.root={printable(root)} {what}: name a folder of images.")
    return sorted(entry.name for entry in _entries(os.fspath(root)) if _is_folder(entry))


def recognise(root: Path) -> DataName:
    """Return which data set a folder or file is, judged by the names in it."""
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
    """Return the folder of a split, or None if there is no such split.

    A folder is divided if `train` stands beside a test folder, or alone; among other folders
    "train" may be the class of railways. One that is not divided is all training images.
    """
    names = subfolders(root)
    tests = [name for name in TEST_FOLDERS if name in names]
    divided = "train" in names and (bool(tests) or names == ["train"])
    if split == "train":
        return root / "train" if divided else root
    return root / tests[0] if divided and tests else None


def _emptiness(root: Path, ignored: Counter[str]) -> str:
    if not any(os.scandir(root)):
        return "is an empty folder: name a folder of images"
    for suffix, number in ignored.items():
        if missing_reader(suffix):
            return f"holds {_count(number, suffix)}: {missing_reader(suffix)} to read them"
    return f"contains no images: none of its files ends in {', '.join(sorted(READ))}"


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise InputError(
            f"data.root: the folder {printable(folder)} cannot be read ({error.strerror}): change"
            " its permissions or remove it."
        ) from error


def _is_folder(entry: os.DirEntry[str]) -> bool:
    # The second way asks the disk, and never raises: a link may lead in a circle.
    return entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and os.path.isdir(entry.path))


def _is_file(entry: os.DirEntry[str]) -> bool:
    # A link that leads nowhere counts, to be reported as unreadable; a pipe would wait for ever.
    return entry.is_symlink() or entry.is_file()
