"""A bank of one embedding per image, for methods with a single encoder: InstDis, PIRL, CMC.

An image is contrasted with its own entry and with K entries of others, which are drawn anew at
every step. Read in HobbitLong/PyContrast (memory/mem_bank.py): entries start random, are drawn with
replacement, and become normalize(m old + (1 - m) new) when their image is seen. Decided: the K
entries are drawn once for the whole batch instead of for each query, so that they are one matrix,
as MoCo's queue is, and points can be mixed in closed form; the entry of the query's own image never
counts as its negative, which it sometimes does there; if K is at least as large as the bank, every
entry is a negative once.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import normalize

from hardmix.data.batches import Batch
from hardmix.methods.base import Materials, Method, StepOutcome, TrainingPosition
from hardmix.methods.contrast_measures import ContrastOutcome, describe_contrast, hardness_of
from hardmix.methods.mixing_schedule import MixingSchedule
from hardmix.mixing.infonce import Contrast
from hardmix.mixing.plans import MixPlan
from hardmix.mixing.queue import UNKNOWN, MemoryQueue, equal_and_known
from hardmix.runtime.device import send
from hardmix.runtime.distributed import gather_batch
from hardmix.runtime.profile import timed
from hardmix.runtime.random_numbers import seed_of
from hardmix.settings.config import PretrainConfig


class ImageBank(MemoryQueue):
    """A queue whose slot i belongs to image i for good."""

    def __init__(self, config: PretrainConfig, materials: Materials, purpose: str = "bank") -> None:
        number = materials.count_images(f"method={config.method} stores an embedding of each image")
        seed = seed_of(purpose, config.train.seed)
        generator = torch.Generator().manual_seed(seed)
        super().__init__(number, config.model.dim, generator=generator)
        self.ids.copy_(torch.arange(len(self)))
        self._counters[1] = len(self)

    @torch.no_grad()
    def remember(
        self,
        keys: Float[Tensor, "batch dim"],
        labels: Int[Tensor, " batch"],
        ids: Int[Tensor, " batch"],
        momentum: float,
    ) -> None:
        """Move the entries of these images towards their new embeddings, of unit length."""
        # An image may occur twice, in place of an unreadable one: both rows write the first.
        keys = keys[(ids[:, None] == ids).int().argmax(dim=1)]
        moved = torch.lerp(keys, self.keys.index_select(0, ids), momentum)
        self.keys.index_copy_(0, ids, normalize(moved, dim=1))
        self.labels.index_copy_(0, ids, labels)

    def rows(self, number: int, seed: int) -> Int[Tensor, " K"]:
        """Return the entries that are a step's negatives, the same on all ranks by the seed."""
        if number >= len(self):
            return self.ids
        generator = torch.Generator().manual_seed(seed)
        return send(torch.randint(len(self), (number,), generator=generator), self.keys.device)


class BankMethod(Method):
    """A method with one `encoder`, whose keys are the entries of its images in a bank."""

    encoder: Any
    """Network with a `trunk`; called with images, it returns the queries unless `embed` says so."""
    memory: ImageBank

    def __init__(self, config: PretrainConfig, materials: Materials) -> None:
        super().__init__(config, materials)
        self.mixing = MixingSchedule(config, materials.mixing)

    @property
    def trunk(self) -> nn.Module:  # type: ignore[override]
        """Return the encoder without its heads."""
        trunk: nn.Module = self.encoder.trunk
        return trunk

    def networks(self) -> dict[str, nn.Module]:
        """Return the encoder."""
        return {"encoder": self.encoder}

    def contrast(
        self,
        query: Float[Tensor, "batch dim"],
        bank: ImageBank,
        part: Batch,
        at: TrainingPosition,
        purpose: int = 0,
    ) -> ContrastOutcome:
        """Return Eq. 1 of queries with their images' entries, and others as negatives.

        `purpose` distinguishes the points of several calls; their negatives are the same.
        """
        config, mixing = self.config, self.mixing
        with timed("loss"):
            seed = seed_of("negatives", config.train.seed, at.step, at.part)
            rows = bank.rows(config.train.queue_size, seed)
            labels = bank.labels.index_select(0, rows)
            own = equal_and_known(part.ids, rows)
            exclude = own | equal_and_known(part.labels, labels) if config.oracle else own
            outcome, plan = mixing.loss.contrast(
                query,
                bank.keys.index_select(0, part.ids),
                bank.keys.index_select(0, rows),
                exclude,
                mix=mixing.started(at),
                generator=mixing.generator(at, purpose),
                progress=mixing.progress(at.epoch),
                normalised=True,
                check=False,
            )
        new = query.detach()
        return ContrastOutcome(outcome.loss, outcome, plan, new, exclude, part.labels, labels, own)

    def after_step(self, batch: Batch, outcomes: Sequence[StepOutcome]) -> None:
        """Write this step's embeddings into the banks, in the order of the global batch."""
        keys = torch.cat([part.key for part in cast("Sequence[ContrastOutcome]", outcomes)])
        banks, parts = list(self.banks().values()), self.config.train.accumulate
        for bank, columns in zip(banks, keys.chunk(len(banks), dim=1), strict=True):
            rows, labels, ids = gather_batch(parts, columns, batch.labels, batch.ids)
            bank.remember(rows, labels, ids, self.options.bank_momentum)

    def banks(self) -> dict[str, ImageBank]:
        """Return its banks by their names in messages; of several, each has a part of a key."""
        return {"bank": self.memory}

    def replicated(self) -> dict[str, Tensor]:
        """Return the banks."""
        return {
            f"{title}'s {name}": buffer
            for title, bank in self.banks().items()
            for name, buffer in bank.named_buffers()
        }

    def forget_images(self) -> None:
        """Forget the images' classes; entries are overwritten when their images are seen."""
        for bank in self.banks().values():
            bank.labels.fill_(UNKNOWN)

    def describe(self, outcomes: Sequence[StepOutcome]) -> dict[str, float]:
        """Return Fig. 2's measures."""
        return describe_contrast(outcomes, self.config)

    def hardness(self, outcomes: Sequence[StepOutcome]) -> dict[str, list[Any]]:
        """Return Fig. 2a for a step, and histograms of similarities."""
        return hardness_of(outcomes, self.config)

    def embed(self, images: Float[Tensor, "batch channels y x"]) -> Float[Tensor, "batch dim"]:
        """Return the queries of images, to be contrasted with `memory`."""
        embeddings: Tensor = self.encoder(images)
        return embeddings

    @torch.no_grad()
    def contrast_images(
        self, images: Tensor, exclude: Tensor | None, generator: torch.Generator
    ) -> tuple[Contrast, MixPlan | None]:
        """Contrast images with the whole bank."""
        query = self.embed(images)
        return self.mixing.loss.contrast(
            query,
            query,
            self.memory,
            exclude,
            mix=self.mixing.wanted,
            generator=generator,
            progress=1.0,
        )
