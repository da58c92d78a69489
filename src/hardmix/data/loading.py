"""Batches of views for training, and every image once for evaluation.

Step k of epoch e is the same batch however the loader got there: the order is a function of (seed,
epoch), a view of (seed, epoch, image), and each process takes its rows of the global batch. Sets in
memory are cropped and coloured as whole batches. Files are decoded and cropped by worker processes.
If a GPU trains, they send it uint8 crops and it does the rest; otherwise they do everything.
"""

import math
from collections.abc import Generator, Iterator, Sequence
from functools import cached_property, partial

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from hardmix.data.batches import (
    Batch,
    Loader,
    ReadImages,
    allowed_unreadable,
    batch_of,
    check_unreadable,
    finished_views,
    first_readable,
    read_evaluation,
    read_views,
    rows_of,
    steps_of,
)
from hardmix.data.colours import channel_statistics, normalise
from hardmix.data.gpu_decoding import ReadFiles, check_decoder, decoded, read_files
from hardmix.data.image_set import UNKNOWN, ImageSet
from hardmix.data.own_views import Pipeline, choose_pipelines, make_own_views
from hardmix.data.shard_streams import ShardLoader
from hardmix.data.shards import is_indexed
from hardmix.data.sources import checked, data_name, open_images
from hardmix.data.views import ViewKind, ViewMaker, check_own_pipelines, usual_views
from hardmix.data.workers import WorkerChoice, WorkerPool, choose_workers
from hardmix.errors import InputError
from hardmix.runtime.console import say
from hardmix.runtime.device import send
from hardmix.runtime.distributed import rank, world_size
from hardmix.runtime.own_code import check_allowed
from hardmix.runtime.profile import timed, timed_beside, timed_each
from hardmix.runtime.random_numbers import permutation, seed_of
from hardmix.settings.config import DataConfig, TrainConfig
from hardmix.settings.named_choices import Shuffle
from hardmix.settings.saved import is_command

BLOCK, TOGETHER = 1024, 16
"""Images in a block, and blocks that are shuffled together, for data.shuffle=blocks."""


def open_loader(
    data: DataConfig,
    train: TrainConfig,
    device: torch.device,
    views: int | Sequence[ViewKind] = 2,
    own: ImageSet | None = None,
    pipeline: Pipeline | Sequence[Pipeline] | None = None,
    labelled: bool = False,
    rank_and_size: tuple[int, int] | None = None,
    listed: ImageSet | None = None,
) -> tuple[ImageSet | None, Loader]:
    """Return a run's data set (None for shards that are a stream) and its loader on this rank.

    Args:
        data: settings of the images.
        train: settings of training.
        device: the device that trains.
        views: number of views of an image, or their kinds.
        own: your own image set, used instead of a named one.
        pipeline: your own function that makes views, used instead of data.augmentation.
        labelled: leave out images without a class if others have one.
        rank_and_size: this process's place among others, if not that of torch.distributed.
        listed: the same images, opened earlier with other settings.
    """
    kinds = usual_views(views) if isinstance(views, int) else tuple(views)
    pipelines = choose_pipelines(data, pipeline, sum(kind.number for kind in kinds))
    if pipelines is not None:
        check_own_pipelines(kinds)
    check_decoder(data, device)
    place = rank_and_size or (rank(), world_size())
    options = (data, train.batch_size, train.seed, device, *place)
    compiled = train.compile in ("all", "graphs")
    if own is None and data_name(data) == "shards" and not is_indexed(data.root or ""):
        for name in ("resized_jpegs", "decoder"):
            if getattr(data, name) not in (False, "cpu"):
                raise InputError(
                    f"data.{name}={getattr(data, name)} with data.root={data.root}: a stream has no"
                    f" files to read again; leave data.{name} unset."
                )
        if is_command(data.root or ""):
            check_allowed(data.root or "", "data.root")
        stream = ShardLoader(
            *options, views=kinds, parts=train.accumulate, pipelines=pipelines, compiled=compiled
        )
        return None, stream
    if own is None:
        images = open_images(data, "train", train.seed, listed)
    else:
        images = checked(own, data, train.seed)
    if labelled and images.labels is not None:
        with_class = images.labelled()
        if len(with_class) < len(images):
            say(f"Training on the {len(with_class)} of {len(images)} images whose class is known.")
        images = with_class
    loader = ViewLoader(
        images,
        *options,
        views=kinds,
        parts=train.accumulate,
        pipelines=pipelines,
        compiled=compiled,
        decodes=data.decoder == "cuda",
    )
    if pipelines is not None:  # errors are raised now, not later in a worker process
        first = torch.tensor([first_readable(images)])
        image = images.image(int(first))
        make_own_views([image], first, pipelines, data, train.seed, 0)
    return images, loader


