"""WebDataset archives behind a pipe or a URL: a stream, which cannot be indexed.

Archives are dealt to lanes, and a row of the batch always takes from the same lane. So the images
of a step are a function of (seed, epoch, step, row), with any number of processes and workers, and
each reads only the lanes of its rows. What is not exact is the epoch: a lane that holds more images
than others leaves some out, one that holds fewer repeats some.

Needs the extra `shards`. Members are read as bytes and decoded by image_files.py; webdataset's
own decoders are not used because they would unpickle. A root "pipe:COMMAND" runs the command.
"""

import io
import os
import random
import re
import tarfile
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import closing
from importlib import import_module
from types import ModuleType
from typing import Any

from jaxtyping import UInt8
from torch import Tensor

from hardmix.data.image_files import IMAGE_SUFFIXES, UnreadableImage, read_image
from hardmix.data.shard_limits import (
    MOST_BYTES,
    BoundedMember,
    check_names,
    check_size,
    label_of,
)
from hardmix.errors import InputError
from hardmix.runtime.random_numbers import seed_of
from hardmix.settings.config import DataConfig

BUFFER, LEAST_BUFFER = 1000, 16
"""Images, still encoded, among which the next ones are drawn: in all lanes, and in each."""
MOST_HELD = 2**32
"""Bytes of these images, in all lanes."""
MOST_LANES = 32
"""Archives that are read at a time. More processes than lanes share them."""
MOST_TRIED = 1000
"""Unreadable images one after another that are one too many."""

_META = re.compile(r"__[^/]*__($|/)")
"""Members that webdataset keeps for itself."""

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


def archives_of(config: DataConfig) -> list[str]:
    """Return the archives, URLs or commands that data.root names, in its order."""
    root = config.root or ""
    if config.num_images is None:
        raise InputError(
            f"data.num_images is not set, and shards do not record how many images they hold: count"
            f" those of data.root={root}."
        )
    check_names(root)
    try:
        found: list[str] = _webdataset().shardlists.expand_urls(root)
    except ValueError as error:  # braces that are not closed
        raise InputError(f"data.root={root} cannot be expanded: {error}.") from error
    return found


def number_of_lanes(archives: int, rows: int) -> int:
    """Return into how many lanes archives are dealt, for batches of so many rows.

    A batch takes the same number of images from every lane, so lanes should hold about as many: the
    number divides that of the archives, or is a sixteenth of it or less.
    """
    possible = range(min(archives, rows, MOST_LANES), 0, -1)
    return next(
        lanes
        for lanes in possible
        if rows % lanes == 0 and (archives % lanes == 0 or 16 * lanes <= archives)
    )


def lane_archives(archives: list[str], seed: int, epoch: int, lane: int, lanes: int) -> list[str]:
    """Return the archives of a lane, in the order of an epoch."""
    shuffled = list(archives)
    random.Random(seed_of("shards", seed, epoch)).shuffle(shuffled)
    return shuffled[lane::lanes]


class Lane:
    """The images of some archives, still encoded, in an order by (seed, epoch, lane) alone.

    A lane that is at its end starts again: archives do not hold equal numbers of images.
    """

    def __init__(self, archives: list[str], config: DataConfig, seed: int, buffer: int) -> None:
        self.archives = archives
        self.found: int | None = None
        """Images of the lane, once it has come to its end."""
        self._config, self._seed, self._buffer = config, seed, buffer
        self._next: deque[dict[str, Any]] = deque()
        self._stream = self._endless()

    def skip(self, number: int) -> None:
        """Leave out images; they are read, but not decoded."""
        for _ in range(number):
            if self._next:
                self._next.popleft()
            else:
                next(self._stream)

    def image(self, place: int, unreadable: dict[int, str], allowed: float) -> ShardImage | None:
        """Return the image so many places ahead, or if it is unreadable the next one.

        None if more than `allowed` are unreadable; they are added to `unreadable`, id and reason.
        """
        for ahead in range(place, place + MOST_TRIED):
            while len(self._next) <= ahead:
                self._next.append(next(self._stream))
            sample = self._next[ahead]
            name = f"{os.path.basename(sample['__url__'])}/{sample['__key__']}"
            number = seed_of("shard image", name)
            try:
                return _image(sample, name, self._config), _label(sample, name), number
            except UnreadableImage as error:
                unreadable[number] = str(error)
            if len(unreadable) > allowed:
                return None
        raise InputError(
            f"data.root: {MOST_TRIED} images one after another cannot be read, the last is"
            f" {list(unreadable.values())[-1]}."
        )

    def close(self) -> None:
        """End the commands that still run."""
        self._stream.close()

    def _endless(self) -> Generator[dict[str, Any], None, None]:
        webdataset = _webdataset()
        while True:
            found, order = 0, random.Random(self._seed)
            with closing(_samples(webdataset, self.archives)) as samples:
                for sample in _shuffled(samples, order, self._buffer):
                    found += 1
                    yield sample
            if not found:
                raise InputError(f"data.root: {', '.join(self.archives[:3])} hold no images.")
            self.found = found


