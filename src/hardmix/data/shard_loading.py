"""Batches of views from archives that are a stream, split by process and worker.

The lanes of shards.py lie side by side in a batch: lane 0 gives its first rows, and so on. A
process takes its rows of every batch and reads their lanes, each of its workers some of them. Of a
lane that two processes need, both read all and decode their own.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor

from hardmix.data.batches import Batch, batch_of, rows_of, steps_of
from hardmix.data.own_views import Pipeline
from hardmix.data.shards import (
    Lane,
    ShardImage,
    archives_of,
    lane_archives,
    number_of_lanes,
    open_lane,
)
from hardmix.data.view_kinds import ViewKind, ViewMaker, usual_views
from hardmix.data.worker_count import WorkerChoice, choose_workers
from hardmix.data.worker_reads import (
    ReadImages,
    coloured,
    finished_views,
    make_crops,
    nothing_read,
)
from hardmix.data.workers import WorkerPool
from hardmix.errors import InputError
from hardmix.runtime.console import say, warn
from hardmix.runtime.profile import timed, timed_each
from hardmix.settings.config import DataConfig

ROUGHLY = 0.9
"""Of the images that data.num_images promises, those that some of the archives must foretell."""


class StreamLayout(NamedTuple):
    """Which lane a row of the batch takes its images from."""

    archives: list[str]
    lanes: int
    batch_size: int
    parts: int
    """As train.accumulate: every part of a batch takes from all lanes."""

    @property
    def each(self) -> int:
        """Images of a lane in a batch."""
        return self.batch_size // self.lanes

    def places(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Return lane, and place among the lane's images of a step, for each of these rows."""
        part = self.batch_size // self.parts
        width = part // self.lanes
        found = []
        for row in rows:
            number, within = divmod(row, part)
            found.append((within // width, number * width + within % width))
        return found

    def shares(self, rows: Sequence[int], number: int) -> list[list[int]]:
        """Return these rows in so many shares, each with lanes of its own."""
        lane_of = {row: lane for row, (lane, _) in zip(rows, self.places(rows), strict=True)}
        lanes = sorted(set(lane_of.values()))
        share_of = {lane: place * number // len(lanes) for place, lane in enumerate(lanes)}
        return [[r for r in rows if share_of[lane_of[r]] == share] for share in range(number)]


class StreamRead(NamedTuple):
    """What a worker makes of its rows of a step."""

    images: ReadImages
    labels: Int64[Tensor, " batch"]
    ended: dict[int, int]
    """Lanes that are at their end, and how many images each has."""


class StreamReader:
    """Reads a share of the rows, step by step; any other step than the next one starts anew."""

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
        """By share: epoch and step that come next, and the lanes, which are there."""

    def __call__(self, job: tuple[int, int, int]) -> StreamRead:
        """Return the images of (epoch, step, share of the rows)."""
        epoch, step, share = job
        lanes = self._lanes_at(epoch, step, share)
        unreadable: dict[int, str] = {}
        allowed = self._config.max_unreadable * (self._config.num_images or 0)
        samples: list[ShardImage] = []
        for lane, place in self._places[share]:
            sample = lanes[lane].image(place, unreadable, allowed)
            if sample is None:
                return StreamRead(nothing_read(unreadable), torch.empty(0).long(), {})
            samples.append(sample)
        for each in lanes.values():
            each.skip(self._layout.each)
        self._open[share] = epoch, step + 1, lanes
        ended = {number: lane.found for number, lane in lanes.items() if lane.found is not None}
        return self._made(samples, epoch, unreadable, ended)

    def _lanes_at(self, epoch: int, step: int, share: int) -> dict[int, Lane]:
        """Return the lanes of a share, before this step."""
        *at, lanes = self._open.pop(share, (-1, -1, {}))
        if at == [epoch, step]:
            return lanes
        for each in lanes.values():
            each.close()
        layout = self._layout
        options = layout.archives, self._config, self._seed, epoch
        wanted = dict.fromkeys(lane for lane, _ in self._places[share])
        lanes = {lane: open_lane(*options, lane, layout.lanes) for lane in wanted}
        for each in lanes.values():
            each.skip(step * layout.each)
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
    """Views of the images of WebDataset archives that are a stream: this process's rows."""

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
    ) -> None:
        kinds = usual_views(views) if isinstance(views, int) else views
        self._maker, self._pipelines = ViewMaker(kinds, config, seed), pipelines
        archives = archives_of(config)
        self.steps_per_epoch = steps_of(config.num_images or 0, batch_size)
        self._rows = rows_of(rank, world_size, batch_size, parts).tolist()
        lanes = number_of_lanes(len(archives), batch_size // parts)
        self.layout = StreamLayout(archives, lanes, batch_size, parts)
        self.config, self.seed, self.device = config, seed, device
        self._coloured_on = torch.device("cpu") if self._maker.on_cpu else device
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
        """How many processes read the stream: at most one for each lane."""
        item = 4 if self._coloured_on.type == "cpu" else 1
        sent = self._maker.numbers_of(self.config.channels) * len(self._rows) * item
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
            skipped = first_step * self.layout.each * len(self.lanes)
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
            found = sum(ended.values()) * len(archives) // read
            if found < total * (1.0 if read == len(archives) else ROUGHLY):
                about = "" if read == len(archives) else "about "
                raise InputError(
                    f"data.num_images={config.num_images}, but {config.root} holds {about}{found}:"
                    " correct data.num_images."
                )
        if not self._warned:
            self._warned = True
            warn(
                f"a lane of the stream is at its end before the epoch is, after"
                f" {min(ended.values())} images: it repeats some of them. Its archives hold fewer"
                " than others."
            )

    def close(self) -> None:
        """End the worker processes, if there are any; the next epoch starts new ones."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
