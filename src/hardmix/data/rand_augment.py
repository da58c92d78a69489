"""RandAugment as InfoMin uses it (Tian et al. 2020, official code: n 2, m 10, std 0.5).

Two operations out of fifteen are drawn for each view, with replacement; each is applied every other
time, at a magnitude of N(10, 0.5), at most 10. As in colours.py, images are float in [0, 1] and are
changed in place. Every operation equals Pillow's to rounding, except that pixels are always
interpolated bilinearly (the official code draws between that and bicubic).

Libraries do not have this variant for batches with random numbers of each view's own: torchvision's
RandAugment has no noise on the magnitude, applies every operation, and lacks two of the fifteen;
timm's takes one Pillow image at a time and draws from Python's global generator.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float64, Int64
from torch import Tensor
from torch.nn.functional import conv2d, grid_sample
from torchvision.transforms.v2 import functional

from hardmix.data.colours import (
    Factor,
    Images,
    adjust_brightness_,
    adjust_contrast_,
    adjust_saturation_,
)

LAYERS = 2
RAND_DRAWS = 4 * LAYERS
"""Random numbers of a view: operation, whether it is applied, magnitude and sign of each."""

MAGNITUDE, DEVIATION, MOST = 10.0, 0.5, 10.0
FILL = (124 / 255, 116 / 255, 104 / 255)
"""Colour outside of the image: the mean of ImageNet."""

SMOOTH = torch.tensor([[1.0, 1, 1], [1, 5, 1], [1, 1, 1]]) / 13
"""Pillow's filter SMOOTH; sharpness is the distance from its result."""


Operation = Callable[[Tensor, Tensor | slice], None]
"""Function that changes images in place, given the rows of the parameters that are theirs."""


def rand_stages(
    draws: Float64[Tensor, f"batch {RAND_DRAWS}"],
) -> list[tuple[Int64[Tensor, " batch"], list[Operation]]]:
    """Return for each layer the number of each sample's operation, and the operations."""
    stages: list[tuple[Tensor, list[Operation]]] = []
    for which, whether, magnitude, sign in draws.T.unflatten(0, (LAYERS, 4)):
        choice = torch.where(whether < 0.5, (which * len(OPERATIONS)).long(), len(OPERATIONS))
        noise = math.sqrt(2) * torch.erfinv((2 * magnitude - 1).clamp(-1 + 1e-12, 1 - 1e-12))
        level = (MAGNITUDE + DEVIATION * noise).clamp(0, MOST).div(MOST).float()
        signs = torch.where(sign < 0.5, -1.0, 1.0).float()
        operations: list[Operation] = [partial(_apply_, each, level, signs) for each in OPERATIONS]
        stages.append((choice, operations))
    return stages


def _apply_(
    operation: Callable[[Images, Factor, Factor], None],
    level: Tensor,
    sign: Tensor,
    images: Images,
    rows: Tensor | slice,
) -> None:
    operation(images, level[rows], sign[rows])


def auto_contrast_(images: Images, level: Factor, sign: Factor) -> None:  # noqa: ARG001
    """Stretch every channel to the full range."""
    images.copy_(functional.autocontrast(images))


def equalize_(images: Images, level: Factor, sign: Factor) -> None:  # noqa: ARG001
    """Make the histogram of every channel flat."""
    images.copy_(functional.equalize(_bytes(images)).float() / 255)


def invert_(images: Images, level: Factor, sign: Factor) -> None:  # noqa: ARG001
    """Turn white into black."""
    images.neg_().add_(1)


def posterize_(images: Images, level: Factor, sign: Factor) -> None:  # noqa: ARG001
    """Keep the highest bits, at most 4."""
    step = 2.0 ** (8 - (4 * level).floor()).view(-1, 1, 1, 1)
    images.copy_(_bytes(images).float().div_(step).floor_().mul_(step).div_(255))


def solarize_(images: Images, level: Factor, sign: Factor) -> None:  # noqa: ARG001
    """Invert pixels above a threshold, which is out of reach at the highest level."""
    bright = _bytes(images).float() >= (256 * level).floor().view(-1, 1, 1, 1)
    images.copy_(torch.where(bright, 1 - images, images))


