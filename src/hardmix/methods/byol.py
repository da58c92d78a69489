"""BYOL (Grill et al. 2020): predict the target network's projection of the other view.

No negatives: the target follows the online network by momentum, and only the online network has a
predictor. Summed over both directions, for unit vectors of prediction p and projection z':

    L = mean_i [ 2 - 2 p_i(v).z'_i(v') + 2 - 2 p_i(v').z'_i(v) ]

Read in deepmind-research/byol (byol_experiment.py, configs/byol.py, utils/schedules.py): each view
passes the networks in a batch of its own, batch norm is over all processes, the target's momentum
rises from its base (model.key_momentum) to 1 over half a cosine, and it is updated after the
optimizer's step, which is here the beginning of the next one. Decided: the target starts as a copy
(the authors draw it anew and saw no difference), and both views are blurred alike: the authors blur
the first always, the second rarely, and solarise some of the second (`data.augmentation` byol).
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

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
from hardmix.models.batch_norm import synchronise_batch_norm
from hardmix.models.encoders import batch_norm_mlp
from hardmix.runtime.distributed import gather
from hardmix.runtime.profile import timed
from hardmix.settings.config import PretrainConfig
from hardmix.settings.methods import ByolOptions
from hardmix.settings.schedules import cosine


@dataclass
class ByolOutcome(StepOutcome):
    """Numbers of a part of a batch that are described later."""

    similarity: Tensor
    """Mean similarity of predictions and projections."""
    projection: Tensor
    """The target's projections of the second views."""


class Online(nn.Module):
    """Trunk, projector and predictor: from images to predictions of unit length, in float32."""

    def __init__(self, trunk: nn.Module, width: int, hidden: int, dim: int) -> None:
        super().__init__()
        self.trunk = trunk
        self.projector = batch_norm_mlp(width, hidden, dim)
        self.predictor = batch_norm_mlp(dim, hidden, dim)

    def forward(self, images: Float[Tensor, "batch channels y x"]) -> Float[Tensor, "batch dim"]:
        """Return predictions."""
        predictions = self.predictor(self.projector(self.trunk(images)))
        return normalize(predictions.float(), dim=1)


class Byol(Method):
    """An online network and a target that follows it."""

    options: ByolOptions

    def __init__(self, config: PretrainConfig, materials: Materials) -> None:
        super().__init__(config, materials)
        encoder = self.new_encoder()
        hidden, dim = self.options.hidden, config.model.dim
        online = Online(encoder.trunk, encoder.width, hidden, dim)
        target = nn.Sequential(copy.deepcopy(online.trunk), copy.deepcopy(online.projector))
        device = materials.compute.device
        self.online = cast("Online", synchronise_batch_norm(online, device))
        self.target = synchronise_batch_norm(target.requires_grad_(False), device)
        self._both: tuple[list[Tensor], list[Tensor]] | None = None

    @property
    def trunk(self) -> nn.Module:  # type: ignore[override]
        """Return the online network without projector and predictor."""
        return self.online.trunk

    def networks(self) -> dict[str, nn.Module]:
        """Return the online network; the target follows by momentum."""
        return {"online": self.online}

    @torch.no_grad()
    def begin_step(self, at: TrainingPosition) -> None:
        """Move the target towards the online network, with a momentum that rises to 1."""
        momentum = target_momentum(self.config.model.key_momentum, at.progress)
        if self._both is None:  # walking through all modules takes longer than the update
            trunk, projector = self.online.trunk, self.online.projector
            followed: list[Tensor] = [*trunk.parameters(), *projector.parameters()]
            self._both = list(self.target.parameters()), followed
        with timed("key"):
            torch._foreach_lerp_(*self._both, 1 - momentum)

    def loss(self, part: Batch, at: TrainingPosition) -> ByolOutcome:  # noqa: ARG002
        """Return the symmetric regression loss, with each view in a batch of its own."""
        with timed("query"):
            predictions = [self.network("online")(view) for view in part.views]
        with timed("key"), torch.no_grad():
            projections = [normalize(self.target(view).float(), dim=1) for view in part.views]
        check_embeddings(prediction=predictions[0], projection=projections[0])
        with timed("loss"):
            loss = regression(predictions[0], projections[1])
            loss = loss + regression(predictions[1], projections[0])
        return ByolOutcome(loss, 1 - loss.detach() / 4, projections[1])

    @torch.no_grad()
    def describe(self, outcomes: Sequence[StepOutcome]) -> dict[str, float]:
        """Return the similarity of the two views, and the spread, which is 0 after a collapse."""
        parts = cast("Sequence[ByolOutcome]", outcomes)
        rows = gather(torch.cat([each.projection for each in parts]))
        return {
            "positive_similarity": float(parts[-1].similarity),
            "spread": float(rows.std(dim=0).mean() * math.sqrt(rows.shape[1])),
        }


def regression(
    prediction: Float[Tensor, "batch dim"], projection: Float[Tensor, "batch dim"]
) -> Float[Tensor, ""]:
    """The paper's Eq. 2 for unit vectors: the mean of |p - z'|^2 = 2 - 2 p.z'."""
    return 2 - 2 * (prediction * projection).sum(dim=1).mean()


def target_momentum(base: float, progress: float) -> float:
    """Return the momentum at this fraction of training: from `base` to 1 over half a cosine."""
    return 1 - (1 - base) * cosine(progress, 1.0)
