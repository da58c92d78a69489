"""Batches of two views from WebDataset archives, which are a stream and not a numbered set."""

from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from hardmix.data.batches import Batch, batch_of, rows_of, steps_of
from hardmix.data.own_views import Pipeline, make_own_views
from hardmix.data.shards import ShardImage, open_shards
from hardmix.data.view_kinds import ViewKind, ViewMaker, usual_views
from hardmix.errors import InputError
from hardmix.runtime.device import send
from hardmix.runtime.profile import timed
from hardmix.settings.config import DataConfig


class ShardLoader:
    """Views of every image of WebDataset archives: a stream, read by this process.

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
        views: int | Sequence[ViewKind] = 2,
        parts: int = 1,
        pipelines: tuple[Pipeline, ...] | None = None,
    ) -> None:
        kinds = usual_views(views) if isinstance(views, int) else views
        self._maker, self._pipelines = ViewMaker(kinds, config, seed), pipelines
        if config.num_images is None:
            raise InputError(
                "data.num_images is not set, and shards do not record how many images they hold:"
                " set it to the number of images."
            )
        self.steps_per_epoch = steps_of(config.num_images, batch_size)
        self.config, self.seed, self.device = config, seed, device
        self.batch_size, self._rows = batch_size, rows_of(rank, world_size, batch_size, parts)
        self.unreadable: dict[int, str] = {}

    def prepare(self) -> None:
        """Do nothing: a stream is not cached."""

    def reading(self) -> str:
        """Return how the stream is read."""
        return "no workers: shards are a stream"

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
        """Do nothing: there are no worker processes."""

    def _batch(self, samples: list[tuple[Tensor, int, int]], epoch: int) -> Batch:
        images, labels, ids = zip(*samples, strict=True)
        options = self.config, self.seed, epoch
        numbers = torch.tensor(ids)
        with timed("augment"):
            if self._pipelines is None:
                crops = self._maker.crop(images, numbers, epoch)
                if not self._maker.on_cpu:
                    crops = [send(kind, self.device) for kind in crops]
                made: Sequence[Tensor] = self._maker.colour(crops, numbers, epoch)
            else:
                made = tuple(make_own_views(images, numbers, self._pipelines, *options))
            views = [send(view, self.device) for view in made]
        return batch_of(views, torch.tensor(labels), numbers)
