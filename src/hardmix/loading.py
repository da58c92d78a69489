"""Batches of two views for training, and every image once for evaluation.

Step k of epoch e is the same batch however the loader got there: the order is a function of (seed,
epoch), a view of (seed, epoch, image), and a process takes its rows of the global batch. Sets held
in memory are cropped and coloured as whole batches. Files are decoded and cropped by worker
processes; only uint8 crops travel, and the training device does the rest.
"""

import time
from collections.abc import Generator, Iterator
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor

from hardmix.augment import (
    channel_statistics,
    colour_views,
    crop_views,
    evaluation_crop,
    make_views,
)
from hardmix.config import DataConfig, TrainConfig
from hardmix.datasets import UNKNOWN, ImageSet, checked, data_name, open_images
from hardmix.distributed import rank, world_size
from hardmix.errors import InputError
from hardmix.image_ops import normalise
from hardmix.images import UnreadableImage
from hardmix.shards import ShardImage, open_shards
from hardmix.stateless import permutation
from hardmix.stopwatch import timed, timed_beside, timed_each
from hardmix.workers import WorkerPool

TOGETHER = 1 << 22
"""Bytes of images that a worker holds before it crops them: to draw the boxes of one photograph
takes as long as those of ten."""


class Batch(NamedTuple):
    """One step's images on the training device, normalised."""

    query: Float32[Tensor, "batch channels size size"]
    key: Float32[Tensor, "batch channels size size"]
    labels: Int64[Tensor, " batch"]
    """-1 where unknown."""
    ids: Int64[Tensor, " batch"]
    """Number of each image in its data set."""


class ReadImages(NamedTuple):
    """What a worker makes of a list of images."""

    pixels: UInt8[Tensor, "..."]
    ids: Int64[Tensor, " batch"]
    unreadable: dict[int, str]
    """Number of each image that is left out, and why."""
    seconds: float = 0.0
    """How long it took."""


def open_loader(
    data: DataConfig,
    train: TrainConfig,
    device: torch.device,
    views: int = 2,
    own: ImageSet | None = None,
) -> "tuple[ImageSet | None, ViewLoader | ShardLoader]":
    """The data set of a run (none for shards, which are a stream) and its loader on this rank.

    `own` is a set that the caller's program holds, in place of one by name.
    """
    options = (data, train.batch_size, train.seed, device, rank(), world_size())
    if own is None and data_name(data) == "shards":
        return None, ShardLoader(*options, parts=train.accumulate)
    if own is None:
        images = open_images(data, "train", train.seed)
    else:
        images = checked(own, data, train.seed)
    return images, ViewLoader(images, *options, views=views, parts=train.accumulate)


