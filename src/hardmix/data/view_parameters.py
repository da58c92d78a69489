"""What is done to each view, drawn as official MoCo-v1 and MoCo-v2 draw it: crop, then colours.

Each sample has random numbers of its own (`random_numbers.uniform`), so a view depends on nothing
but (seed, epoch, image, view).
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float32, Float64, Int64
from torch import Tensor

from hardmix.data.image_ops import CropBoxes
from hardmix.runtime.random_numbers import uniform
from hardmix.settings.named_choices import Augmentation

ATTEMPTS = 10
"""How often torchvision's RandomResizedCrop tries to fit a crop before it takes the centre."""

CROP_DRAWS = 2 * ATTEMPTS + 2
COLOUR_DRAWS = 13
"""Random numbers that a view takes: crop first, then colours."""

JITTERS: dict[Augmentation, tuple[float, float]] = {
    "moco-v2": (0.4, 0.1),
    "simclr": (0.8, 0.2),
    "infomin": (0.8, 0.2),
}
"""Augmentations that jitter four of five views, turn one of five grey and blur every other one:
strength of brightness, contrast and saturation, and of hue."""

RATIOS = (3 / 4, 4 / 3)
"""Width over height of a crop, least and most."""


class ColourParameters(NamedTuple):
    """What happens to the colours of each view. On the CPU: choosing rows must not wait for a GPU.

    The fields `brightness` to `hue` hold factors in the sense of torchvision's `adjust_*`.
    """

    order: Int64[Tensor, "batch 4"]
    """The four in the order in which they are applied: 0 brightness, 1 contrast, 2 saturation,
    3 hue."""
    brightness: Float32[Tensor, " batch"]
    contrast: Float32[Tensor, " batch"]
    saturation: Float32[Tensor, " batch"]
    hue: Float32[Tensor, " batch"]
    jitter: Bool[Tensor, " batch"]
    """Whether these four are applied."""
    grey: Bool[Tensor, " batch"]
    sigma: Float32[Tensor, " batch"]
    """Of the blur, in pixels; 0 is none."""
    flip: Bool[Tensor, " batch"]


def draw_crops(
    draws: Float64[Tensor, f"batch {CROP_DRAWS}"],
    heights: Int64[Tensor, " batch"],
    widths: Int64[Tensor, " batch"],
    min_scale: float,
    max_scale: float = 1.0,
) -> CropBoxes:
    """As torchvision's RandomResizedCrop(scale=(min_scale, max_scale)): share of the area, shape.

    The first of ten attempts that fits the image is taken, at a random place; if none does, the
    largest crop of an allowed shape from the centre.
    """
    h, w = heights.double(), widths.double()
    area = (h * w)[:, None] * (min_scale + (max_scale - min_scale) * draws[:, :ATTEMPTS])
    low, high = math.log(RATIOS[0]), math.log(RATIOS[1])
    ratio = torch.exp(low + (high - low) * draws[:, ATTEMPTS : 2 * ATTEMPTS])
    tall, wide = (area / ratio).sqrt_().round_(), (area * ratio).sqrt_().round_()
    fits = (tall > 0) & (tall <= h[:, None]) & (wide > 0) & (wide <= w[:, None])
    found = fits.any(dim=1)
    first = fits.int().argmax(dim=1, keepdim=True)
    height = torch.where(found, tall.gather(1, first)[:, 0], (w / RATIOS[0]).round_().minimum(h))
    width = torch.where(found, wide.gather(1, first)[:, 0], (h * RATIOS[1]).round_().minimum(w))
    spare_rows, spare_columns = h - height, w - width
    top = torch.where(found, (spare_rows + 1) * draws[:, -2], spare_rows / 2)
    left = torch.where(found, (spare_columns + 1) * draws[:, -1], spare_columns / 2)
    return CropBoxes(*(value.floor().long() for value in (top, left, height, width)))


def draw_colours(
    draws: Float64[Tensor, f"batch {COLOUR_DRAWS}"],
    augmentation: Augmentation,
    blur: bool,
    strength: float = 1.0,
) -> ColourParameters:
    """Official MoCo's colours, or "plain": none but the flip, as in evaluations that train.

    v1: grey 0.2; ColorJitter(0.4, 0.4, 0.4, 0.4) always; flip 0.5.
    v2: ColorJitter(0.4, 0.4, 0.4, 0.1) 0.8; grey 0.2; blur of sigma U(0.1, 2) 0.5; flip 0.5.
    simclr and infomin: as v2, with ColorJitter(0.8, 0.8, 0.8, 0.2).
    `strength` multiplies the jitter's ranges and the probability of grey.
    """
    second, plain = augmentation in JITTERS, augmentation == "plain"
    width, turn = (strength * each for each in JITTERS.get(augmentation, (0.4, 0.4)))
    brightness, contrast, saturation = (1 - width + 2 * width * draws[:, 4:7].T).float()
    hue = turn * (2 * draws[:, 7] - 1)
    chances = draws.new_tensor([0.8, 0.2 * strength, 0.5, 0.5])
    jitter, grey, blurred, flip = (draws[:, 8:12] < chances).T
    return ColourParameters(
        order=draws[:, :4].argsort(dim=1),
        brightness=brightness,
        contrast=contrast,
        saturation=saturation,
        hue=hue.float(),
        jitter=jitter if second else torch.full_like(jitter, not plain),
        grey=grey & (not plain),
        sigma=((0.1 + 1.9 * draws[:, 12]) * (blurred & (second and blur))).float(),
        flip=flip,
    )


def draw_views(
    ids: Int64[Tensor, " batch"], seed: int, epoch: int, number: int, views: int = 2, first: int = 0
) -> Float64[Tensor, "{views}*batch number"]:
    """Random numbers of all query views, then of all key views; of views from `first` on."""
    return torch.cat(
        [uniform(seed, epoch, ids, view, number) for view in range(first, first + views)]
    )
