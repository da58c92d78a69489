"""SimCLR (Chen et al. 2020): the other images of the batch are the negatives.

Both views of an image are each other's positive; the views of all other images, 2 N - 2 of them,
are negatives, and all receive gradients:

    L = 1 / 2N sum_i [ -log exp(z_i.z_j(i) / tau) / sum_{k != i} exp(z_i.z_k / tau) ]

Read in google-research/simclr (tf2/objective.py, model.py, run.py): both views pass the network in
one batch, batch norm is over all processes, embeddings are gathered with their gradients, the head
has batch norm after both layers. Its loss is the sum over the two views and so twice the paper's,
which is used here: LARS scales a layer's step by its norm, but norms and biases, which it leaves to
SGD, take steps half as long as there. With `mix.*`, MoCHi's points are made from the hardest of
the 2 N - 2 negatives, as in `MochiLoss.in_batch`: points are constants, their parents are not.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from hardmix.data.batches import Batch
from hardmix.methods.base import (
    Materials,
    Method,
    StepOutcome,
    TrainingPosition,
    check_embeddings,
)
from hardmix.methods.contrast_measures import ContrastOutcome, describe_contrast, hardness_of
from hardmix.methods.mixing_schedule import MixingSchedule
from hardmix.mixing.queue import equal_and_known
from hardmix.models.batch_norm import synchronise_batch_norm
from hardmix.models.encoders import Encoder
from hardmix.runtime.distributed import gather, rank
from hardmix.runtime.profile import timed
from hardmix.settings.config import PretrainConfig


class SimClr(Method):
    """One encoder, two views, and the loss between all images of a batch."""

    def __init__(self, config: PretrainConfig, materials: Materials) -> None:
        super().__init__(config, materials)
        self.mixing = MixingSchedule(config, materials.mixing)
        encoder = synchronise_batch_norm(self.new_encoder(), materials.compute.device)
        assert isinstance(encoder, Encoder)
        self.encoder = encoder

    @property
    def trunk(self) -> nn.Module:  # type: ignore[override]
        """Return the encoder without its head."""
        return self.encoder.trunk

    def networks(self) -> dict[str, nn.Module]:
        """Return the encoder."""
        return {"encoder": self.encoder}

    def loss(self, part: Batch, at: TrainingPosition) -> ContrastOutcome:
        """Return the paper's Eq. 1, averaged over both views, with the views of all processes."""
        with timed("query"):
            first, second = self.network("encoder")(torch.cat(part.views)).chunk(2)
        check_embeddings(first=first, second=second)
        with timed("loss"):
            both = gather(torch.stack([first, second], dim=1), with_gradient=True)
            everyone = both.transpose(0, 1).flatten(0, 1)
            labels = gather(part.labels).repeat(2)
            own = own_views(len(first), len(everyone) // 2, first.device)
            exclude = own | equal_and_known(part.labels, labels) if self.config.oracle else own
            loss, mix = self.mixing.loss, self.mixing.started(at)
            (outcome, plan), (other, _) = (
                loss.contrast(
                    query,
                    key,
                    everyone,
                    exclude,
                    mix=mix,
                    generator=self.mixing.generator(at, purpose),
                    progress=self.mixing.progress(at.epoch),
                    normalised=True,
                    check=False,
                )
                for purpose, (query, key) in enumerate([(first, second), (second, first)])
            )
        mean = (outcome.loss + other.loss) / 2
        return ContrastOutcome(
            mean, outcome, plan, second.detach(), exclude, part.labels, labels, own
        )

    def describe(self, outcomes: Sequence[StepOutcome]) -> dict[str, float]:
        """Return Fig. 2's measures of the first views."""
        return describe_contrast(outcomes, self.config)

    def hardness(self, outcomes: Sequence[StepOutcome]) -> dict[str, list[Any]]:
        """Return Fig. 2a for a step, and histograms of similarities."""
        return hardness_of(outcomes, self.config)


def own_views(number: int, everyone: int, device: torch.device) -> Bool[Tensor, "batch K"]:
    """Return which columns, first views and then second ones, are views of a row's own image."""
    place = rank() * number + torch.arange(number, device=device)
    columns = torch.arange(2 * everyone, device=device) % everyone
    return place[:, None] == columns