class ViewLoader:
    """Two views of every image, in a new order each epoch; what does not fill a batch is left out.

    With `views=1`, for training on labels, the key is the query. An unreadable image is replaced by
    the next readable one. `unreadable` tells which and why, of
    those that this rank has met; more than data.max_unreadable stop the run.
    """

    def __init__(
        self,
        images: ImageSet,
        config: DataConfig,
        batch_size: int,
        seed: int,
        device: torch.device,
        rank: int = 0,
        world_size: int = 1,
        views: int = 2,
        parts: int = 1,
    ) -> None:
        self.steps_per_epoch = _steps(len(images), batch_size)
        self._views = views
        self.images, self.config, self.seed, self.device = images, config, seed, device
        self.batch_size, self._rows = batch_size, _rows_of(rank, world_size, batch_size, parts)
        self.unreadable: dict[int, str] = {}
        self._pool: WorkerPool[tuple[int, list[int]], ReadImages] | None = None

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Yield this rank's batches of an epoch, from `first_step` on."""
        batches = permutation(self.seed, epoch, len(self.images)).split(self.batch_size)
        steps = [ids[self._rows] for ids in batches[first_step : self.steps_per_epoch]]
        if self.images.tensor is None:
            yield from self._from_files(epoch, steps)
            return
        for ids in steps:
            with timed("decode"):
                pixels = self.images.tensor[ids].to(self.device)
            with timed("augment"):
                views = make_views(pixels, ids, self.config, self.seed, epoch, self._views)
            yield _on_device(views, labels_of(self.images, ids), ids)

    def _from_files(self, epoch: int, steps: list[Tensor]) -> Iterator[Batch]:
        if self._pool is None:
            reader = partial(_read_views, self.images, self.config, self.seed, self._views)
            self._pool = WorkerPool(reader, self.config.workers, self.device)
        reading = self._pool.run([(epoch, ids.tolist()) for ids in steps])
        for read in timed_each("waiting" if self.config.workers else "decode", reading):
            timed_beside(read.seconds if self.config.workers else 0.0)
            self.unreadable |= read.unreadable
            _check_unreadable(self.unreadable, self.images, self.config.max_unreadable)
            with timed("augment"):
                crops = read.pixels.to(self.device, non_blocking=True)
                views = colour_views(crops, read.ids, self.config, self.seed, epoch)
            yield _on_device(views, labels_of(self.images, read.ids), read.ids)

    def close(self) -> None:
        """End the worker processes, if there are any; the next epoch starts new ones."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


class ShardLoader:
    """Two views of every image of WebDataset archives: a stream, read by this process.

    Every rank reads the whole stream and takes its rows of each batch.
    """

    def __init__(
        self,
        config: DataConfig,
        batch_size: int,
        seed: int,
        device: torch.device,
        rank: int = 0,
        world_size: int = 1,
        parts: int = 1,
    ) -> None:
        if config.num_images is None:
            raise InputError(
                "data.num_images is not set, and shards do not tell how many images they hold:"
                " count them."
            )
        self.steps_per_epoch = _steps(config.num_images, batch_size)
        self.config, self.seed, self.device = config, seed, device
        self.batch_size, self._rows = batch_size, _rows_of(rank, world_size, batch_size, parts)
        self.unreadable: dict[int, str] = {}

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Yield this rank's batches of an epoch, from `first_step` on."""
        stream = self._stream(epoch)
        for step in range(self.steps_per_epoch):
            with timed("decode"):
                samples = list(islice(stream, self.batch_size))
            if step >= first_step:
                yield self._batch([samples[row] for row in self._rows.tolist()], epoch)

    def _stream(self, epoch: int) -> Iterator[ShardImage]:
        options = self.config, self.seed, epoch
        found = 0

        def note(number: int, reason: str) -> None:
            nonlocal found
            found += 1
            self.unreadable[number] = reason

        for sample in open_shards(*options, note):
            found += 1
            yield sample
        if found < self.steps_per_epoch * self.batch_size:
            raise InputError(
                f"data.num_images={self.config.num_images}, but {self.config.root} holds {found}:"
                " correct data.num_images."
            )
        yield from open_shards(*options)  # in place of those that are unreadable

    def close(self) -> None:
        """As of ViewLoader: here there is nothing to end."""

    def _batch(self, samples: list[tuple[Tensor, int, int]], epoch: int) -> Batch:
        images, labels, ids = zip(*samples, strict=True)
        options = self.config, self.seed, epoch
        numbers = torch.tensor(ids)
        with timed("augment"):
            crops = crop_views(images, numbers, *options)
            views = colour_views(crops.to(self.device), numbers, *options)
        return _on_device(views, torch.tensor(labels), numbers)


def evaluation_batches(
    images: ImageSet,
    image_size: int,
    batch_size: int,
    device: torch.device,
    workers: int = 0,
    max_unreadable: float = 0.01,
) -> Generator[
    tuple[
        Float32[Tensor, "batch channels size size"],
        Int64[Tensor, " batch"],
        Int64[Tensor, " batch"],
    ],
    None,
    None,
]:
    """Images (evaluation crop, normalised), labels and ids: every image once, in order.

    Unreadable ones are missing from the ids; more than `max_unreadable` of all raise InputError.
    """
    mean, std = channel_statistics(images.channels)
    read = partial(_read_evaluation, images, image_size)
    pool = WorkerPool(read, 0 if images.tensor is not None else workers, device)
    jobs = [ids.tolist() for ids in torch.arange(len(images)).split(batch_size) if len(ids)]
    unreadable: dict[int, str] = {}
    try:
        for pixels, ids, new, _ in pool.run(jobs):
            unreadable |= new
            _check_unreadable(unreadable, images, max_unreadable)
            if len(ids):
                pictures = normalise(pixels.to(device).float().div_(255), mean, std)
                yield pictures, labels_of(images, ids).to(device), ids.to(device)
    finally:
        pool.close()


