"""Sets of image files: folders, lists of paths, and ImageNet in torchvision's layout.

Nothing is decoded here. Listings are sorted, so that a folder gives the same one on every machine,
and files that are ignored are reported.

A list is a text file with one path per line, followed after tabs by the class and the split if they
are known:

    photos/a.jpg
    photos/b.jpg	cat
    photos/c.jpg	dog	test

Its paths are relative to its own folder. The split is train (the default), test, or another of the
names for test images in `TEST_FOLDERS`.
"""

import os
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from hardmix.data.image_files import (
    IMAGE_SUFFIXES,
    VIDEO_SUFFIXES,
    missing_reader,
    printable,
    read_image,
)
from hardmix.data.image_set import UNKNOWN, FileNames, ImageSet, Split
from hardmix.data.imagenet100 import SYNSETS
from hardmix.data.shards import is_indexed, open_shard_set
from hardmix.data.video_frames import frame_names, frame_of, read_image_or_frame
from hardmix.errors import InputError
from hardmix.runtime.console import say, warn
from hardmix.settings.config import DataConfig
from hardmix.settings.named_choices import DataName

TEST_FOLDERS = ("test", "val", "valid", "validation")
"""Names of the folder of test images beside `train`; the first that exists is taken."""

READ = IMAGE_SUFFIXES | VIDEO_SUFFIXES
"""Extensions of files that are read, if the packages that they need are installed."""

SHOWN = 5
"""Kinds of ignored files that are reported on a line each."""


def root_of(config: DataConfig, name: DataName) -> Path:
    """Return `data.root`, which must exist."""
    if config.root is None:
        raise InputError(f"data.name={name} needs data.root, the folder of its files.")
    root = Path(config.root).expanduser()
    if not root.exists():
        raise InputError(
            f"data.root={printable(root)} does not exist: set it to the folder of the images."
        )
    return root


def open_folder(config: DataConfig, split: Split, seed: int) -> ImageSet:
    """Open any folder of images, divided into training and test images or not."""
    root = root_of(config, "folder")
    folder = split_folder(root, split)
    if folder is None:
        raise InputError(
            f"data.root={printable(root)} has no test images: put them into {printable(root)}/test,"
            " and the others into train next to it, or set data.test to their folder."
        )
    # Labels must mean the same in both splits, even if one lacks a class.
    classes = [] if split == "train" else subfolders(root / "train")
    listing = list_folder(folder, None, config.frames_per_second)
    return _from_listing(printable(root), config, listing, classes)


def open_every(config: DataConfig) -> ImageSet:
    """Open all images of a folder, training and test images alike.

    The classes are the direct subfolders, or those of train and test, if every image is in one.
    """
    root = root_of(config, "folder")
    contents = find_images([root])
    if not contents.files:
        raise InputError(f"data.root={printable(root)} {_emptiness(root, contents.ignored)}.")
    _report_ignored(root, contents.ignored)
    files = _with_frames(contents.files, config.frames_per_second)
    start = len(os.path.join(root, ""))
    paths = [file[start:].split(os.sep) for file in files]
    if len(paths[0]) > 1 and {path[0] for path in paths} <= {"train", *TEST_FOLDERS}:
        paths = [path[1:] for path in paths]
    names: list[str | None] = [path[0] if len(path) > 1 else None for path in paths]
    if None in names or len(set(names)) < 2:
        names = [None] * len(files)
    return _from_listing(printable(root), config, Listing(files, names), ())


def open_list(config: DataConfig, split: Split, seed: int) -> ImageSet:
    """Open a list of paths."""
    root = root_of(config, "list")
    if split == "test" and not has_tests_in_list(config):
        raise InputError(
            f"data.root={printable(root)} is one list of images, without a test split: write train"
            " or test in a third column, or name another list as data.test."
        )
    listing = list_paths(root, split, config.frames_per_second)
    return _from_listing(printable(root), config, listing, _train_classes("list", config))


def open_imagenet(name: DataName, config: DataConfig, split: Split, seed: int) -> ImageSet:
    """Open ImageNet, or the paper's hundred classes of it, in torchvision's layout."""
    root = root_of(config, name)
    folder = root / ("train" if split == "train" else "val")
    wanted = sorted(SYNSETS) if name == "imagenet100" else subfolders(root / "train")
    missing = sorted(set(wanted) - set(subfolders(folder)))
    if missing or not wanted:
        raise InputError(
            f"data.root={printable(folder)} lacks {len(missing) or 'all'} of its"
            f" {len(wanted) or ''} class folders ({', '.join(missing[:3])}): {name} is read in"
            " torchvision's layout, train/SYNSET and val/SYNSET; for other images set"
            " data.name=folder."
        )
    listing = list_folder(folder, wanted, config.frames_per_second)
    return _from_listing(name, config, listing, wanted)