class ViewLoader:
    """Views of every image, in a new order each epoch.

    Images that do not fill a batch are left out, or with `keep_last` make a smaller one. With
    `views=1`, for training on labels, the key is the query. With `decodes`, a GPU decodes JPEGs.
    An unreadable image is replaced by the next readable one; `unreadable` has those that this rank
    has met and the reasons, and more of them than data.max_unreadable stop the run.
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
        views: int | Sequence[ViewKind] = 2,
        parts: int = 1,
        pipelines: tuple[Pipeline, ...] | None = None,
        keep_last: bool = False,
        compiled: bool = False,
        decodes: bool = False,
    ) -> None:
        self.steps_per_epoch = steps_of(len(images), batch_size)
        if keep_last:
            self.steps_per_epoch = math.ceil(len(images) / batch_size)
        kinds = usual_views(views) if isinstance(views, int) else views
        self._maker, self._pipelines = ViewMaker(kinds, config, seed, compiled), pipelines
        self._coloured_on = self._maker.coloured_on(device)
        self.images, self.config, self.seed, self.device = images, config, seed, device
        self.batch_size, self._rows = batch_size, rows_of(rank, world_size, batch_size, parts)
        self.unreadable: dict[int, str] = {}
        self._prepared, self._decodes = False, decodes
        self._pool: WorkerPool[tuple[int, list[int]], ReadImages] | None = None
        self._files: WorkerPool[tuple[int, list[int]], ReadFiles] | None = None

    def prepare(self) -> None:
        """Decode the images to be cached, once, so that the first batch does not wait for them."""
        if not self._prepared:
            self._prepared = True
            if self._decodes:
                return
            self.images = self.images.decode_once(epochs=True)

    @cached_property
    def workers(self) -> WorkerChoice:
        """How many processes read images, chosen when the images are prepared."""
        if self.images.tensor is not None and self._pipelines is None:
            return choose_workers(None, self.device, held=True)
        first = list(range(min(len(self.images), len(self._rows))))
        held = self._pipelines is None and self.images.together(first) is not None
        sent = self._maker.batch_bytes(len(self._rows), self.device)
        return choose_workers(self.config.workers, self.device, held, sent)

    def reading(self) -> str:
        """Return by how many processes images are read, and why."""
        return str(self.workers)

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Yield this rank's batches of an epoch, from `first_step` on."""
        self.prepare()
        order = epoch_order(self.seed, epoch, len(self.images), self.config.shuffle)
        batches = order.split(self.batch_size)
        steps = [
            ids[self._rows[self._rows < len(ids)]]
            for ids in batches[first_step : self.steps_per_epoch]
            if len(ids) > self._rows[0]  # a rank may have no row of a last, smaller batch
        ]
        if self.images.tensor is None or self._pipelines is not None:
            read = self._decoded_there if self._decodes else self._from_files
            yield from read(epoch, steps)
            return
        for ids in steps:
            with timed("decode"):
                pixels = send(self.images.tensor[ids], self._coloured_on)
            with timed("augment"):
                coloured = self._maker.make(pixels, ids, epoch)
                views = [send(view, self.device) for view in coloured]
            yield batch_of(views, labels_of(self.images, ids), ids)

    def sizes(self, step: int) -> tuple[int, int]:
        """Return the number of images of a step on this rank and on all; see `keep_last`."""
        whole = min(self.batch_size, len(self.images) - step * self.batch_size)
        return int((self._rows < whole).sum()), whole

    def _from_files(self, epoch: int, steps: list[Tensor]) -> Iterator[Batch]:
        if self._pool is None:
            whole = self.workers.number > 0 and self._coloured_on.type == "cpu"
            maker = self._maker if self._pipelines is None else self._pipelines
            options = self.images, self.config, self.seed, maker, whole
            reader = partial(read_views, *options)
            self._pool = WorkerPool(reader, self.workers.number, self.device)
        reading = self._pool.run([(epoch, ids.tolist()) for ids in steps])
        for read in timed_each("waiting" if self.workers.number else "decode", reading):
            timed_beside(read.seconds if self.workers.number else 0.0)
            self.unreadable |= read.unreadable
            check_unreadable(self.unreadable, self.images, self.config.max_unreadable)
            with timed("augment"):
                views = finished_views(read, self._maker, epoch, self.device, self._coloured_on)
            yield batch_of(views, labels_of(self.images, read.ids), read.ids)

    def _decoded_there(self, epoch: int, steps: list[Tensor]) -> Iterator[Batch]:
        """Yield batches that the GPU decodes (data.decoder=cuda)."""
        most = allowed_unreadable(self.images, self.config.max_unreadable)
        if self._files is None:
            reader = partial(read_files, self.images, most)
            self._files = WorkerPool(reader, self.workers.number, self.device)
        reading = self._files.run([(epoch, ids.tolist()) for ids in steps])
        for read in timed_each("waiting" if self.workers.number else "decode", reading):
            timed_beside(read.seconds if self.workers.number else 0.0)
            check_unreadable(read.unreadable, self.images, self.config.max_unreadable)
            with timed("decode"):
                found, there = decoded(read, self.images, most, self._coloured_on)
            self.unreadable |= found.unreadable
            check_unreadable(self.unreadable, self.images, self.config.max_unreadable)
            with timed("augment"):
                views = self._maker.make(there.pixels, found.ids, epoch, there[1:])
            yield batch_of(views, labels_of(self.images, found.ids), found.ids)

    def close(self) -> None:
        """End the worker processes, if there are any; the next epoch starts new ones."""
        for pool in (self._pool, self._files):
            if pool is not None:
                pool.close()
        self._pool = self._files = None