def labels_of(images: ImageSet, ids: Int64[Tensor, " batch"]) -> Int64[Tensor, " batch"]:
    """Their classes, UNKNOWN where there are none."""
    return torch.full_like(ids, UNKNOWN) if images.labels is None else images.labels[ids]


def _read_views(
    images: ImageSet, config: DataConfig, seed: int, views: int, job: tuple[int, list[int]]
) -> ReadImages:
    """Decode and crop the views: a worker's part of training."""
    started = time.perf_counter()
    epoch, wanted = job
    ids: list[int] = []
    group: list[Tensor] = []
    crops: list[Tensor] = []
    unreadable: dict[int, str] = {}
    for index in wanted:
        while (image := _read(images, index, unreadable)) is None:
            if len(unreadable) > _allowed(images, config.max_unreadable):
                return ReadImages(torch.empty(0, dtype=torch.uint8), torch.tensor(ids), unreadable)
            index = (index + 1) % len(images)
        ids.append(index)
        group.append(image)
        if sum(image.numel() for image in group) > TOGETHER or len(ids) == len(wanted):
            numbers = torch.tensor(ids[-len(group) :])
            crops.append(crop_views(group, numbers, config, seed, epoch, views))
            group = []
    seconds = time.perf_counter() - started
    return ReadImages(torch.cat(crops, dim=1), torch.tensor(ids), unreadable, seconds)


def _read_evaluation(images: ImageSet, size: int, wanted: list[int]) -> ReadImages:
    """Decode and crop: a worker's part of evaluation."""
    if images.tensor is not None:
        ids = torch.tensor(wanted)
        return ReadImages(evaluation_crop(images.tensor[ids], size), ids, {})
    unreadable: dict[int, str] = {}
    pixels = [_read(images, index, unreadable) for index in wanted]
    crops = [evaluation_crop(image, size) for image in pixels if image is not None]
    ids = torch.tensor([index for index in wanted if index not in unreadable], dtype=torch.int64)
    return ReadImages(
        torch.stack(crops) if crops else torch.empty(0, dtype=torch.uint8), ids, unreadable
    )


def _read(images: ImageSet, index: int, unreadable: dict[int, str]) -> Tensor | None:
    try:
        return images.image(index)
    except UnreadableImage as error:
        unreadable[index] = str(error)
        return None


def _allowed(images: ImageSet, share: float) -> int:
    """How many images may be unreadable: one in any case, so that small sets are not stopped."""
    return max(1, int(share * len(images)))


def _check_unreadable(unreadable: dict[int, str], images: ImageSet, share: float) -> None:
    if len(unreadable) > _allowed(images, share):
        first = "; ".join(list(unreadable.values())[:5])
        raise InputError(
            f"{len(unreadable)} of {len(images)} images cannot be read, more than"
            f" data.max_unreadable={share} allows: {first}. Repair or remove them, or raise the"
            " limit."
        )


def _on_device(views: tuple[Tensor, ...], labels: Tensor, ids: Tensor) -> Batch:
    query, key = views[0], views[-1]
    return Batch(query, key, labels.to(query.device), ids.to(query.device))


def _steps(num_images: int, batch_size: int) -> int:
    if batch_size > num_images:
        raise InputError(
            f"train.batch_size={batch_size} exceeds the {num_images} images of the data set: not"
            " one batch can be filled; lower train.batch_size."
        )
    return num_images // batch_size


def _rows_of(rank: int, world_size: int, batch_size: int, parts: int) -> Int64[Tensor, " rows"]:
    """A rank's rows of the global batch: its share of each of the parts that are encoded at once.

    So a part is made of the same images, in the same order, on any number of processes.
    """
    if batch_size % (world_size * parts):
        raise InputError(
            f"train.batch_size={batch_size} is not divisible by the {world_size} processes"
            + (f" times train.accumulate={parts}" if parts > 1 else "")
            + ": each takes the same number of images; choose a multiple of"
            f" {world_size * parts}."
        )
    shares = torch.arange(batch_size).view(parts, world_size, -1)
    return shares[:, rank].flatten()
