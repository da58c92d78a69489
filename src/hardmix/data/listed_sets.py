"""Sets of image files: folders, lists and ImageNet, with their classes numbered."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from hardmix.data.file_names import FileNames
from hardmix.data.folders import Listing, list_folder, split_folder, subfolders
from hardmix.data.image_files import printable, read_image
from hardmix.data.image_lists import list_paths, name_of_tests, read_list
from hardmix.data.image_set import UNKNOWN, ImageSet
from hardmix.data.imagenet100 import SYNSETS
from hardmix.data.shard_index import is_indexed, open_shard_set
from hardmix.errors import InputError
from hardmix.settings.config import DataConfig
from hardmix.settings.named_choices import DataName

Split = Literal["train", "test"]


def root_of(config: DataConfig, name: DataName) -> Path:
    """data.root, which must exist."""
    if config.root is None:
        raise InputError(f"data.name={name} needs data.root, the folder of its files.")
    root = Path(config.root).expanduser()
    if not root.exists():
        raise InputError(
            f"data.root={printable(root)} does not exist: set it to the folder of the images."
        )
    return root


def open_imagenet(name: DataName, config: DataConfig, split: Split) -> ImageSet:
    """ImageNet, or the paper's hundred classes of it, in torchvision's layout."""
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


def open_folder(config: DataConfig, split: Split) -> ImageSet:
    """Any folder of images, divided or not."""
    root = root_of(config, "folder")
    folder = split_folder(root, split)
    if folder is None:
        raise InputError(
            f"data.root={printable(root)} has no test images: put them into {printable(root)}/test,"
            " and the others into train next to it, or set data.test to their folder."
        )
    # Labels of both splits must mean the same, also where one lacks a class.
    classes = [] if split == "train" else subfolders(root / "train")
    listing = list_folder(folder, None, config.frames_per_second)
    return _from_listing(printable(root), config, listing, classes)


def open_list(config: DataConfig, split: Split) -> ImageSet:
    """A text file of paths, with classes and a split where it has them."""
    root = root_of(config, "list")
    if split == "test" and not lists_tests(root):
        raise InputError(
            f"data.root={printable(root)} is one list of images, without a test split: write train"
            " or test in a third column, or name another list as data.test."
        )
    listing = list_paths(root, split, config.frames_per_second)
    return _from_listing(printable(root), config, listing, _train_classes("list", config))


def lists_tests(root: Path) -> bool:
    """Whether a list names test images."""
    return name_of_tests(read_list(root)) is not None


def open_test(name: DataName, config: DataConfig) -> ImageSet:
    """The test images that data.test names, numbered by the classes of the training images."""
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


def _train_classes(name: DataName, config: DataConfig) -> list[str]:
    """The names of the classes, in the order of their numbers; none where there are no labels."""
    root = root_of(config, name)
    if name == "list":
        lines = [line for line in read_list(root) if line.split == "train"]
        return _in_order({line.label for line in lines if line.label is not None})
    folder = split_folder(root, "train")
    assert folder is not None
    listing = list_folder(folder, None, config.frames_per_second)
    return sorted({name for name in listing.classes if name is not None})


def _in_order(classes: set[str]) -> list[str]:
    """Class 10 comes after class 9, that numbers may mean what they say."""
    numbered = all(name.isdecimal() for name in classes)
    return sorted(classes, key=lambda name: (len(name), name)) if numbered else sorted(classes)


def _from_listing(
    name: str, config: DataConfig, listing: Listing, classes: Sequence[str]
) -> ImageSet:
    """Number the classes: as given, or if none are, in sorted order."""
    found = sorted({name for name in listing.classes if name is not None})
    classes = classes or found
    strange = [name for name in found if name not in classes]
    if strange:
        raise InputError(
            f"data: {name} has {len(strange)} classes among its test images that its training"
            f" images do not have ({printable(strange[0])}): add or remove them."
        )
    number = {name: i for i, name in enumerate(classes)}
    labels = [UNKNOWN if name is None else number[name] for name in listing.classes]
    return ImageSet(
        name,
        torch.tensor(labels) if found else None,
        tuple(printable(name) for name in classes) if found else None,
        files=FileNames(listing.files),
        channels=config.channels,
        max_pixels=config.max_pixels,
        read=partial(read_image, reduce=2 * config.image_size) if config.reduce else read_image,
    )
