"""SwAV (Caron et al. 2020): predict the code of one view from another.

Embeddings z are compared with K trained prototypes C of unit length. The codes Q of a batch's large
crops s, without gradient, are as similar to z C as possible while every prototype gets the same
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
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import log_softmax, normalize

from hardmix.data.batches import Batch
from hardmix.data.views import ViewKind, small_views
from hardmix.methods.base import (
    Materials,
    Method,
    StepOutcome,
    TrainingPosition,
    check_embeddings,
)
from hardmix.mixing.queue import MemoryQueue
from hardmix.models.batch_norm import synchronise_batch_norm
from hardmix.models.encoders import batch_norm_mlp
from hardmix.runtime.distributed import gather, rank
from hardmix.runtime.profile import timed
from hardmix.runtime.random_numbers import seed_of
from hardmix.settings.config import PretrainConfig
from hardmix.settings.methods import SwavOptions

LARGE = 2
"""Crops that have codes."""


@dataclass
class SwavOutcome(StepOutcome):
    """Embeddings and codes of a batch, for the queue and for `describe`."""

    embeddings: tuple[Tensor, ...]
    """Embeddings of each large crop."""
    codes: Tensor
    """Codes of the first large crop."""
    queued: bool
    """Whether the embeddings are to be queued."""


class CropEncoder(nn.Module):
    """A network from crops of several sizes to embeddings of unit length, crop by crop."""

    def __init__(self, trunk: nn.Module, width: int, dim: int) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = batch_norm_mlp(width, width, dim)

    def forward(self, *crops: Float[Tensor, "batch channels _ _"]) -> Float[Tensor, "rows dim"]:
        """Return the embeddings of all crops, in float32; equal sizes must follow each other."""
        sizes = list(dict.fromkeys(crop.shape[-1] for crop in crops))
        groups = [[crop for crop in crops if crop.shape[-1] == size] for size in sizes]
        features = torch.cat([self.trunk(torch.cat(group)) for group in groups])
        return normalize(self.head(features).float(), dim=1)


class Swav(Method):
    """One encoder, prototypes, and a queue of embeddings for small batches."""

    options: SwavOptions

    def __init__(self, config: PretrainConfig, materials: Materials) -> None:
        super().__init__(config, materials)
        model = config.model
        encoder = self.new_encoder()
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
        """Return two views as data.* says, and small ones."""
        options = cast("SwavOptions", config.options)
        small = small_views(options.small_crops, options.small_size)
        return (ViewKind(LARGE), small) if options.small_crops else (ViewKind(LARGE),)

    @property
    def trunk(self) -> nn.Module:  # type: ignore[override]
        """Return the encoder without its head."""
        return self.encoder.trunk

    def networks(self) -> dict[str, nn.Module]:
        """Return the encoder, and the prototypes, which are not trained in the first epoch."""
        return {"encoder": self.encoder, "prototypes": self.prototypes}

    def example(self, name: str) -> tuple[Tensor, ...]:
        """Return two black images, or embeddings of two."""
        (images,) = super().example(name)
        return (images if name == "encoder" else images.new_zeros(2, self.config.model.dim),)

    @torch.no_grad()
    def begin_step(self, at: TrainingPosition) -> None:  # noqa: ARG002
        """Normalise the prototypes to unit length."""
        self.prototypes.weight.copy_(normalize(self.prototypes.weight, dim=1))

    def loss(self, part: Batch, at: TrainingPosition) -> SwavOutcome:
        """Return the loss of every crop's prediction of the codes of the other large crops."""
        with timed("query"):
            embeddings = self.network("encoder")(*part.views)
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
        """Return the codes of this process's rows, made with all rows and those in the queue."""
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
        """Return the queues."""
        return dict(self.queues.named_buffers(prefix="queue"))

    def describe(self, outcomes: Sequence[StepOutcome]) -> dict[str, float]:
        """Return how sharp the codes are, and how many prototypes are the first of an image."""
        codes = gather(cast("SwavOutcome", outcomes[-1]).codes)
        entropy = -(codes * codes.clamp(min=1e-12).log()).sum(dim=1).mean()
        used = codes.argmax(dim=1).unique().numel() / min(codes.shape)
        return {"code_entropy": float(entropy), "prototypes_used": float(used)}


@torch.no_grad()
def sinkhorn(
    scores: Float[Tensor, "batch k"], epsilon: float, iterations: int
) -> Float[Tensor, "batch k"]:
    """The paper's Eq. 4 and 5: codes whose rows sum to 1 and whose columns sum to batch / k."""
    # The first iteration removes any factor of a column; this one keeps exp within its range.
    codes = scores.sub(scores.amax(dim=0)).div_(epsilon).exp_()
    for _ in range(iterations):
        codes /= codes.sum(dim=0)
        codes /= codes.sum(dim=1, keepdim=True).clamp_(min=1e-30)
    return codes


def swapped_loss(
    scores: Sequence[Float[Tensor, "batch k"]],
    codes: Sequence[Float[Tensor, "batch k"]],
    temperature: float,
) -> Float[Tensor, ""]:
    """The paper's Eq. 2 for several crops; `codes` are those of the first ones."""
    logs = [log_softmax(each / temperature, dim=1) for each in scores]
    terms = [
        -(code * log).sum(dim=1).mean()
        for place, code in enumerate(codes)
        for other, log in enumerate(logs)
        if other != place
    ]
    return torch.stack(terms).mean()
