"""Batches of two views for training, and every image once for evaluation.

Step k of epoch e is the same batch however the loader got there: the order is a function of (seed,
epoch), a view of (seed, epoch, image), and a process takes its rows of the global batch. Sets held
in memory are cropped and coloured as whole batches. Files are decoded and cropped by worker
processes. If a GPU trains, uint8 crops travel and it does the rest; if not, the workers do all.
"""

import time
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor

from hardmix.data.augment import (
    channel_statistics,
    colour_views,
    crop_views,
    evaluation_crop,
    make_views,
)
from hardmix.data.batches import Batch, Loader, batch_of, rows_of, steps_of
from hardmix.data.datasets import checked, data_name, open_images
from hardmix.data.image_files import UnreadableImage
from hardmix.data.image_ops import normalise
from hardmix.data.image_set import UNKNOWN, ImageSet
from hardmix.data.own_views import Pipeline, choose_pipelines, make_own_views
from hardmix.data.shard_loading import ShardLoader
from hardmix.data.workers import WorkerPool, empty_to_send
from hardmix.errors import InputError
from hardmix.runtime.distributed import rank, world_size
from hardmix.runtime.profile import timed, timed_beside, timed_each
from hardmix.runtime.random_numbers import permutation
from hardmix.settings.config import DataConfig, TrainConfig

TOGETHER = 1 << 22
"""Bytes of images that a worker holds before it crops them: to draw the boxes of one photograph
takes as long as those of ten."""


class ReadImages(NamedTuple):
    """What a worker makes of a list of images."""

    pixels: UInt8[Tensor, "..."] | Float32[Tensor, "views batch channels size size"]
    """Crops; or views that are coloured and normalised."""
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
    pipeline: Pipeline | Sequence[Pipeline] | None = None,
) -> tuple[ImageSet | None, Loader]:
    """The data set of a run (none for shards, which are a stream) and its loader on this rank.

    `own` is a set that the caller's program holds, in place of one by name, `pipeline` makes a view
    in place of what data.augmentation names.
    """
    pipelines = choose_pipelines(data, pipeline, views)
    options = (data, train.batch_size, train.seed, device, rank(), world_size())
    if own is None and data_name(data) == "shards":
        stream = ShardLoader(*options, views=views, parts=train.accumulate, pipelines=pipelines)
        return None, stream
    if own is None:
        images = open_images(data, "train", train.seed)
    else:
        images = checked(own, data, train.seed)
    loader = ViewLoader(images, *options, views=views, parts=train.accumulate, pipelines=pipelines)
    if pipelines is not None:  # wrong ones are said now, not by a worker process later
        first = torch.tensor([_first_readable(images)])
        image = images.image(int(first))
        make_own_views([image], first, pipelines, data, train.seed, 0)
    return images, loader