def epoch_order(seed: int, epoch: int, number: int, shuffle: Shuffle) -> Int64[Tensor, " images"]:
    """Return the order of an epoch, a function of (seed, epoch).

    With blocks, neighbours on the disk are read at about the same time: blocks are shuffled, then
    the images of every 16 of them.
    """
    if shuffle == "full":
        return permutation(seed, epoch, number)
    blocks = torch.arange(number).split(BLOCK)
    chosen = permutation(seed_of("blocks", seed), epoch, len(blocks)).tolist()
    windows = torch.cat([blocks[block] for block in chosen]).split(BLOCK * TOGETHER)
    shuffled = (
        window[permutation(seed_of("window", seed, place), epoch, len(window))]
        for place, window in enumerate(windows)
    )
    return torch.cat(list(shuffled))


def evaluation_batches(
    images: ImageSet,
    image_size: int,
    batch_size: int,
    device: torch.device,
    workers: int | None = 0,
    max_unreadable: float = 0.05,
) -> Generator[
    tuple[
        Float32[Tensor, "batch channels size size"],
        Int64[Tensor, " batch"],
        Int64[Tensor, " batch"],
    ],
    None,
    None,
]:
    """Yield every image once, in order: evaluation crops, normalised, with labels and ids.

    Images are on the device, labels and ids on the host. Unreadable images are missing from the
    ids; more than a share of `max_unreadable` raise InputError.
    """
    images.decode_once()
    mean, std = channel_statistics(images.channels)
    read = partial(read_evaluation, images, image_size)
    pool = WorkerPool(read, 0 if images.tensor is not None else workers, device)
    jobs = [ids.tolist() for ids in torch.arange(len(images)).split(batch_size) if len(ids)]
    unreadable: dict[int, str] = {}
    try:
        for pixels, ids, new, *_ in pool.run(jobs):
            unreadable |= new
            check_unreadable(unreadable, images, max_unreadable)
            if len(ids):
                pictures = normalise(send(pixels, device).float().div_(255), mean, std)
                yield pictures, labels_of(images, ids), ids
    finally:
        pool.close()


def labels_of(images: ImageSet, ids: Int64[Tensor, " batch"]) -> Int64[Tensor, " batch"]:
    """Return the classes of images, UNKNOWN for those without."""
    return torch.full_like(ids, UNKNOWN) if images.labels is None else images.labels[ids]
