"""A name or a folder in, images with labels (or none) out.

Small sets are held in memory, others as a list of files that are decoded when asked for. WebDataset
archives can only be streamed: shards.py reads them.
"""

import difflib
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from hardmix.data.cifar_stl import read_cifar, read_stl10
from hardmix.data.folders import (
    Listing,
    list_folder,
    list_paths,
    recognise,
    split_folder,
    subfolders,
)
from hardmix.data.image_files import MAX_PIXELS, UnreadableImage, printable, read_image
from hardmix.data.imagenet100 import SYNSETS
from hardmix.data.shapes import CLASSES, cached_shapes
from hardmix.data.shards import is_shards
from hardmix.errors import InputError
from hardmix.runtime.random_numbers import seed_of
from hardmix.settings.config import DataConfig, DataName

Split = Literal["train", "test"]

UNKNOWN = -1
"""The label of an image whose class is not known, in a set where others are."""
PROBED = 20
"""Files that are tried when a set is opened; one of them must be readable."""
HASHED = 4096
"""Images held in memory that a fingerprint looks at, at most."""


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images by number, with or without labels."""

    name: str
    """For people."""
    labels: Int[Tensor, " n"] | None
    """Number of the class, -1 where unknown; None if no image has one."""
    classes: tuple[str, ...] | None
    """Names of the classes."""
    tensor: UInt8[Tensor, "n channels height width"] | None = None
    """The images, if they are held in memory."""
    files: tuple[str, ...] | None = None
    """Their paths, if they are on disk, or other names that `read` knows."""
    channels: int = 3
    """Of every image."""
    max_pixels: int = MAX_PIXELS
    """A file with more is refused."""
    read: Callable[[str, int, int], Tensor] = read_image
    """One of `files`, channels and max_pixels to uint8 pixels; worker processes call it."""

    def __len__(self) -> int:
        if self.tensor is not None:
            return len(self.tensor)
        return len(self.files or ())

    def image(self, index: int) -> UInt8[Tensor, "channels height width"]:
        """One image; a file that cannot be decoded raises `UnreadableImage`."""
        if self.tensor is not None:
            return self.tensor[index]
        assert self.files is not None
        return self.read(self.files[index], self.channels, self.max_pixels)

    def name_of(self, index: int) -> str:
        """The file, or "cifar10[123]"."""
        return f"{self.name}[{index}]" if self.files is None else printable(self.files[index])

    def select(self, indices: Int[Tensor, " m"]) -> "ImageSet":
        """These images, in this order."""
        return replace(
            self,
            labels=None if self.labels is None else self.labels[indices],
            tensor=None if self.tensor is None else self.tensor[indices],
            files=None if self.files is None else tuple(self.files[i] for i in indices.tolist()),
        )

    def subset(self, num_images: int | None, seed: int) -> "ImageSet":
        """At most so many, chosen at random by the seed and left in their order."""
        if num_images is None or num_images >= len(self):
            return self
        order = torch.randperm(
            len(self), generator=torch.Generator().manual_seed(seed_of("subset", seed))
        )
        return self.select(order[:num_images].sort().values)

    def labelled(self) -> "ImageSet":
        """Those whose class is known, for evaluations; it is an error if there is none."""
        if self.labels is None:
            raise InputError(
                f"{self.name} has no labels: this needs images in folders named by class."
            )
        known = self.labels != UNKNOWN
        return self if bool(known.all()) else self.select(known.nonzero().flatten())


def open_images(config: DataConfig, split: Split = "train", seed: int = 0) -> ImageSet:
    """The images of a split; nothing is decoded but the first that can be."""
    return checked(_open(data_name(config), config, split, seed), config, seed)


def checked(images: ImageSet, config: DataConfig, seed: int = 0) -> ImageSet:
    """At most `data.num_images` of a set, refused where nothing can be learnt from them."""
    images = images.subset(config.num_images, seed)
    if len(images) < 2:
        raise InputError(
            f"data: {images.name} has {len(images)} image: contrasting one image with others needs"
            " 2 or more."
        )
    _check_readable(images)
    return images


def has_test(config: DataConfig) -> bool:
    """Whether `open_images` knows a test split."""
    match name := data_name(config):
        case "list" | "shards" | "own":
            return False
        case "folder":
            return split_folder(_root(config, name), "test") is not None
        case "imagenet" | "imagenet100":
            return (_root(config, name) / "val").is_dir()
        case _:
            return True


def data_name(config: DataConfig) -> DataName:
    """The data set's name, given or recognised by `data.root`."""
    if config.name is not None:
        if config.name not in get_args(DataName):
            raise InputError(
                f"data.name={config.name!r} is unknown: choose {', '.join(_nearest(config.name))}."
            )
        return config.name
    if config.root is None:
        raise InputError(
            "neither data.name nor data.root is set: name a data set (data.name=shapes needs no"
            " files) or a folder of images."
        )
    if is_shards(config.root):
        return "shards"
    return recognise(Path(config.root).expanduser())