def open_lane(
    archives: list[str], config: DataConfig, seed: int, epoch: int, lane: int, lanes: int
) -> Lane:
    """Return a lane at the start of an epoch."""
    own = lane_archives(archives, seed, epoch, lane, lanes)
    return Lane(own, config, seed_of("lane", seed, epoch, lane), max(LEAST_BUFFER, BUFFER // lanes))


def _shuffled(
    samples: Iterator[dict[str, Any]], order: random.Random, size: int
) -> Iterator[dict[str, Any]]:
    """Yield samples drawn at random from the next `size` ones, or from fewer if they are large."""
    held: list[dict[str, Any]] = []
    room = MOST_HELD * size // BUFFER
    for sample in samples:
        held.append(sample)
        room -= _bytes_of(sample)
        while len(held) > size or (room < 0 and held):
            place = order.randrange(len(held))
            held[place], held[-1] = held[-1], held[place]
            room += _bytes_of(held[-1])
            yield held.pop()
    order.shuffle(held)
    yield from held


def _bytes_of(sample: dict[str, Any]) -> int:
    return sum(len(each) for each in sample.values() if isinstance(each, bytes))


def _webdataset() -> ModuleType:
    try:
        return import_module("webdataset")
    except ImportError as error:
        raise InputError(
            "data.name=shards needs the package webdataset: pip install 'hardmix[shards]'."
        ) from error


def _samples(webdataset: ModuleType, shards: list[str]) -> Generator[dict[str, Any], None, None]:
    """Files of the same key, one archive after the other."""
    for shard in shards:
        try:
            files = _files(webdataset, shard)
            yield from webdataset.tariterators.group_by_keys(files)
        except InputError:
            raise
        except (OSError, tarfile.TarError, EOFError, ValueError) as error:
            reason = error.args[0] if error.args else error
            raise InputError(f"data.root: the shard {shard} cannot be read: {reason}.") from error


def _files(webdataset: ModuleType, shard: str) -> Iterator[dict[str, Any]]:
    """Yield the files of an archive as webdataset does, with limits on their sizes."""
    (source,) = webdataset.tariterators.url_opener([{"url": shard}])
    current, room = None, MOST_BYTES
    with tarfile.open(fileobj=source["stream"], mode="r|*", tarinfo=BoundedMember) as tar:
        for member in tar:
            check_size(member)
            key, _ = webdataset.tariterators.base_plus_ext(member.name)
            if not member.isreg() or key is None or _META.match(member.name):
                continue
            if key != current:
                current, room = key, MOST_BYTES
            check_size(member, room)
            room -= member.size
            data = tar.extractfile(member).read()  # type: ignore[union-attr]  # a file
            yield {"fname": member.name, "data": data, "__url__": shard}
            tar.members = []  # type: ignore[attr-defined]  # which would keep all headers
    yield {}  # samples of two archives are never one


def _image(
    sample: dict[str, Any], name: str, config: DataConfig
) -> UInt8[Tensor, "channels height width"]:
    members = [key for key in sample if not key.startswith("__")]
    images = [key for key in members if os.path.splitext(f"_.{key}")[1] in IMAGE_SUFFIXES]
    if not images:
        raise UnreadableImage(f"{name}: no image among its files ({', '.join(members)})")
    file = io.BytesIO(sample[images[0]])
    reduce = 2 * config.image_size if config.reduce else None
    return read_image(file, config.channels, config.max_pixels, f"{name}.{images[0]}", reduce)


def _label(sample: dict[str, Any], name: str) -> int:
    return label_of(sample.get("cls", b"-1"), f"{name}.cls")
