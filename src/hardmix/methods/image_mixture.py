"""Image Mixture's draws (Shen et al. 2020, Un-Mix): mixup or CutMix with the reversed batch.

Read in szq0214/Un-Mix (main_moco_unmix.py): one lambda ~ Beta(beta, beta) per step; mixup with a
given probability, else CutMix, whose lambda becomes the share of pixels that stay.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from hardmix.data.batches import Batch
from hardmix.methods.base import TrainingPosition
from hardmix.models.encoders import shuffle_across
from hardmix.runtime.distributed import world_size
from hardmix.runtime.random_numbers import seed_of

Images = Float[Tensor, "batch channels height width"]


class Mixture(NamedTuple):
    """How the images of a step are mixed with their partners; the same on every process."""

    share: float
    """lambda: the share of the image itself, and the weight of its own key."""
    box: tuple[int, int, int, int] | None
    """Top, bottom, left and right of the rectangle that CutMix pastes; None for mixup."""


def draw_mixture(
    seed: int, at: TrainingPosition, size: tuple[int, int], beta: float, mixup: float
) -> Mixture:
    """Draw a step's mixture for images of this height and width."""
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
    """The reversed batch: first views, labels and ids of every image's partner.

    The batch of all processes is reversed, so that partners do not depend on their number.
    """
    order = reversed_order(len(part.ids))
    rows = (part.query, part.labels, part.ids)
    query, labels, ids = (shuffle_across(each, order) for each in rows)
    return Batch((query,), labels, ids)


def reversed_order(number: int) -> Int64[Tensor, " all"]:
    """The order that reverses the batch of all processes, `number` images each."""
    return torch.arange(number * world_size() - 1, -1, -1)