def solarize_add_(images: Images, level: Factor, sign: Factor) -> None:  # noqa: ARG001
    """Brighten pixels below the middle, by up to 110 of 255."""
    more = images + (110 * level).floor().div(255).view(-1, 1, 1, 1)
    images.copy_(torch.where(_bytes(images) < 128, more.clamp(max=1), images))


def colour_(images: Images, level: Factor, sign: Factor) -> None:  # noqa: ARG001
    """Change the saturation, by a factor of up to 1.9."""
    adjust_saturation_(images, _enhancement(level))


def contrast_(images: Images, level: Factor, sign: Factor) -> None:  # noqa: ARG001
    """Change the contrast, by a factor of up to 1.9."""
    adjust_contrast_(images, _enhancement(level))


def brightness_(images: Images, level: Factor, sign: Factor) -> None:  # noqa: ARG001
    """Change the brightness, by a factor of up to 1.9."""
    adjust_brightness_(images, _enhancement(level))


def sharpness_(images: Images, level: Factor, sign: Factor) -> None:  # noqa: ARG001
    """Move away from a smoothed image, whose border is unchanged."""
    flat = images.flatten(0, 1).unsqueeze(1)
    smooth = images.clone()
    smooth[..., 1:-1, 1:-1] = conv2d(flat, SMOOTH[None, None]).view_as(smooth[..., 1:-1, 1:-1])
    factor = _enhancement(level).view(-1, 1, 1, 1)
    images.copy_(smooth.lerp_(images, factor).clamp_(0, 1))


def rotate_(images: Images, level: Factor, sign: Factor) -> None:
    """Rotate around the centre, by up to 30 degrees."""
    angle = torch.deg2rad(30 * level * sign)
    cos, sin = angle.cos(), angle.sin()
    y, x = images.shape[2] / 2, images.shape[3] / 2
    rows = [cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y]
    _resample_(images, torch.stack(rows, dim=1))


def shear_x_(images: Images, level: Factor, sign: Factor) -> None:
    """Move lower rows sideways, by up to 0.3 of their height."""
    _resample_(images, _matrix(level, at=1, value=0.3 * level * sign))


def shear_y_(images: Images, level: Factor, sign: Factor) -> None:
    """Move columns on the right up or down, by up to 0.3 of their distance."""
    _resample_(images, _matrix(level, at=3, value=0.3 * level * sign))


def translate_x_(images: Images, level: Factor, sign: Factor) -> None:
    """Move sideways, by up to 0.45 of the width."""
    _resample_(images, _matrix(level, at=2, value=0.45 * images.shape[3] * level * sign))


def translate_y_(images: Images, level: Factor, sign: Factor) -> None:
    """Move up or down, by up to 0.45 of the height."""
    _resample_(images, _matrix(level, at=5, value=0.45 * images.shape[2] * level * sign))


OPERATIONS = (
    *(auto_contrast_, equalize_, invert_, rotate_, posterize_, solarize_, solarize_add_, colour_),
    *(contrast_, brightness_, sharpness_, shear_x_, shear_y_, translate_x_, translate_y_),
)
"""All operations in the order of the official code, on images with levels from 0 to 1 and signs."""


def _enhancement(level: Factor) -> Factor:
    return 1.8 * level + 0.1


def _bytes(images: Images) -> Tensor:
    return images.mul(255).round_().to(torch.uint8)


def _matrix(level: Factor, at: int, value: Factor) -> Tensor:
    """Return the identity as Pillow's (a, b, c, d, e, f), with one entry changed."""
    matrix = torch.tensor([1.0, 0, 0, 0, 1, 0]).repeat(len(level), 1)
    matrix[:, at] = value
    return matrix


def _resample_(images: Images, matrix: Tensor) -> None:
    """Take pixel (x, y) from (a x + b y + c, d x + e y + f), as Pillow's AFFINE."""
    height, width = images.shape[2:]
    y, x = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    a, b, c, d, e, f = matrix.T[..., None, None]
    place = torch.stack([(a * x + b * y + c) / width, (d * x + e * y + f) / height], dim=-1)
    fill = torch.tensor(FILL).view(1, 3, 1, 1)
    moved = grid_sample(images - fill, 2 * place - 1, align_corners=False)
    images.copy_(moved.add_(fill).clamp_(0, 1))
