"""WebDataset archives behind a pipe or a URL: a stream, which cannot be indexed.

Archives are dealt to lanes, and lanes lie side by side in a batch: a row always takes its images
from the same lane. The images of a step are thus a function of (seed, epoch, step, row), with any
number of processes and workers, and each process reads only the lanes of its rows, each worker some
of them. If two processes share a lane, both read all of it and decode their own images. Only epochs
are not exact: a lane with more images than others leaves some out, one with fewer repeats some.

Needs the extra `shards`. Members are read as bytes and decoded by image_files.py; webdataset's own
decoders are not used because they would unpickle. A root "pipe:COMMAND" runs the command.
"""

import io
import os
import random
import re
import tarfile
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from hardmix.data.batches import (
    Batch,
    ReadImages,
    batch_of,
    coloured,
    finished_views,
    make_crops,
    nothing_read,
    rows_of,
    steps_of,
)
from hardmix.data.image_files import IMAGE_SUFFIXES, UnreadableImage, read_image
from hardmix.data.own_views import Pipeline
from hardmix.data.shards import MOST_BYTES, BoundedMember, check_names, check_size, label_of
from hardmix.data.views import ViewKind, ViewMaker, usual_views
from hardmix.data.workers import WorkerChoice, WorkerPool, choose_workers
from hardmix.errors import InputError
from hardmix.runtime.console import say, warn
from hardmix.runtime.profile import timed, timed_each
from hardmix.runtime.random_numbers import seed_of
from hardmix.settings.config import DataConfig

BUFFER, LEAST_BUFFER = 1000, 16
"""Encoded images among which the next ones are drawn: in all lanes, and at least in each."""
MOST_HELD = 2**32
"""Most bytes of these images, in all lanes."""
MOST_LANES = 32
"""Most archives that are read at a time. Processes share lanes if there are more of them."""
MOST_TRIED = 1000
"""Unreadable images in a row at which reading stops."""

_META = re.compile(r"__[^/]*__($|/)")
"""Names of members that webdataset reserves for itself."""

ShardImage = tuple[UInt8[Tensor, "channels height width"], int, int]
"""Image, label (-1 if unknown) and id."""


def is_shards(root: str) -> bool:
    """Return whether a root names archives: 'a.tar', 'a-{000..099}.tar' or 'pipe:COMMAND'."""
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
        archives: list[str] = _webdataset().shardlists.expand_urls(root)
    except ValueError as error:  # braces that are not closed
        raise InputError(f"data.root={root} cannot be expanded: {error}.") from error
    return archives


def number_of_lanes(archives: int, rows: int) -> int:
    """Return the number of lanes to which archives are dealt, for batches of `rows`.

    A batch takes the same number of images from every lane, so lanes should hold about equally
    many: their number divides that of the archives, or is at most a sixteenth of it.
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
    """The encoded images of some archives, in an order that depends on (seed, epoch, lane) alone.

    A lane that is at its end starts again, because archives hold different numbers of images.
    """

    def __init__(self, archives: list[str], config: DataConfig, seed: int, buffer: int) -> None:
        self.archives = archives
        self.size: int | None = None
        """Number of images of the lane; None before it has come to its end."""
        self._config, self._seed, self._buffer = config, seed, buffer
        self._next: deque[dict[str, Any]] = deque()
        self._stream = self._endless()

    def skip(self, number: int) -> None:
        """Skip images, which are read but not decoded."""
        for _ in range(number):
            if self._next:
                self._next.popleft()
            else:
                next(self._stream)

    def image(self, place: int, unreadable: dict[int, str], allowed: float) -> ShardImage | None:
        """Return the image that is `place` images ahead, or the next one that is readable.

        Ids and reasons of unreadable images are added to `unreadable`; the result is None if there
        are more than `allowed`.
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
        """End the commands that are still running."""
        self._stream.close()

    def _endless(self) -> Generator[dict[str, Any], None, None]:
        webdataset = _webdataset()
        while True:
            count, order = 0, random.Random(self._seed)
            with closing(_samples(webdataset, self.archives)) as samples:
                for sample in _shuffled(samples, order, self._buffer):
                    count += 1
                    yield sample
            if not count:
                raise InputError(f"data.root: {', '.join(self.archives[:3])} hold no images.")
            self.size = count


