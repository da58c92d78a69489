"""Text files that name images: path, and after tabs if known the class and the split.

    photos/a.jpg
    photos/b.jpg	cat
    photos/c.jpg	dog	test

Paths are relative to the file's folder. A split is train (also where none is given), test, or one
of the other names for test images that folders may have.
"""

import os
from pathlib import Path
from typing import NamedTuple

from hardmix.data.folders import TEST_FOLDERS, Listing, with_frames
from hardmix.data.image_files import printable
from hardmix.errors import InputError


class Line(NamedTuple):
    """An image of a list."""

    path: str
    label: str | None
    split: str


def list_paths(file: Path, split: str | None, frames_per_second: float = 1.0) -> Listing:
    """The images of a split, "train" or "test", or if None of all; frames of videos among them."""
    lines = read_list(file)
    wanted = split if split != "test" else name_of_tests(lines)
    files: list[str] = []
    classes: list[str | None] = []
    for line in lines:
        if wanted is None or line.split == wanted:
            names = with_frames([line.path], frames_per_second)
            files += names
            classes += [line.label] * len(names)
    return Listing(files, classes)


def name_of_tests(lines: list[Line]) -> str | None:
    """What the test images are called; None where there are none. Test goes before validation."""
    found = {line.split for line in lines}
    return next((name for name in TEST_FOLDERS if name in found), None)


def read_list(file: Path) -> list[Line]:
    """Every line, checked."""
    try:
        # surrogateescape: a path may hold bytes that are no UTF-8.
        text = file.read_text(encoding="utf-8-sig", errors="surrogateescape")
    except OSError as error:
        raise InputError(f"data.root={printable(file)}: {error.strerror}.") from error
    folder = file.absolute().parent
    lines = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        path, label, split, *more = (*line.rstrip("\r").split("\t"), "", "")[:4]
        split = split.strip().lower() or "train"
        if more[0:1] not in ([], [""]) or split not in ("train", *TEST_FOLDERS):
            raise InputError(
                f"data.root={printable(file)}, line {number}: {printable(line.strip())!r} is not a"
                " path, a class and a split (train or test) with tabs between them."
            )
        lines.append(Line(os.path.join(folder, path), label.strip() or None, split))
    if not lines:
        raise InputError(
            f"data.root={printable(file)} names no images: write one path on each line,"
            " optionally followed by a tab and its class, and another tab and its split."
        )
    return lines