class ViewLoader:
    """Two views of every image, in a new order each epoch; what does not fill a batch is left out.

    With `views=1`, for training on labels, the key is the query. An unreadable image is replaced by
    the next readable one. `unreadable` tells which and why, of those that this rank has met; more
    than data.max_unreadable stop the run.
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
        pipelines: tuple[Pipeline, ...] | None = None,
    ) -> None:
        self.steps_per_epoch = steps_of(len(images), batch_size)
        self._views, self._pipelines = views, pipelines
        self.images, self.config, self.seed, self.device = images, config, seed, device
        self.batch_size, self._rows = batch_size, rows_of(rank, world_size, batch_size, parts)
        self.unreadable: dict[int, str] = {}
        self._pool: WorkerPool[tuple[int, list[int]], ReadImages] | None = None

    def prepare(self) -> None:
        """Decode what is to be kept; else the first batch waits for it."""
        self.images = self.images.decode_once(epochs=True)

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Yield this rank's batches of an epoch, from `first_step` on."""
        self.prepare()
        batches = permutation(self.seed, epoch, len(self.images)).split(self.batch_size)
        steps = [ids[self._rows] for ids in batches[first_step : self.steps_per_epoch]]
        if self.images.tensor is None or self._pipelines is not None:
            yield from self._from_files(epoch, steps)
            return
        for ids in steps:
            with timed("decode"):
                pixels = self.images.tensor[ids].to(self.device)
            with timed("augment"):
                views = make_views(pixels, ids, self.config, self.seed, epoch, self._views)
            yield batch_of(views, labels_of(self.images, ids), ids)

    def _from_files(self, epoch: int, steps: list[Tensor]) -> Iterator[Batch]:
        if self._pool is None:
            whole = self.config.workers > 0 and self.device.type == "cpu"
            reader = partial(
                _read_views,
                self.images,
                self.config,
                self.seed,
                self._views if self._pipelines is None else self._pipelines,
                whole,
            )
            self._pool = WorkerPool(reader, self.config.workers, self.device)
        reading = self._pool.run([(epoch, ids.tolist()) for ids in steps])
        for read in timed_each("waiting" if self.config.workers else "decode", reading):
            timed_beside(read.seconds if self.config.workers else 0.0)
            self.unreadable |= read.unreadable
            _check_unreadable(self.unreadable, self.images, self.config.max_unreadable)
            with timed("augment"):
                pixels = read.pixels.to(self.device, non_blocking=True)
                views: Sequence[Tensor] = tuple(pixels)
                if pixels.dtype == torch.uint8:
                    views = colour_views(pixels, read.ids, self.config, self.seed, epoch)
            yield batch_of(views, labels_of(self.images, read.ids), read.ids)

    def close(self) -> None:
        """End the worker processes, if there are any; the next epoch starts new ones."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


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
    images.decode_once()
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
    images: ImageSet,
    config: DataConfig,
    seed: int,
    views: int | tuple[Pipeline, ...],
    whole: bool,
    job: tuple[int, list[int]],
) -> ReadImages:
    """Decode and crop the views, if `whole` colour them too: a worker's part of training.

    Pipelines of the user's own, in place of a number of views, do all of it.
    """
    started = time.perf_counter()
    epoch, wanted = job
    ids: list[Tensor] = []
    crops: list[Tensor] = []
    unreadable: dict[int, str] = {}
    allowed = _allowed(images, config.max_unreadable)
    for group_ids, group in _read_groups(images, wanted, unreadable, allowed):
        ids.append(torch.tensor(group_ids))
        crops.append(_make(group, ids[-1], views, config, seed, epoch))
    if len(unreadable) > allowed:
        return ReadImages(torch.empty(0, dtype=torch.uint8), torch.empty(0).long(), unreadable)
    pixels, numbers = torch.cat(crops, dim=1), torch.cat(ids)
    if whole and pixels.dtype == torch.uint8:
        out = empty_to_send(pixels.shape)
        colour_views(pixels, numbers, config, seed, epoch, out)
        pixels = out
    return ReadImages(pixels, numbers, unreadable, time.perf_counter() - started)


def _read_groups(
    images: ImageSet, wanted: list[int], unreadable: dict[int, str], allowed: int
) -> Iterator[tuple[list[int], Sequence[Tensor] | Tensor]]:
    """Images that are cropped together, and their numbers: for an unreadable one, the next."""
    kept = images.together(wanted)
    if kept is not None:
        yield wanted, kept
        return
    ids: list[int] = []
    group: list[Tensor] = []
    held = 0
    for index in wanted:
        while (image := _read(images, index, unreadable)) is None:
            if len(unreadable) > allowed:
                return
            index = (index + 1) % len(images)
        ids.append(index)
        group.append(image)
        held += image.numel()
        if held > TOGETHER:
            yield ids, group
            ids, group, held = [], [], 0
    if group:
        yield ids, group


def _make(
    images: Sequence[Tensor] | Tensor,
    ids: Tensor,
    views: int | tuple[Pipeline, ...],
    config: DataConfig,
    seed: int,
    epoch: int,
) -> Tensor:
    """Crops, to be coloured; or views that a pipeline of the user's has finished."""
    if isinstance(views, int):
        return crop_views(images, ids, config, seed, epoch, views)
    return make_own_views(list(images), ids, views, config, seed, epoch)


def _first_readable(images: ImageSet) -> int:
    """`checked` has found one among the first."""
    return next(index for index in range(len(images)) if _read(images, index, {}) is not None)


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
