"""SwAV (Caron et al. 2020): predict the code of one view from another.

Embeddings z are compared with K trained prototypes C of unit length. The codes Q of a batch's large
crops s, without gradient, are as similar to z C as they can be while every prototype gets the same
share of the batch (Sinkhorn's algorithm); every other crop v predicts them:

    L = mean over s in {1, 2} of mean over v != s of  - sum_k Q_s,k log softmax(z_v C / tau)_k

Read in facebookresearch/swav (main_swav.py, src/resnet50.py, src/multicropdataset.py): crops of one
size pass the trunk together, and all pass the head together, with batch norm over all processes;
prototypes are normalised before each step and not trained at first; for small batches earlier
embeddings join the codes' batch, one queue for each large crop, once it is full. Decided: every
process computes the codes of the whole batch, so that they do not depend on their number; the
cosine schedule ends at 0 instead of a thousandth. SwAV has no negatives: `mix.*` is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from hardmix.data.batches import Batch
from hardmix.data.view_kinds import ViewKind
from hardmix.methods.base import (
    Materials,
    Method,
    StepOutcome,
    TrainingPosition,
    check_embeddings,
)
from hardmix.methods.codes import CropEncoder, sinkhorn, swapped_loss
from hardmix.mixing.queue import MemoryQueue
from hardmix.models.encoders import build_encoder
from hardmix.models.synchronised import synchronise_batch_norm
from hardmix.runtime.distributed import gather, rank
from hardmix.runtime.profile import timed
from hardmix.runtime.random_numbers import seed_of
from hardmix.settings.config import PretrainConfig
from hardmix.settings.method_options import SwavOptions

LARGE = 2
"""Crops that have codes."""
SMALL_SCALE = (0.05, 0.14)
"""Least and most area of a small crop, as fractions of the image."""


@dataclass
class SwavOutcome(StepOutcome):
    """Embeddings and codes of a batch."""

    embeddings: tuple[Tensor, ...]
    """Of the large crops."""
    codes: Tensor
    queued: bool
    """Whether the embeddings are to be queued."""


class Swav(Method):
    """One encoder, prototypes, and a queue of embeddings for small batches."""

    Options = SwavOptions

    def __init__(self, config: PretrainConfig, materials: Materials) -> None:
        super().__init__(config, materials)
        self.options = cast("SwavOptions", config.options)
        data, model = config.data, config.model
        encoder = build_encoder(model, data.channels, materials.trunk, image_size=data.image_size)
        crops = CropEncoder(encoder.trunk, encoder.width, model.dim)
        device = materials.compute.device
        self.encoder = cast("CropEncoder", synchronise_batch_norm(crops, device))
        self.prototypes = nn.Linear(model.dim, self.options.prototypes, bias=False)
        generator = torch.Generator().manual_seed(seed_of("queue", config.train.seed))
        self.queues = nn.ModuleList(
            MemoryQueue(self.options.queue_size, model.dim, start="empty", generator=generator)
            for _ in range(LARGE if self.options.queue_size else 0)
        )

    @classmethod
    def view_kinds(cls, config: PretrainConfig) -> tuple[ViewKind, ...]:
        """Two as data.* says, and small ones."""
        options = cast("SwavOptions", config.options)
        small = ViewKind(options.small_crops, options.small_size, SMALL_SCALE)
        return (ViewKind(LARGE), small) if options.small_crops else (ViewKind(LARGE),)

    @property
    def trunk(self) -> nn.Module:  # type: ignore[override]
        """The encoder without its head."""
        return self.encoder.trunk

    def networks(self) -> dict[str, nn.Module]:
        """The encoder, and the prototypes, which are not trained in the first epoch."""
        return {"encoder": self.encoder, "prototypes": self.prototypes}

    def example(self, name: str) -> tuple[Tensor, ...]:
        """Two black images, or their embeddings."""
        (images,) = super().example(name)
        return (images if name == "encoder" else images.new_zeros(2, self.config.model.dim),)

    @torch.no_grad()
    def begin_step(self, at: TrainingPosition) -> None:  # noqa: ARG002
        """Bring the prototypes back to unit length."""
        self.prototypes.weight.copy_(normalize(self.prototypes.weight, dim=1))

    def loss(self, part: Batch, at: TrainingPosition) -> SwavOutcome:
        """Every crop's prediction of the codes of the large crops other than itself."""
        with timed("query"):
            embeddings = self.network("encoder")(*part.views)
        if embeddings.device.type == "cpu":
            check_embeddings(embedding=embeddings)
        frozen = at.epoch < self.options.frozen_epochs
        with timed("loss"), torch.autocast(embeddings.device.type, enabled=False):
            if frozen:
                scores = embeddings @ self.prototypes.weight.detach().T
            else:
                scores = self.network("prototypes")(embeddings)
            views = scores.chunk(len(part.views))
            codes = [self._codes(view.detach(), place) for place, view in enumerate(views[:LARGE])]
            loss = swapped_loss(views, codes, self.config.train.temperature)
        large = embeddings.detach().chunk(len(part.views))[:LARGE]
        return SwavOutcome(loss, large, codes[0], at.epoch >= self.options.queue_epoch)

    @torch.no_grad()
    def _codes(self, scores: Tensor, place: int) -> Tensor:
        """The codes of this process's rows, made with the rows of all and those in the queue."""
        number, everyone = len(scores), gather(scores)
        queue = cast("MemoryQueue", self.queues[place]) if len(self.queues) else None
        if queue is not None and queue.unfilled() is None:
            everyone = torch.cat([everyone, queue.keys @ self.prototypes.weight.T])
        codes = sinkhorn(everyone, self.options.epsilon, self.options.iterations)
        return codes[rank() * number :][:number]

    def after_step(self, batch: Batch, outcomes: Sequence[StepOutcome]) -> None:
        """Queue the embeddings of the large crops, from swav.queue_epoch on."""
        (outcome,) = cast("Sequence[SwavOutcome]", outcomes)
        ids, labels = gather(batch.ids), gather(batch.labels)
        for queue, rows in zip(self.queues, outcome.embeddings, strict=False):
            if outcome.queued:
                cast("MemoryQueue", queue).enqueue(gather(rows), labels, ids, normalised=True)

    def replicated(self) -> dict[str, Tensor]:
        """The queues."""
        return dict(self.queues.named_buffers(prefix="queue"))

    def describe(self, outcomes: Sequence[StepOutcome]) -> dict[str, float]:
        """How sharp the codes are, and how many prototypes are any image's first."""
        codes = gather(cast("SwavOutcome", outcomes[-1]).codes)
        entropy = -(codes * codes.clamp(min=1e-12).log()).sum(dim=1).mean()
        used = codes.argmax(dim=1).unique().numel() / min(codes.shape)
        return {"code_entropy": float(entropy), "prototypes_used": float(used)}
