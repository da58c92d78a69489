"""MoCo (Sec. 3.1) and MoCHi (Sec. 4): two encoders, a queue, and InfoNCE between them.

MoCHi is MoCo whose loss mixes; MoCo v1 and v2 differ only in settings (`recipes`). With
`loss.jigsaw` they have InfoMin's second branch (Tian et al. 2020): nine shuffled tiles of the image
are another query for the same key, and L = (1 - weight) L(query) + weight L(jigsaw). Read in
HobbitLong/PyContrast (contrast_trainer.py, mem_moco.py). With `data.small_crops` they have SwAV's
multi-crop (Caron et al. 2020): every small crop is a further query for the image's key,

    L + 1 / M sum_m L(small query m)

with the weights of Wang et al. 2022 (facebookresearch/asym-siam, main_moco.py), whose gain in MoCo
this is: all small crops together weigh as much as the large one. Decided: small crops pass the
encoder in one batch, as in SwAV (there one by one). With `mix.*`, points join all terms.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from hardmix.data.batches import Batch, Loader
from hardmix.data.views import ViewKind, small_views
from hardmix.methods.base import (
    Materials,
    Method,
    StepOutcome,
    TrainingPosition,
    check_embeddings,
    compile_options,
)
from hardmix.methods.clusters import ImageClusters
from hardmix.methods.contrast_measures import ContrastOutcome, describe_contrast, hardness_of
from hardmix.methods.jigsaw import TILES, JigsawEncoder, draw_tiles, jigsaw_view
from hardmix.methods.mixing_schedule import MixingSchedule
from hardmix.mixing.infonce import Contrast
from hardmix.mixing.loss import MochiLoss
from hardmix.mixing.plans import MixPlan
from hardmix.mixing.queue import UNKNOWN, MemoryQueue
from hardmix.models.backbones import feature_width
from hardmix.models.encoders import (
    QueryKeyPair,
    ShuffledImages,
    encode_keys,
    shuffled_rows,
    shuffling_groups,
)
from hardmix.runtime.distributed import gather_batch, together
from hardmix.runtime.profile import timed
from hardmix.runtime.random_numbers import seed_of
from hardmix.settings.config import PretrainConfig
from hardmix.settings.methods import jigsaw_sizes, small_crop_size
from hardmix.settings.named_choices import Compiled, QueueStart


class Moco(Method):
    """MoCo or MoCHi: two encoders, a queue, and the loss between them."""

    memory: MemoryQueue

    def __init__(self, config: PretrainConfig, materials: Materials) -> None:
        super().__init__(config, materials)
        self.mixing = MixingSchedule(config, materials.mixing)
        model, train, encoder = config.model, config.train, self.new_encoder()
        if config.data.small_crops:  # a trunk may take images of one size only
            feature_width(
                encoder.trunk, config.data.channels, small_crop_size(config.data.image_size)
            )
        if config.loss.jigsaw:
            encoder = JigsawEncoder(encoder, model.dim, model.head)
        self.pair = QueryKeyPair(encoder, model.key_momentum, model.key_bn_splits)
        self._shuffled_among = shuffling_groups(model)
        start: QueueStart = "random" if train.queue_start == "random" else "empty"
        generator = torch.Generator().manual_seed(seed_of("queue", train.seed))
        self.memory = MemoryQueue(train.queue_size, model.dim, start=start, generator=generator)
        self.clusters = None
        if config.loss.filter == "same-cluster":
            self.clusters = ImageClusters(config, materials)
        self._contrast = _contrast

    @classmethod
    def view_kinds(cls, config: PretrainConfig) -> tuple[ViewKind, ...]:
        """Return two views as data.* says, and those of loss.jigsaw and data.small_crops."""
        kinds, size = list(super().view_kinds(config)), config.data.image_size
        if config.loss.jigsaw:
            kinds.append(jigsaw_view(jigsaw_sizes(size)[0]))
        if config.data.small_crops:
            kinds.append(small_views(config.data.small_crops, small_crop_size(size)))
        return tuple(kinds)

    @property
    def trunk(self) -> nn.Module:  # type: ignore[override]
        """Return the query encoder without its head, which target tasks use."""
        return self.pair.query.trunk

    def networks(self) -> dict[str, nn.Module]:
        """Return the query encoder; the key encoder follows by momentum."""
        return {"query": self.pair.query}

    def compile_parts(self, what: Compiled) -> None:
        """Compile both encoders and perhaps the loss."""
        super().compile_parts(what)
        self.pair.key.compile(**compile_options(what))
        if what != "encoders":
            self._contrast = torch.compile(_contrast)

    def begin_epoch(self, epoch: int) -> None:
        """Cluster the images, if loss.filter=same-cluster."""
        if self.clusters is not None:
            self.clusters.update(self.pair.key, epoch)

    def begin_step(self, at: TrainingPosition) -> None:  # noqa: ARG002
        """MoCo's Eq. 2: move the key encoder by momentum, first of all, as in official MoCo."""
        with timed("key"):
            self.pair.update_key()

    def loss(self, part: Batch, at: TrainingPosition) -> ContrastOutcome:
        """Return Eq. 1 with the queue's keys and, once mixing has started, the points of a plan."""
        tiles = []
        if self.config.loss.jigsaw:
            _, tile = jigsaw_sizes(self.config.data.image_size)
            tiles.append(draw_tiles(part.views[2], tile, self.config.train.seed, at))
        query, *jigsaw, key = self.encode(part, at, *tiles)
        outcome = self.compare(query, key, part, at)
        for shuffled in jigsaw:
            term = self.compare(shuffled, key, part, at, purpose=1).loss
            outcome.measures["jigsaw_loss"] = term.detach()
            outcome.loss = torch.lerp(outcome.loss, term, self.config.loss.jigsaw)
        if self.config.data.small_crops:
            term = self.small_loss(key, part, at)
            outcome.measures["small_loss"] = term.detach()
            outcome.loss = outcome.loss + term
        return outcome

    def small_loss(self, key: Tensor, part: Batch, at: TrainingPosition) -> Tensor:
        """Return the mean loss of the small crops, each a query for the image's key."""
        number = self.config.data.small_crops
        with timed("query"):
            queries = self.network("query")(torch.cat(part.views[-number:])).chunk(number)
        check_embeddings(**{f"small query {place}": each for place, each in enumerate(queries)})
        terms = [
            self.compare(query, key, part, at, purpose=2 + place).loss
            for place, query in enumerate(queries)
        ]
        return torch.stack(terms).mean()

    def encode(self, part: Batch, at: TrainingPosition, *tiles: Tensor) -> tuple[Tensor, ...]:
        """Return queries, those of `tiles` if any, and keys, in shuffled groups and detached."""
        images = ShuffledImages(part.views[1], self._shuffle(len(part.ids), at))
        with timed("query"):
            embeddings = self.network("query")(part.query, *tiles)
        with timed("key"):
            key = images.encode(self.pair.key)
        queries: tuple[Tensor, ...] = embeddings if tiles else (embeddings,)
        check_embeddings(**dict(zip(("query", "jigsaw"), queries, strict=False)), key=key)
        return *queries, key

    def example(self, name: str) -> tuple[Tensor, ...]:
        """Return two black images and, with loss.jigsaw, their tiles."""
        (images,) = super().example(name)
        if not self.config.loss.jigsaw:
            return (images,)
        _, size = jigsaw_sizes(self.config.data.image_size)
        return images, images.new_zeros(2, TILES, images.shape[1], size, size)

    def compare(
        self, query: Tensor, key: Tensor, part: Batch, at: TrainingPosition, purpose: int = 0
    ) -> ContrastOutcome:
        """Return Eq. 1 for queries and keys; `purpose` distinguishes the draws of several calls."""
        with timed("loss"):
            exclude = self._exclude(part)
            outcome, plan = self._contrast(
                self.mixing.loss,
                query,
                key,
                self.memory,
                exclude,
                mix=self.mixing.started(at),
                generator=self.mixing.generator(at, purpose),
                progress=self.mixing.progress(at.epoch),
            )
        labels = self.memory.labels.clone() if at.described else self.memory.labels
        return ContrastOutcome(outcome.loss, outcome, plan, key, exclude, part.labels, labels)

    def after_step(self, batch: Batch, outcomes: Sequence[StepOutcome]) -> None:
        """Write this step's keys into the queue, after it was read, so that no key meets itself.

        They have the order of the global batch, so that the queue is the same on every rank.
        """
        self._enqueue(batch, [part.key for part in cast("Sequence[ContrastOutcome]", outcomes)])

    @torch.no_grad()
    def prepare(self, loader: Loader) -> None:
        """Encode images to fill the queue before training, if train.queue_start=prefill."""
        if self.config.train.queue_start != "prefill":
            return
        before = TrainingPosition(-1, -1)
        while self.memory.unfilled() is not None:
            for batch in together(loader.epoch(-1)):
                with self.materials.compute.autocast():
                    shuffle = self._shuffle(len(batch.ids), before)
                    self._enqueue(batch, [encode_keys(self.pair.key, batch.views[1], shuffle)])
                if self.memory.unfilled() is None:
                    break

    def replicated(self) -> dict[str, Tensor]:
        """Return the queue and the images' clusters."""
        queue = {f"queue's {name}": each for name, each in self.memory.named_buffers()}
        return queue if self.clusters is None else queue | {"clusters": self.clusters.number}

    @torch.no_grad()
    def adopt(self, parts: dict[str, Tensor]) -> None:
        """Load head, key encoder and queue of a MoCo checkpoint, if their shapes match."""
        head = {k.removeprefix("head."): v for k, v in parts.items() if k.startswith("head.")}
        for encoder in (self.pair.query, self.pair.key) if head else ():
            encoder.head.load_state_dict(head)
        key = {k.removeprefix("key."): v for k, v in parts.items() if k.startswith("key.")}
        self.pair.key.load_state_dict(self.pair.key.state_dict() | key)
        if "queue" in parts and parts["queue"].shape == self.memory.keys.shape:
            self.memory.enqueue(parts["queue"])

    def forget_images(self) -> None:
        """Keep the queue's keys but forget their image ids and labels."""
        self.memory.ids.fill_(UNKNOWN)
        self.memory.labels.fill_(UNKNOWN)
        if self.clusters is not None:
            self.clusters.forget()

    def describe(self, outcomes: Sequence[StepOutcome]) -> dict[str, float]:
        """Return Fig. 2's measures for the last part of a step, by name."""
        filled = float(self.memory.filled / len(self.memory))
        return describe_contrast(outcomes, self.config) | {"queue_filled": filled}

    def hardness(self, outcomes: Sequence[StepOutcome]) -> dict[str, list[Any]]:
        """Return Fig. 2a for a step, and histograms of similarities."""
        return hardness_of(outcomes, self.config)

    @torch.no_grad()
    def contrast_images(
        self, images: Tensor, exclude: Tensor | None, generator: torch.Generator
    ) -> tuple[Contrast, MixPlan | None]:
        """Contrast images, given to both encoders, with the queue; mix as at training's end."""
        return self.mixing.loss.contrast(
            self.pair.query(images),
            self.pair.key(images),
            self.memory,
            exclude,
            mix=self.mixing.wanted,
            generator=generator,
            progress=1.0,
        )

    def _exclude(self, batch: Batch) -> Tensor | None:
        masks = []
        if self.config.oracle:
            masks.append(self.memory.same_class(batch.labels))
        if self.config.train.exclude_same_image:
            masks.append(self.memory.same_image(batch.ids))
        if self.clusters is not None:
            masks.append(self.clusters.same_cluster(batch.ids, self.memory))
        return torch.stack(masks).any(dim=0) if masks else None

    def _enqueue(self, batch: Batch, keys: list[Tensor]) -> None:
        rows = torch.cat(keys), batch.labels, batch.ids
        gathered = gather_batch(self.config.train.accumulate, *rows)
        self.memory.enqueue(*gathered, normalised=True)

    def _shuffle(self, number: int, at: TrainingPosition) -> Tensor:
        """Return an order of the global batch, which is the same on every rank."""
        seed = seed_of("shuffle", self.config.train.seed, at.step, at.part, 0)
        generator = torch.Generator().manual_seed(seed)
        return shuffled_rows(number, self._shuffled_among, generator)


def _contrast(loss: MochiLoss, *embeddings: Any, **options: Any) -> tuple[Contrast, MixPlan | None]:
    """Return the loss as a step calls it; train.compile=all turns this into one graph."""
    return loss.contrast(*embeddings, **options, normalised=True, check=False)
