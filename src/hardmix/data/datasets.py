"""A name or a folder in, images with labels (or none) out.

Small sets are held in memory, others as a list of files that are decoded when asked for; so are
WebDataset archives on a disk. Archives that arrive as a stream are read by shards.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from hardmix.data.cache import ImageCache
from hardmix.data.cifar_stl import read_cifar, read_stl10
from hardmix.data.folders import recognise, split_folder
from hardmix.data.image_files import UnreadableImage
from hardmix.data.image_set import ImageSet
from hardmix.data.listed_sets import (
    Split,
    lists_tests,
    open_folder,
    open_imagenet,
    open_list,
    open_test,
    root_of,
)
from hardmix.data.shapes import CLASSES, cached_shapes
from hardmix.data.shard_index import is_indexed, open_shard_set
from hardmix.data.shards import is_shards
from hardmix.errors import InputError
from hardmix.settings.bounds import nearest_first
from hardmix.settings.config import DataConfig
from hardmix.settings.named_choices import DataName

PROBED = 20
"""Files that are tried when a set is opened; one of them must be readable."""


def open_images(config: DataConfig, split: Split = "train", seed: int = 0) -> ImageSet:
    """Open the images of a split, decoding only until one is found to be readable."""
    name = data_name(config)
    own_test = split == "test" and config.test is not None
    images = open_test(name, config) if own_test else _open(name, config, split, seed)
    images = checked(images, config, seed)
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


def has_test(config: DataConfig) -> bool:
    """Return whether the data set has a test split."""
    if config.test is not None:
        return True
    match name := data_name(config):
        case "own" | "shards":
            return False
        case "list":
            return lists_tests(root_of(config, name))
        case "folder":
            return split_folder(root_of(config, name), "test") is not None
        case "imagenet" | "imagenet100":
            return (root_of(config, name) / "val").is_dir()
        case _:
            return True


def data_name(config: DataConfig) -> DataName:
    """Return the name of the data set, as given or recognised from `data.root`."""
    if config.name is not None:
        if config.name not in get_args(DataName):
            known = ", ".join(nearest_first(config.name, get_args(DataName)))
            raise InputError(f"data.name={config.name!r} is unknown: choose {known}.")
        return config.name
    if config.root is None:
        raise InputError(
            "neither data.name nor data.root is set: name a data set (data.name=shapes needs no"
            " files) or a folder of images."
        )
    if is_shards(config.root):
        return "shards"
    return recognise(Path(config.root).expanduser())


def _open(name: DataName, config: DataConfig, split: Split, seed: int) -> ImageSet:
    match name:
        case "shapes":
            return _open_shapes(config, split, seed)
        case "cifar10" | "cifar100" | "stl10":
            return _open_published(name, config, split)
        case "imagenet" | "imagenet100":
            return open_imagenet(name, config, split)
        case "folder":
            return open_folder(config, split)
        case "list":
            return open_list(config, split)
        case "shards":
            return _open_shards(config)
        case "own":
            raise InputError(
                "data.name=own means images that were passed by a program: pass them again,"
                " as pretrain(..., images=...), or set data.root to a folder of others."
            )


def _open_shards(config: DataConfig) -> ImageSet:
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
        number = min(number, 2_000)  # more to train on needs no more to test
    images, labels = cached_shapes(number, config.image_size, seed, split)
    return ImageSet("shapes", labels, CLASSES, tensor=images)


def _open_published(
    name: Literal["cifar10", "cifar100", "stl10"], config: DataConfig, split: Split
) -> ImageSet:
    _check_colour(name, config)
    root = root_of(config, name)
    data = read_stl10(root, split) if name == "stl10" else read_cifar(root, name, split)
    return ImageSet(name, data.labels, data.classes, tensor=data.images)


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
