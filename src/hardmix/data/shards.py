"""WebDataset archives: a stream of images out of tar files, for sets too large to be listed.

Needs the extra `shards`. Members are read as bytes and decoded by images.py; webdataset's
own decoders are not used because they would unpickle. A root "pipe:COMMAND" runs the command.
"""

import io
import os
import random
import re
import tarfile
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

from jaxtyping import UInt8
from torch import Tensor

from hardmix.data.image_files import IMAGE_SUFFIXES, UnreadableImage, read_image
from hardmix.errors import InputError
from hardmix.runtime.random_numbers import seed_of
from hardmix.settings.config import DataConfig

BUFFER = 1000
"""Images, still encoded, among which the next one is drawn."""

ShardImage = tuple[UInt8[Tensor, "channels height width"], int, int]
"""Image, label (-1 where unknown) and id."""


def is_shards(root: str) -> bool:
    """Whether a root names archives: 'a.tar', 'a-{000..099}.tar' or 'pipe:COMMAND'."""
    if os.path.isdir(root):
        return False
    return (
        ".tar" in os.path.basename(root)
        or root.startswith("pipe:")
        or bool(re.search(r"\{.*\.\..*\}", root))
    )


def open_shards(
    config: DataConfig,
    seed: int = 0,
    epoch: int = 0,
    on_unreadable: Callable[[int, str], None] | None = None,
) -> Iterator[ShardImage]:
    """One pass over the archives, in an order that depends on (seed, epoch) alone.

    An image is the first member of a sample that ends as images do, its label the number in `cls`.
    Its id is a hash of archive and key: the same in every epoch. Unreadable images are left out and
    reported (id, reason); more than `data.max_unreadable` of `data.num_images` are an error.
    """
    webdataset, root = _webdataset(), config.root or ""
    if config.num_images is None:
        raise InputError(
            f"data.num_images is not set, and shards do not record how many images they hold: count"
            f" those of data.root={root}."
        )
    shards = webdataset.shardlists.expand_urls(root)
    order = random.Random(seed_of("shards", seed, epoch))
    order.shuffle(shards)
    samples = webdataset.shuffle(BUFFER, rng=order)(_samples(webdataset, shards))
    return _decoded(samples, config, on_unreadable)


def _webdataset() -> ModuleType:
    try:
        return import_module("webdataset")
    except ImportError as error:
        raise InputError(
            "data.name=shards needs the package webdataset: pip install 'hardmix[shards]'."
        ) from error


def _samples(webdataset: ModuleType, shards: list[str]) -> Iterator[dict[str, Any]]:
    """Files of the same key, one archive after the other."""
    for shard in shards:
        try:
            yield from webdataset.tarfile_to_samples()([{"url": shard}])
        except (OSError, tarfile.TarError, ValueError) as error:
            reason = error.args[0] if error.args else error
            raise InputError(f"data.root: the shard {shard} cannot be read: {reason}.") from error


def _decoded(
    samples: Iterator[dict[str, Any]],
    config: DataConfig,
    on_unreadable: Callable[[int, str], None] | None,
) -> Iterator[ShardImage]:
    unreadable, allowed = 0, config.max_unreadable * (config.num_images or 0)
    for sample in samples:
        name = f"{os.path.basename(sample['__url__'])}/{sample['__key__']}"
        number = seed_of("shard image", name)
        try:
            image = _image(sample, name, config)
        except UnreadableImage as error:
            unreadable += 1
            if unreadable > allowed:
                raise InputError(
                    f"{unreadable} unreadable images are more than"
                    f" data.max_unreadable={config.max_unreadable} of {config.num_images}, the last"
                    f" is {error}."
                ) from error
            if on_unreadable is not None:
                on_unreadable(number, str(error))
        else:
            yield image, _label(sample, name), number


def _image(
    sample: dict[str, Any], name: str, config: DataConfig
) -> UInt8[Tensor, "channels height width"]:
    members = [key for key in sample if not key.startswith("__")]
    images = [key for key in members if os.path.splitext(f"_.{key}")[1] in IMAGE_SUFFIXES]
    if not images:
        raise UnreadableImage(f"{name}: no image among its files ({', '.join(members)})")
    file = io.BytesIO(sample[images[0]])
    return read_image(file, config.channels, config.max_pixels, f"{name}.{images[0]}")


def _label(sample: dict[str, Any], name: str) -> int:
    try:
        return int(sample.get("cls", b"-1"))
    except ValueError as error:
        raise InputError(
            f"{name}.cls holds {sample['cls']!r}: a label must be an integer of at least 0."
        ) from error
