"""Data sets: a name or a folder in, images with labels, or without, out.

A new one is a function and its line in `SOURCES`. Small sets are held in memory. Others are a list
of files that are decoded when they are needed, or WebDataset archives on a disk. Archives that are
a stream have no images by number; shard_streams.py reads them.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor
from torchvision.datasets import CIFAR10, CIFAR100

from hardmix.data.cache import ImageCache
from hardmix.data.folders import (
    has_imagenet_tests,
    has_tests_in_folder,
    has_tests_in_list,
    open_folder,
    open_imagenet,
    open_list,
    open_test,
    root_of,
    subfolders,
)
from hardmix.data.hugging_face import (
    has_tests_on_hugging_face,
    is_hugging_face,
    open_hugging_face,
)
from hardmix.data.image_files import UnreadableImage, printable
from hardmix.data.image_set import ImageSet, Split
from hardmix.data.imagenet100 import SYNSETS
from hardmix.data.resized_jpegs import with_resized_jpegs
from hardmix.data.shapes import CLASSES, cached_shapes
from hardmix.data.shard_streams import is_shards
from hardmix.data.shards import is_indexed, open_shard_set
from hardmix.errors import InputError
from hardmix.settings.config import DataConfig
from hardmix.settings.named_choices import DataName

PROBED = 20
"""Files that are tried when a set is opened; one of them must be readable."""


class Source(NamedTuple):
    """How a data set is opened and recognised."""

    open: Callable[[DataConfig, Split, int], ImageSet]
    """Opens a split, given the config and a seed."""
    has_test: Callable[[DataConfig], bool] = lambda _: True
    """Returns whether there are test images."""
    folder: str | None = None
    """Name of the folder by which it is recognised: `data.root` itself, or in it."""


def open_images(
    config: DataConfig, split: Split = "train", seed: int = 0, listed: ImageSet | None = None
) -> ImageSet:
    """Open the images of a split, decoding only until one is found to be readable.

    `listed` are the same images from an earlier call with other settings of how many are used and
    how they are kept: their files are not listed again.
    """
    name = data_name(config)
    if listed is not None and listed.files is not None:
        images = replace(listed, cache=None, rows=None)
    elif split == "test" and config.test is not None:
        images = open_test(name, config)
    else:
        images = SOURCES[name].open(config, split, seed)
    images = checked(images, config, seed)
    if config.resized_jpegs:
        images = with_resized_jpegs(images, config)
    if images.files is None:
        return images
    return replace(images, cache=_cache_of(images, images.files, config), rows=None)


def _cache_of(images: ImageSet, files: Sequence[str], config: DataConfig) -> ImageCache:
    reduced = 2 * config.image_size if config.reduce else None
    state = (images.state,) if images.state else ()
    return ImageCache(
        files,
        partial(_read_one, images.read, images.channels, images.max_pixels),
        images.channels,
        (images.max_pixels, reduced, *state),
        config.cache,
        config.cache_gb * 1e9,
        config.workers,
    )


def _read_one(
    read: Callable[[str, int, int], Tensor], channels: int, max_pixels: int, file: str
) -> Tensor:
    return read(file, channels, max_pixels)


def checked(images: ImageSet, config: DataConfig, seed: int = 0) -> ImageSet:
    """Return at most `data.num_images` of a set; raise InputError if they are too few."""
    images = images.subset(config.num_images, seed)
    if len(images) < 2:
        raise InputError(
            f"data: {images.name} has {len(images)} image: contrastive learning needs 2 or more."
        )
    _check_readable(images)
    return images


def _check_readable(images: ImageSet) -> None:
    """Try the first few files: wrong settings make all of them unreadable, damage only some."""
    failures = []
    for index in range(min(PROBED, len(images))):
        try:
            image = images.image(index)
        except UnreadableImage as error:
            failures.append(error)
            continue
        if image.dtype == torch.uint8 and image.ndim == 3 and len(image) == images.channels:
            return
        raise InputError(
            f"{images.name_of(index)} is {image.dtype} of shape {tuple(image.shape)}: an image is"
            f" torch.uint8 of shape ({images.channels}, height, width); set channels, or convert."
        )
    raise InputError(
        f"data: {images.name} has no readable image among its first {len(failures)}: {failures[0]}."
    ) from failures[0]


def has_test(config: DataConfig) -> bool:
    """Return whether the data set has a test split."""
    return config.test is not None or SOURCES[data_name(config)].has_test(config)


def data_name(config: DataConfig) -> DataName:
    """Return the name of the data set, as given or recognised from `data.root`."""
    if config.name is not None:
        return config.name
    if config.root is None:
        raise InputError(
            "neither data.name nor data.root is set: name a data set (data.name=shapes needs no"
            " files) or a folder of images."
        )
    if is_hugging_face(config.root):
        return "hf"
    if is_shards(config.root):
        return "shards"
    return _recognise(Path(config.root).expanduser())


def _recognise(root: Path) -> DataName:
    """Return which data set a folder or file is, judged by the names in it."""
    if root.is_file():
        return "list"
    for name, source in SOURCES.items():
        if source.folder and ((root / source.folder).is_dir() or root.name == source.folder):
            return name
    classes = subfolders(root / "train") if (root / "train").is_dir() else []
    if not classes or not all(re.fullmatch(r"n\d{8}", synset) for synset in classes):
        return "folder"
    return "imagenet100" if set(classes) == set(SYNSETS) else "imagenet"


def _open_own(config: DataConfig, split: Split, seed: int) -> ImageSet:
    raise InputError(
        "data.name=own means images that were passed by a program: pass them again,"
        " as pretrain(..., images=...), or set data.root to a folder of others."
    )


def _open_shards(config: DataConfig, split: Split, seed: int) -> ImageSet:
    root = config.root or ""
    if not is_indexed(root):
        raise InputError(
            f"data.root={root}: pipes, URLs and compressed archives are a stream, but this needs"
            " random access; use .tar files on a disk, or a folder."
        )
    return open_shard_set(root, config)


def _open_shapes(config: DataConfig, split: Split, seed: int) -> ImageSet:
    _check_colour("shapes", config)
    if not 32 <= config.image_size <= 64:
        raise InputError(
            f"data.image_size={config.image_size} with data.name=shapes: forms are drawn at 32 to"
            " 64 pixels; set data.image_size to 32."
        )
    number = config.num_images or 10_000
    if split == "test":
        number = min(number, 2_000)  # more training images need no more test images
    images, labels = cached_shapes(number, config.image_size, seed, split)
    return ImageSet("shapes", labels, CLASSES, tensor=images)


def _open_cifar(
    name: Literal["cifar10", "cifar100"], config: DataConfig, split: Split, seed: int
) -> ImageSet:
    """Open CIFAR in torchvision's layout; the root is the folder of batches or contains it.

    The batches are pickles, and a pickle can run code: torchvision first compares their md5 with
    the published ones.
    """
    _check_colour(name, config)
    root, kind = root_of(config, name), {"cifar10": CIFAR10, "cifar100": CIFAR100}[name]
    if root.name == kind.base_folder:
        root = root.parent
    try:
        data = kind(root, train=split == "train", download=False)
    except RuntimeError as error:
        raise InputError(
            f"data.root={printable(root)} lacks a complete {name} ({kind.base_folder} with the"
            ' published md5 sums): fetch it with python -c "from torchvision.datasets import'
            f" {kind.__name__}; {kind.__name__}('{printable(root)}', download=True)\"."
        ) from error
    images = torch.from_numpy(data.data).permute(0, 3, 1, 2).contiguous()
    return ImageSet(name, torch.tensor(data.targets), tuple(data.classes), tensor=images)


STL10_CLASSES = (
    "airplane",
    "bird",
    "car",
    "cat",
    "deer",
    "dog",
    "horse",
    "monkey",
    "ship",
    "truck",
)
STL10_FOLDER = "stl10_binary"
_STL10_SHAPE = (3, 96, 96)


def _open_stl10(config: DataConfig, split: Split, seed: int) -> ImageSet:
    """Open STL-10: for training, the labelled images, then the unlabelled ones if they exist.

    Pre-training may use all of them (105,000), evaluations the 5,000 whose label is not -1.
    """
    _check_colour("stl10", config)
    root = root_of(config, "stl10")
    folder = root if root.name == STL10_FOLDER else root / STL10_FOLDER
    images, labels = _stl10_images(folder / f"{split}_X.bin"), _stl10_labels(folder, split)
    if len(images) != len(labels):
        raise InputError(
            f"data.root={printable(folder)}: {len(images)} {split} images but {len(labels)} labels:"
            " unpack stl10_binary.tar.gz again."
        )
    unlabelled = folder / "unlabeled_X.bin"
    if split == "train" and unlabelled.exists():
        images = torch.cat([images, _stl10_images(unlabelled)])
        labels = torch.cat([labels, torch.full((len(images) - len(labels),), -1)])
    return ImageSet("stl10", labels, STL10_CLASSES, tensor=images)


def _stl10_images(file: Path) -> UInt8[Tensor, "n 3 96 96"]:
    values = _stl10_bytes(file)
    if values.size == 0 or values.size % np.prod(_STL10_SHAPE):
        raise InputError(
            f"data.root: {printable(file)} has {values.size} bytes, not a multiple of 3 x 96 x 96:"
            " unpack stl10_binary.tar.gz again."
        )
    # The file stores columns.
    return torch.from_numpy(values.reshape(-1, *_STL10_SHAPE).transpose(0, 1, 3, 2).copy())


def _stl10_labels(folder: Path, split: str) -> Int[Tensor, " n"]:
    labels = torch.from_numpy(_stl10_bytes(folder / f"{split}_y.bin")).long() - 1
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(STL10_CLASSES):
        raise InputError(
            f"data.root: {printable(folder / f'{split}_y.bin')} has labels outside 1 to 10: unpack"
            " stl10_binary.tar.gz again."
        )
    return labels


def _stl10_bytes(file: Path) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    try:
        return np.fromfile(file, dtype=np.uint8)
    except OSError as error:
        raise InputError(
            f"data.root: {printable(file)}: {error.strerror}; stl10 needs the files of"
            " stl10_binary.tar.gz, which torchvision.datasets.STL10(ROOT, download=True) fetches."
        ) from error


def _check_colour(name: DataName, config: DataConfig) -> None:
    if config.channels != 3:
        raise InputError(
            f"data.channels={config.channels} with data.name={name}: its images have 3 channels."
        )


def _no_test(_: DataConfig) -> bool:
    return False


SOURCES: dict[DataName, Source] = {
    "shapes": Source(_open_shapes),
    "cifar10": Source(partial(_open_cifar, "cifar10"), folder=CIFAR10.base_folder),
    "cifar100": Source(partial(_open_cifar, "cifar100"), folder=CIFAR100.base_folder),
    "stl10": Source(_open_stl10, folder=STL10_FOLDER),
    "imagenet": Source(partial(open_imagenet, "imagenet"), partial(has_imagenet_tests, "imagenet")),
    "imagenet100": Source(
        partial(open_imagenet, "imagenet100"), partial(has_imagenet_tests, "imagenet100")
    ),
    "folder": Source(open_folder, has_tests_in_folder),
    "list": Source(open_list, has_tests_in_list),
    "shards": Source(_open_shards, _no_test),
    "hf": Source(open_hugging_face, has_tests_on_hugging_face),
    "own": Source(_open_own, _no_test),
}
"""Every data set by its name."""