def open_test(name: DataName, config: DataConfig) -> ImageSet:
    """Open the images of `data.test`, with the class numbers of the training images."""
    test = Path(config.test or "").expanduser()
    if name == "shards" and is_indexed(config.root or "") and is_indexed(str(test)):
        classes = open_shard_set(config.root or "", config).classes or ()
        return open_shard_set(str(test), config, len(classes))
    if name not in ("folder", "list"):
        raise InputError(
            f"data.test={printable(test)} with data.name={name}: only folders and lists of images"
            " can take test images from elsewhere; remove data.test."
        )
    if not test.exists():
        raise InputError(f"data.test={printable(test)} does not exist: name a list or a folder.")
    rate = config.frames_per_second
    listing = list_paths(test, "test", rate) if test.is_file() else list_folder(test, None, rate)
    return _from_listing(printable(test), config, listing, _train_classes(name, config))


def has_tests_in_folder(config: DataConfig) -> bool:
    """Return whether a folder contains a folder of test images."""
    return split_folder(root_of(config, "folder"), "test") is not None


def has_tests_in_list(config: DataConfig) -> bool:
    """Return whether a list names test images."""
    return _name_of_tests(read_list(root_of(config, "list"))) is not None


def has_imagenet_tests(name: DataName, config: DataConfig) -> bool:
    """Return whether there are validation images, which ImageNet is tested on."""
    return (root_of(config, name) / "val").is_dir()


def _train_classes(name: DataName, config: DataConfig) -> list[str]:
    """Return the names of the classes in the order of their numbers; none without labels."""
    root = root_of(config, name)
    if name == "list":
        lines = [line for line in read_list(root) if line.split == "train"]
        return _in_order({line.label for line in lines if line.label is not None})
    folder = split_folder(root, "train")
    assert folder is not None
    listing = list_folder(folder, None, config.frames_per_second)
    return sorted({label for label in listing.classes if label is not None})


def _in_order(classes: set[str]) -> list[str]:
    """Sort names of classes; numbers by value, so that class 10 comes after class 9."""
    numbered = all(name.isdecimal() for name in classes)
    return sorted(classes, key=lambda name: (len(name), name)) if numbered else sorted(classes)


class Listing(NamedTuple):
    """Paths of images, and the class of each; None if it is unknown."""

    files: list[str]
    classes: list[str | None]


def _from_listing(
    name: str, config: DataConfig, listing: Listing, classes: Sequence[str]
) -> ImageSet:
    """Return the images with their classes numbered: in the given order, or else sorted."""
    labels = sorted({label for label in listing.classes if label is not None})
    classes = classes or labels
    strange = [label for label in labels if label not in classes]
    if strange:
        raise InputError(
            f"data: {name} has {len(strange)} classes among its test images that its training"
            f" images do not have ({printable(strange[0])}): add or remove them."
        )
    number = {label: i for i, label in enumerate(classes)}
    numbers = [UNKNOWN if label is None else number[label] for label in listing.classes]
    # Asked once for the set, not for every image that is read.
    with_frames = any(frame_of(file) for file in listing.files)
    read = read_image_or_frame if with_frames else read_image
    return ImageSet(
        name,
        torch.tensor(numbers) if labels else None,
        tuple(printable(label) for label in classes) if labels else None,
        files=FileNames(listing.files),
        channels=config.channels,
        max_pixels=config.max_pixels,
        read=partial(read, reduce=2 * config.image_size) if config.reduce else read,
    )


