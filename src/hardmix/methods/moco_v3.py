"""MoCo v3 (Chen et al. 2021): the keys of the batch are the negatives, in both directions.

A query encoder with a predictor, a key encoder that follows it, no queue. With queries q and keys k
of two views, of unit length, and j over the whole batch:

    L = 2 tau [ L(q1, k2) + L(q2, k1) ]
    L(q, k) = mean_i [ -log exp(q_i.k_i / tau) / sum_j exp(q_i.k_j / tau) ]

Read in facebookresearch/moco-v3 (moco/builder.py, vits.py, main_moco.py, CONFIG.md): each view
passes the networks in a batch of its own, batch norm is over all processes, keys are gathered
without gradient, the key encoder's momentum rises to 1 over half a cosine, and heads have no
biases. A Vision Transformer has a projector of three layers and a predictor that ends with batch
norm; its patch projection keeps its random weights, because training it makes the loss unstable. A
ResNet has a projector of two layers and a predictor without batch norm at its end. A batch norm
that ends a head has no scale and shift.

Decided: a trunk counts as a Vision Transformer if it has a patch embedding (`patch_embed.proj`).
Initial weights and positions are timm's and torchvision's: the authors fix sine-cosine positions,
draw weights from other distributions, begin residual branches at zero, and give their ViT-S twelve
heads, timm's six. With `mix.*`, MoCHi's points are made of the other images' keys.
"""

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import normalize

from hardmix.data.batches import Batch
from hardmix.methods.base import (
    Materials,
    Method,
    StepOutcome,
    TrainingPosition,
    check_embeddings,
)
from hardmix.methods.byol import target_momentum
from hardmix.methods.contrast_measures import ContrastOutcome, describe_contrast, hardness_of
from hardmix.methods.mixing_schedule import MixingSchedule
from hardmix.mixing.queue import equal_and_known
from hardmix.models.batch_norm import synchronise_batch_norm
from hardmix.runtime.distributed import gather, rank
from hardmix.runtime.profile import timed
from hardmix.settings.config import PretrainConfig
from hardmix.settings.methods import MocoV3Options


class PredictingEncoder(nn.Module):
    """Trunk, projector and predictor: from images to queries of unit length, in float32."""

    def __init__(self, trunk: nn.Module, width: int, hidden: int, dim: int) -> None:
        super().__init__()
        vit = patch_projection(trunk) is not None
        layers = [width, hidden, hidden, dim] if vit else [width, hidden, dim]
        self.trunk = trunk
        self.projector = batch_norm_layers(layers, ends_with_norm=True)
        self.predictor = batch_norm_layers([dim, hidden, dim], ends_with_norm=vit)

    def forward(self, images: Float[Tensor, "batch channels y x"]) -> Float[Tensor, "batch dim"]:
        """Return queries."""
        queries = self.predictor(self.projector(self.trunk(images)))
        return normalize(queries.float(), dim=1)


class MocoV3(Method):
    """A query encoder, a key encoder that follows it, and the keys of the batch."""

    options: MocoV3Options

    def __init__(self, config: PretrainConfig, materials: Materials) -> None:
        super().__init__(config, materials)
        self.mixing = MixingSchedule(config, materials.mixing)
        encoder, device = self.new_encoder(), materials.compute.device
        patches = patch_projection(encoder.trunk)
        if patches is not None and self.options.freeze_patches:
            patches.requires_grad_(False)
        query = PredictingEncoder(
            encoder.trunk, encoder.width, self.options.hidden, config.model.dim
        )
        key = nn.Sequential(copy.deepcopy(query.trunk), copy.deepcopy(query.projector))
        self.query = cast("PredictingEncoder", synchronise_batch_norm(query, device))
        self.key = synchronise_batch_norm(key.requires_grad_(False), device)
        self._both: tuple[list[Tensor], list[Tensor]] | None = None

    @property
    def trunk(self) -> nn.Module:  # type: ignore[override]
        """Return the query encoder without projector and predictor."""
        return self.query.trunk

    def networks(self) -> dict[str, nn.Module]:
        """Return the query encoder; the key encoder follows by momentum."""
        return {"query": self.query}

    @torch.no_grad()
    def begin_step(self, at: TrainingPosition) -> None:
        """Move the key encoder towards the query encoder, with a momentum that rises to 1."""
        momentum = target_momentum(self.config.model.key_momentum, at.progress)
        if self._both is None:  # walking through all modules takes longer than the update
            trunk, projector = self.query.trunk, self.query.projector
            followed: list[Tensor] = [*trunk.parameters(), *projector.parameters()]
            self._both = list(self.key.parameters()), followed
        with timed("key"):
            torch._foreach_lerp_(*self._both, 1 - momentum)

    def loss(self, part: Batch, at: TrainingPosition) -> ContrastOutcome:
        """Return the symmetric loss, with the keys of all processes."""
        with timed("query"):
            queries = [self.network("query")(view) for view in part.views]
        with timed("key"), torch.no_grad():
            keys = [normalize(self.key(view).float(), dim=1) for view in part.views]
        check_embeddings(query=queries[0], key=keys[0])
        with timed("loss"):
            outcome = self.compare(queries[0], keys[1], part, at, 0)
            other = self.compare(queries[1], keys[0], part, at, 1)
            outcome.loss = 2 * self.config.train.temperature * (outcome.loss + other.loss)
        return outcome

    def compare(
        self, query: Tensor, key: Tensor, part: Batch, at: TrainingPosition, purpose: int
    ) -> ContrastOutcome:
        """Return Eq. 1 for one direction; the keys of all other images are the negatives."""
        everyone, labels = gather(key), gather(part.labels)
        columns = torch.arange(len(everyone), device=key.device)
        own = columns[rank() * len(key) :][: len(key), None] == columns
        exclude = own | equal_and_known(part.labels, labels) if self.config.oracle else own
        contrast, plan = self.mixing.loss.contrast(
            query,
            key,
            everyone,
            exclude,
            mix=self.mixing.started(at),
            generator=self.mixing.generator(at, purpose),
            progress=self.mixing.progress(at.epoch),
            normalised=True,
            check=False,
        )
        return ContrastOutcome(
            contrast.loss, contrast, plan, key, exclude, part.labels, labels, own
        )

    def describe(self, outcomes: Sequence[StepOutcome]) -> dict[str, float]:
        """Return Fig. 2's measures of the first views' queries."""
        return describe_contrast(outcomes, self.config)

    def hardness(self, outcomes: Sequence[StepOutcome]) -> dict[str, list[Any]]:
        """Return Fig. 2a for a step, and histograms of similarities."""
        return hardness_of(outcomes, self.config)


def patch_projection(trunk: nn.Module) -> nn.Module | None:
    """Return the layer that embeds a Vision Transformer's patches; None for other trunks."""
    projection = getattr(getattr(trunk, "patch_embed", None), "proj", None)
    return projection if isinstance(projection, nn.Module) else None


def batch_norm_layers(widths: Sequence[int], *, ends_with_norm: bool) -> nn.Sequential:
    """Return linear layers without biases, with batch norm and ReLU between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs, bias=False), nn.BatchNorm1d(outputs), nn.ReLU()]
    del layers[-2:]
    if ends_with_norm:
        layers.append(nn.BatchNorm1d(widths[-1], affine=False))
    return nn.Sequential(*layers)