def open_lane(
    archives: list[str], config: DataConfig, seed: int, epoch: int, lane: int, lanes: int
) -> Lane:
    """Return a lane at the start of an epoch."""
    own = lane_archives(archives, seed, epoch, lane, lanes)
    return Lane(own, config, seed_of("lane", seed, epoch, lane), max(LEAST_BUFFER, BUFFER // lanes))


def _shuffled(
    samples: Iterator[dict[str, Any]], order: random.Random, size: int
) -> Iterator[dict[str, Any]]:
    """Yield samples drawn at random from the next `size`, or from fewer if they are large."""
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
    return sum(len(data) for data in sample.values() if isinstance(data, bytes))


def _webdataset() -> ModuleType:
    try:
        return import_module("webdataset")
    except ImportError as error:
        raise InputError(
            "data.name=shards needs the package webdataset: pip install 'hardmix[shards]'."
        ) from error


def _samples(webdataset: ModuleType, shards: list[str]) -> Generator[dict[str, Any], None, None]:
    """Yield samples, the files with the same key, one archive after the other."""
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
    """Yield the files of an archive as webdataset does, but with limits on their sizes."""
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
            tar.members = []  # type: ignore[attr-defined]  # otherwise all headers stay in memory
    yield {}  # ends the sample, which must not continue in the next archive


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


ROUGHLY = 0.9
"""Least share of data.num_images that some of the archives must hold if extended to all."""


class StreamLayout(NamedTuple):
    """Assigns a lane to every row of the batch."""

    archives: list[str]
    lanes: int
    batch_size: int
    parts: int
    """Parts of a batch (train.accumulate); every part takes images from all lanes."""

    @property
    def lane_images(self) -> int:
        """Images of a lane in a batch."""
        return self.batch_size // self.lanes

    def places(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Return for each row the lane, and the place among the lane's images of a step."""
        part = self.batch_size // self.parts
        width = part // self.lanes
        places = []
        for row in rows:
            number, within = divmod(row, part)
            places.append((within // width, number * width + within % width))
        return places

    def shares(self, rows: Sequence[int], number: int) -> list[list[int]]:
        """Divide these rows into `number` shares with different lanes."""
        lane_of = {row: lane for row, (lane, _) in zip(rows, self.places(rows), strict=True)}
        lanes = sorted(set(lane_of.values()))
        share_of = {lane: place * number // len(lanes) for place, lane in enumerate(lanes)}
        return [[row for row in rows if share_of[lane_of[row]] == share] for share in range(number)]


class StreamRead(NamedTuple):
    """A worker's rows of a step."""

    images: ReadImages
    labels: Int64[Tensor, " batch"]
    ended: dict[int, int]
    """Number of images by lane, for lanes that are at their end."""


class StreamReader:
    """Reads a share of the rows, step by step; any step but the next one starts over."""

    def __init__(
        self,
        layout: StreamLayout,
        shares: Sequence[Sequence[int]],
        config: DataConfig,
        seed: int,
        maker: ViewMaker | tuple[Pipeline, ...],
        whole: bool,
    ) -> None:
        self._layout, self._config, self._seed = layout, config, seed
        self._places = [layout.places(share) for share in shares]
        self._maker, self._whole = maker, whole
        self._open: dict[int, tuple[int, int, dict[int, Lane]]] = {}
        """The next epoch and step, and the lanes in this state, by share."""

    def __call__(self, job: tuple[int, int, int]) -> StreamRead:
        """Return the images of (epoch, step, share of the rows)."""
        epoch, step, share = job
        lanes = self._lanes_at(epoch, step, share)
        unreadable: dict[int, str] = {}
        allowed = self._config.max_unreadable * (self._config.num_images or 0)
        samples: list[ShardImage] = []
        for number, place in self._places[share]:
            sample = lanes[number].image(place, unreadable, allowed)
            if sample is None:
                return StreamRead(nothing_read(unreadable), torch.empty(0).long(), {})
            samples.append(sample)
        for lane in lanes.values():
            lane.skip(self._layout.lane_images)
        self._open[share] = epoch, step + 1, lanes
        ended = {number: lane.size for number, lane in lanes.items() if lane.size is not None}
        return self._made(samples, epoch, unreadable, ended)

    def _lanes_at(self, epoch: int, step: int, share: int) -> dict[int, Lane]:
        """Return the lanes of a share, before this step."""
        *at, lanes = self._open.pop(share, (-1, -1, {}))
        if at == [epoch, step]:
            return lanes
        for old in lanes.values():
            old.close()
        layout = self._layout
        options = layout.archives, self._config, self._seed, epoch
        numbers = dict.fromkeys(number for number, _ in self._places[share])
        lanes = {number: open_lane(*options, number, layout.lanes) for number in numbers}
        for lane in lanes.values():
            lane.skip(step * layout.lane_images)
        return lanes

    def _made(
        self,
        samples: list[ShardImage],
        epoch: int,
        unreadable: dict[int, str],
        ended: dict[int, int],
    ) -> StreamRead:
        images, labels, numbers = zip(*samples, strict=True)
        ids = torch.tensor(numbers)
        kinds = make_crops(images, ids, self._maker, self._config, self._seed, epoch)
        if self._whole and isinstance(self._maker, ViewMaker):
            kinds = coloured(kinds, ids, self._maker, epoch)
        read = ReadImages(kinds[0], ids, unreadable, more=kinds[1:])
        return StreamRead(read, torch.tensor(labels), ended)


class ShardLoader:
    """Yields views of the images of archives that are a stream: this process's rows."""

    def __init__(
        self,
        config: DataConfig,
        batch_size: int,
        seed: int,
        device: torch.device,
        rank: int = 0,
        world_size: int = 1,
        views: int | Sequence[ViewKind] = 2,
        parts: int = 1,
        pipelines: tuple[Pipeline, ...] | None = None,
        compiled: bool = False,
    ) -> None:
        kinds = usual_views(views) if isinstance(views, int) else views
        self._maker, self._pipelines = ViewMaker(kinds, config, seed, compiled), pipelines
        archives = archives_of(config)
        self.steps_per_epoch = steps_of(config.num_images or 0, batch_size)
        self._rows = rows_of(rank, world_size, batch_size, parts).tolist()
        lanes = number_of_lanes(len(archives), batch_size // parts)
        self.layout = StreamLayout(archives, lanes, batch_size, parts)
        self.config, self.seed, self.device = config, seed, device
        self._coloured_on = self._maker.coloured_on(device)
        self._world_size = world_size
        self.unreadable: dict[int, str] = {}
        self._pool: WorkerPool[tuple[int, int, int], StreamRead] | None = None
        self._warned = False

    @cached_property
    def lanes(self) -> list[int]:
        """The lanes that this process reads."""
        return sorted({lane for lane, _ in self.layout.places(self._rows)})

    @cached_property
    def workers(self) -> WorkerChoice:
        """How many processes read the stream: at most one per lane."""
        sent = self._maker.batch_bytes(len(self._rows), self.device)
        choice = choose_workers(self.config.workers, self.device, batch_bytes=sent)
        if choice.number <= len(self.lanes):
            return choice
        return WorkerChoice(len(self.lanes), "one for each lane of the stream")

    def reading(self) -> str:
        """Return by how many processes the stream is read, and why."""
        return str(self.workers)

    def prepare(self) -> None:
        """Say what is not exact about a stream."""
        layout, total = self.layout, len(self.layout.archives)
        shared = self._world_size > layout.lanes
        say(
            f"data.root is a stream: {total} archive{'s' * (total > 1)} in {layout.lanes}"
            f" lane{'s' * (layout.lanes > 1)}, {len(self.lanes)} read by each process"
            + (", some lanes by several" if shared else "")
            + ". An epoch is not exact (archives of unequal size: some images are left out, some"
            " repeated), a resumed run reads again what it skips, and evaluation needs other"
            " files. Archives copied to a disk have none of these limits."
        )

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Yield this rank's batches of an epoch, from `first_step` on."""
        number = max(1, self.workers.number)
        shares = self.layout.shares(self._rows, number)
        order = torch.tensor([row for share in shares for row in share]).argsort()
        if self._pool is None:
            maker = self._maker if self._pipelines is None else self._pipelines
            whole = self.workers.number > 0 and self._coloured_on.type == "cpu"
            options = self.layout, shares, self.config, self.seed, maker, whole
            self._pool = WorkerPool(StreamReader(*options), self.workers.number, self.device)
        if first_step:
            skipped = first_step * self.layout.lane_images * len(self.lanes)
            say(f"Reading {skipped:,} images of the stream again, to get to where the run was.")
        steps = range(first_step, self.steps_per_epoch)
        jobs = [(epoch, step, share) for step in steps for share in range(number)]
        reading = timed_each("waiting" if self.workers.number else "decode", self._pool.run(jobs))
        ended: dict[int, int] = {}
        for _ in steps:
            reads = [next(reading) for _ in range(number)]
            for read in reads:
                self.unreadable |= read.images.unreadable
                ended |= read.ended
            self._check(epoch, ended)
            yield self._batch(reads, order, epoch)

    def _batch(self, reads: list[StreamRead], order: Tensor, epoch: int) -> Batch:
        read, labels = reads[0].images, reads[0].labels
        if len(reads) > 1:
            kinds = zip(*((each.images.pixels, *each.images.more) for each in reads), strict=True)
            pixels, *more = (torch.cat(kind, dim=1)[:, order] for kind in kinds)
            ids = torch.cat([each.images.ids for each in reads])[order]
            read = ReadImages(pixels, ids, {}, 0.0, more)
            labels = torch.cat([each.labels for each in reads])[order]
        with timed("augment"):
            views = finished_views(read, self._maker, epoch, self.device, self._coloured_on)
        return batch_of(views, labels, read.ids)

    def _check(self, epoch: int, ended: dict[int, int]) -> None:
        """Raise InputError if too many images are unreadable, or the archives hold too few."""
        config, total = self.config, self.steps_per_epoch * self.layout.batch_size
        if len(self.unreadable) > config.max_unreadable * (config.num_images or 0):
            raise InputError(
                f"{len(self.unreadable)} unreadable images are more than"
                f" data.max_unreadable={config.max_unreadable} of {config.num_images}, the last"
                f" is {list(self.unreadable.values())[-1]}."
            )
        if not ended:
            return
        if ended.keys() == set(self.lanes):
            archives, lanes = self.layout.archives, self.layout.lanes
            options = archives, self.seed, epoch
            read = sum(len(lane_archives(*options, lane, lanes)) for lane in ended)
            held = sum(ended.values()) * len(archives) // read
            if held < total * (1.0 if read == len(archives) else ROUGHLY):
                about = "" if read == len(archives) else "about "
                raise InputError(
                    f"data.num_images={config.num_images}, but {config.root} holds {about}{held}:"
                    " correct data.num_images."
                )
        if not self._warned:
            self._warned = True
            warn(
                f"a lane of the stream ended before the epoch, after {min(ended.values())} images:"
                " it repeats some of them, because its archives hold fewer than others."
            )

    def close(self) -> None:
        """End the worker processes, if there are any; the next epoch starts new ones."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