def list_folder(
    root: Path, only: Collection[str] | None = None, frames_per_second: float = 1.0
) -> Listing:
    """List the images and the frames of videos in a folder.

    The class is the direct subfolder of `root` that contains an image, at any depth. If an image is
    in `root` itself, or all are in one subfolder, the classes are unknown.

    Args:
        root: the folder.
        only: names of the direct subfolders to list; None means the whole folder.
        frames_per_second: how many frames of a video are images.
    """
    direct = subfolders(root)
    listed = direct if only is None else [name for name in direct if name in only]
    contents = find_images([root] if only is None else [root / name for name in listed])
    if not contents.files:
        raise InputError(f"data.root={printable(root)} {_emptiness(root, contents.ignored)}.")
    _report_ignored(root, contents.ignored)
    files = _with_frames(contents.files, frames_per_second)
    start = len(os.path.join(root, ""))
    parts = [file[start:].split(os.sep, 1) for file in files]
    classes = {part[0] for part in parts}
    if len(classes) < 2 or min(map(len, parts)) == 1:
        return Listing(files, [None] * len(files))
    empty = [printable(name) for name in listed if name not in classes]
    if empty:
        raise InputError(
            f"data.root={printable(root)}: {len(empty)} of {len(listed)} class folders hold no"
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
    """Find all images and videos below some folders by extension, except hidden ones.

    Links are followed, but each folder is entered only once, by its shortest path: a link to a
    parent folder would list its images without end.
    """
    files, ignored = [], Counter[str]()
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
                    files.append(entry.path)
                else:
                    ignored[suffix] += 1
    return FolderContents(sorted(files), ignored)


def _with_frames(files: Iterable[str], frames_per_second: float) -> list[str]:
    """Return the same paths, each video replaced by the names of its frames."""
    names: list[str] = []
    for file in files:
        is_video = os.path.splitext(file)[1].lower() in VIDEO_SUFFIXES
        names += frame_names(file, frames_per_second) if is_video else [file]
    return names


_reported: set[Path] = set()
"""Folders whose ignored files have already been reported."""


def _report_ignored(root: Path, ignored: Counter[str]) -> None:
    """Report once which files are ignored and, if a reader is missing, how to install it."""
    if root in _reported or not ignored:
        return
    _reported.add(root)
    missing = [suffix for suffix in sorted(ignored) if missing_reader(suffix)]
    others = [suffix for suffix, _ in ignored.most_common() if suffix not in missing]
    for suffix in missing:
        warn(f"ignored: {_count(ignored[suffix], suffix)} ({missing_reader(suffix)})")
    for suffix in others[:SHOWN]:
        say(f"ignored: {_count(ignored[suffix], suffix)}")
    if others[SHOWN:]:
        rest = sum(ignored[suffix] for suffix in others[SHOWN:])
        say(f"ignored: {rest} files of {len(others[SHOWN:])} other kinds")


def _count(number: int, suffix: str) -> str:
    name = printable(suffix) or "extensionless"
    return f"{number} {name} file{'s' * (number > 1)}"


def _emptiness(root: Path, ignored: Counter[str]) -> str:
    """Say why a folder contains no images."""
    if not any(os.scandir(root)):
        return "is an empty folder: name a folder of images"
    for suffix, number in ignored.items():
        if missing_reader(suffix):
            return f"holds {_count(number, suffix)}: {missing_reader(suffix)} to read them"
    return f"contains no images: none of its files ends in {', '.join(sorted(READ))}"


def subfolders(root: Path) -> list[str]:
    """Return the sorted names of the visible folders, and links to folders, directly in `root`."""
    if not root.is_dir():
        what = "is not a folder" if os.path.lexists(root) else "does not exist"
        raise InputError(f"data.root={printable(root)} {what}: name a folder of images.")
    return sorted(entry.name for entry in _entries(os.fspath(root)) if _is_folder(entry))


def split_folder(root: Path, split: str) -> Path | None:
    """Return the folder of a split, or None if there is no such split.

    A folder is divided if `train` is beside a test folder, or alone in it: among other folders,
    "train" may be the class of railways. All images of an undivided folder are for training.
    """
    names = subfolders(root)
    tests = [name for name in TEST_FOLDERS if name in names]
    divided = "train" in names and (bool(tests) or names == ["train"])
    if split == "train":
        return root / "train" if divided else root
    return root / tests[0] if divided and tests else None


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
    # A link is looked up on the disk without raising an error: it may lead in a circle.
    return entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and os.path.isdir(entry.path))


def _is_file(entry: os.DirEntry[str]) -> bool:
    # A broken link counts, to be reported as unreadable; reading from a pipe would never end.
    return entry.is_symlink() or entry.is_file()


class Line(NamedTuple):
    """An image in a list."""

    path: str
    label: str | None
    split: str


def list_paths(file: Path, split: Split | None, frames_per_second: float = 1.0) -> Listing:
    """Return the images in a list, and the frames of videos; all of them, or those of a split."""
    lines = read_list(file)
    wanted = split if split != "test" else _name_of_tests(lines)
    files: list[str] = []
    classes: list[str | None] = []
    for line in lines:
        if wanted is None or line.split == wanted:
            names = _with_frames([line.path], frames_per_second)
            files += names
            classes += [line.label] * len(names)
    return Listing(files, classes)


def _name_of_tests(lines: list[Line]) -> str | None:
    """Return the name of the test split, "test" before "val"; None if there are no tests."""
    splits = {line.split for line in lines}
    return next((name for name in TEST_FOLDERS if name in splits), None)


def read_list(file: Path) -> list[Line]:
    """Read a list, and check every line."""
    try:
        # surrogateescape: a path may contain bytes that are not UTF-8.
        text = file.read_text(encoding="utf-8-sig", errors="surrogateescape")
    except OSError as error:
        raise InputError(f"data.root={printable(file)}: {error.strerror}.") from error
    if file.suffix.lower() in READ or "\0" in text:
        raise InputError(
            f"data.root={printable(file)} is not a list of images but one binary file, such as an"
            " image: name a folder of images, or a text file with one path on each line."
        )
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