def _nearest(name: str) -> list[str]:
    names = get_args(DataName)
    return sorted(names, key=lambda known: -difflib.SequenceMatcher(None, name, known).ratio())


def _root(config: DataConfig, name: DataName) -> Path:
    if config.root is None:
        raise InputError(f"data.name={name} needs data.root: where its files are.")
    root = Path(config.root).expanduser()
    if not root.exists():
        raise InputError(f"data.root={printable(root)} does not exist: say where the images are.")
    return root


def _open(name: DataName, config: DataConfig, split: Split, seed: int) -> ImageSet:
    match name:
        case "shapes":
            return _open_shapes(config, split, seed)
        case "cifar10" | "cifar100" | "stl10":
            return _open_published(name, config, split)
        case "imagenet" | "imagenet100":
            return _open_imagenet(name, config, split)
        case "folder":
            return _open_folder(config, split)
        case "list":
            return _open_list(config, split)
        case "shards":
            raise InputError(
                f"data.root={config.root}: shards are a stream, and this needs images by number;"
                " pre-train on shards and evaluate on a folder."
            )
        case "own":
            raise InputError(
                "data.name=own are images that only their author's program holds: give them again,"
                " as pretrain(..., images=...), or set data.root to a folder of others."
            )


def _open_shapes(config: DataConfig, split: Split, seed: int) -> ImageSet:
    _check_colour("shapes", config)
    if not 32 <= config.image_size <= 64:
        raise InputError(
            f"data.image_size={config.image_size} with data.name=shapes: forms are drawn at 32 to"
            " 64 pixels; set data.image_size to 32."
        )
    number = config.num_images or 10_000
    if split == "test":
        number = min(number, 2_000)  # more to train on needs no more to test
    images, labels = cached_shapes(number, config.image_size, seed, split)
    return ImageSet("shapes", labels, CLASSES, tensor=images)


def _open_published(
    name: Literal["cifar10", "cifar100", "stl10"], config: DataConfig, split: Split
) -> ImageSet:
    _check_colour(name, config)
    root = _root(config, name)
    data = read_stl10(root, split) if name == "stl10" else read_cifar(root, name, split)
    return ImageSet(name, data.labels, data.classes, tensor=data.images)


def _open_imagenet(name: DataName, config: DataConfig, split: Split) -> ImageSet:
    root = _root(config, name)
    folder = root / ("train" if split == "train" else "val")
    wanted = sorted(SYNSETS) if name == "imagenet100" else subfolders(root / "train")
    missing = sorted(set(wanted) - set(subfolders(folder)))
    if missing or not wanted:
        raise InputError(
            f"data.root={printable(folder)} lacks {len(missing) or 'all'} of its"
            f" {len(wanted) or ''} class folders ({', '.join(missing[:3])}): {name} is read in"
            " torchvision's layout, train/SYNSET and val/SYNSET."
        )
    return _from_listing(name, config, list_folder(folder, wanted), wanted)


def _open_folder(config: DataConfig, split: Split) -> ImageSet:
    root = _root(config, "folder")
    folder = split_folder(root, split)
    if folder is None:
        raise InputError(
            f"data.root={printable(root)} has no test images: put them into {printable(root)}/test,"
            " and the others into train beside it."
        )
    # Labels of both splits must mean the same, also where one lacks a class.
    classes = [] if split == "train" else subfolders(root / "train")
    return _from_listing(printable(root), config, list_folder(folder), classes)


def _open_list(config: DataConfig, split: Split) -> ImageSet:
    root = _root(config, "list")
    if split == "test":
        raise InputError(
            f"data.root={printable(root)} is one list of images, without a test split."
        )
    listing = list_paths(root)
    # Class 10 comes after class 9, that numbers may mean what they say.
    classes = sorted({name for name in listing.classes if name}, key=lambda name: (len(name), name))
    numbered = all(name.isdecimal() for name in classes)
    return _from_listing(printable(root), config, listing, classes if numbered else [])


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
        files=tuple(listing.files),
        channels=config.channels,
        max_pixels=config.max_pixels,
    )


def _check_colour(name: DataName, config: DataConfig) -> None:
    if config.channels != 3:
        raise InputError(
            f"data.channels={config.channels} with data.name={name}: its images have 3 channels."
        )


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


def fingerprint(images: ImageSet) -> str:
    """16 hexadecimal digits that change with the data set, yet not when its folder is moved.

    Of files the names and sizes count, of images in memory the bytes of some thousands.
    """
    digest = hashlib.sha256(f"{len(images)} {images.channels}".encode())
    if images.labels is not None:
        digest.update(images.labels.numpy().tobytes())
    if images.tensor is not None:
        some = images.tensor[:: max(1, len(images) // HASHED)]
        digest.update(some.numpy().tobytes())
    files = images.files or ()
    start = len(os.path.commonpath(files)) if files else 0
    for file in files:
        size = os.path.getsize(file) if os.path.exists(file) else -1
        digest.update(os.fsencode(file[start:]) + b"\0%d\0" % size)
    return digest.hexdigest()[:16]
