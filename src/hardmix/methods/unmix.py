"""MoCo + Image Mixture (Shen et al. 2020, Un-Mix; the paper's iMix): mixed images have two keys.

A query is also mixed with the query of another image of the batch, by lambda in (0, 1), and then
contrasted with both keys:

    L = L(q, k) + lambda L(q_mixed, k) + (1 - lambda) L(q_mixed, k_partner)

Read in szq0214/Un-Mix (main_moco_unmix.py, moco/builder.py): partners are the reversed batch, keys
are those of unmixed images, mixed queries pass the encoder in a batch of their own, all terms use
one queue and temperature. The authors reverse the embeddings of the mixed queries instead of the
keys: the mean is the same, and keys need no gradient. Decided: the batch of all processes is
reversed, not each one's own, so that results do not depend on their number. With `mix.*`, points
join all three terms.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from hardmix.data.batches import Batch
from hardmix.methods.base import TrainingPosition
from hardmix.methods.contrast_measures import ContrastOutcome
from hardmix.methods.moco import Moco
from hardmix.models.encoders import shuffle_across
from hardmix.runtime.distributed import world_size
from hardmix.runtime.profile import timed
from hardmix.runtime.random_numbers import seed_of
from hardmix.settings.methods import UnmixOptions

Images = Float[Tensor, "batch channels height width"]


class Unmix(Moco):
    """MoCo whose queries are also mixed as images."""

    options: UnmixOptions

    def loss(self, part: Batch, at: TrainingPosition) -> ContrastOutcome:
        """Return MoCo's loss of the queries, and that of mixed ones with both keys."""
        options, images = self.options, part.query
        query, key = self.encode(part, at)
        outcome = self.compare(query, key, part, at)
        size = (images.shape[2], images.shape[3])
        mixture = draw_mixture(self.config.train.seed, at, size, options.beta, options.mixup)
        partner, order = partners_of(part), reversed_order(len(key))
        with timed("query"):
            query = self.network("query")(mix_images(images, partner.query, mixture))
        own = self.compare(query, key, part, at, purpose=1).loss
        other = self.compare(query, shuffle_across(key, order), partner, at, purpose=2).loss
        outcome.loss = outcome.loss + mixture.share * own + (1 - mixture.share) * other
        return outcome


class Mixture(NamedTuple):
    """How a step's images are mixed with their partners; the same on every process."""

    share: float
    """lambda: the share of the image itself, and the weight of its own key."""
    box: tuple[int, int, int, int] | None
    """Top, bottom, left and right of the rectangle that CutMix pastes; None for mixup."""


def draw_mixture(
    seed: int, at: TrainingPosition, size: tuple[int, int], beta: float, mixup: float
) -> Mixture:
    """Draw a step's mixture for images of this height and width.

    One lambda ~ Beta(beta, beta) per step; mixup with the given probability, else CutMix, whose
    lambda becomes the share of pixels that stay.
    """
    generator = torch.Generator().manual_seed(seed_of("mixture", seed, at.step, at.part))
    whole, down, across = torch.rand(3, generator=generator, dtype=torch.float64).tolist()
    one, other = torch._standard_gamma(
        torch.full((2,), beta, dtype=torch.float64), generator=generator
    ).tolist()
    share = one / (one + other) if one + other > 0 else 0.5
    if whole < mixup:
        return Mixture(share, None)
    box = []
    for length, centre in zip(size, (int(down * size[0]), int(across * size[1])), strict=True):
        half = int(length * math.sqrt(1 - share)) // 2
        box += [max(0, centre - half), min(length, centre + half)]
    pasted = (box[1] - box[0]) * (box[3] - box[2])
    return Mixture(1 - pasted / (size[0] * size[1]), (box[0], box[1], box[2], box[3]))


def mix_images(images: Images, partners: Images, mixture: Mixture) -> Images:
    """Return each image mixed with its partner."""
    if mixture.box is None:
        return torch.lerp(partners, images, mixture.share)
    top, bottom, left, right = mixture.box
    mixed = images.clone()
    mixed[:, :, top:bottom, left:right] = partners[:, :, top:bottom, left:right]
    return mixed


@torch.no_grad()
def partners_of(part: Batch) -> Batch:
    """Return the reversed batch: first view, label and id of every image's partner.

    The batch of all processes is reversed, so that partners do not depend on their number.
    """
    order = reversed_order(len(part.ids))
    columns = (part.query, part.labels, part.ids)
    query, labels, ids = (shuffle_across(column, order) for column in columns)
    return Batch((query,), labels, ids)


def reversed_order(number: int) -> Int64[Tensor, " all"]:
    """Return the order that reverses the batch of all processes, of `number` images each."""
    return torch.arange(number * world_size() - 1, -1, -1)
