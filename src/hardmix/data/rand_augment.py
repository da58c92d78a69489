"""RandAugment as InfoMin uses it (Tian et al. 2020, official code: n 2, m 10, std 0.5).

Two operations are drawn for each view, with replacement, out of fifteen; each is applied every
other time, at a magnitude of N(10, 0.5), at most 10. Axes and range are those of image_ops: float
images in [0, 1], changed in place. Every operation equals Pillow's to rounding, except that pixels
are always interpolated bilinearly (the official code draws between that and bicubic).
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float64, Int64
from torch import Tensor
from torch.nn.functional import conv2d, grid_sample
from torchvision.transforms.v2 import functional

from hardmix.data import image_ops
from hardmix.data.image_ops import Factor, Images

LAYERS = 2
RAND_DRAWS = 4 * LAYERS
"""Random numbers of a view: which operation, whether, magnitude and sign, of each."""

MAGNITUDE, DEVIATION, MOST = 10.0, 0.5, 10.0
FILL = (124 / 255, 116 / 255, 104 / 255)
"""What comes in from outside of the image: the mean of ImageNet."""

SMOOTH = torch.tensor([[1.0, 1, 1], [1, 5, 1], [1, 1, 1]]) / 13
"""Pillow's filter SMOOTH, from which sharpness goes away."""


Operation = Callable[[Tensor, Tensor | slice], None]
"""Changes images in place, told which rows of the parameters are theirs."""


def rand_stages(
    draws: Float64[Tensor, f"batch {RAND_DRAWS}"],
) -> list[tuple[Int64[Tensor, " batch"], list[Operation]]]:
    """For each layer, the number of each sample's operation, and the operations."""
    stages: list[tuple[Tensor, list[Operation]]] = []
    for which, whether, magnitude, sign in draws.T.unflatten(0, (LAYERS, 4)):
        choice = torch.where(whether < 0.5, (which * len(OPERATIONS)).long(), len(OPERATIONS))
        noise = math.sqrt(2) * torch.erfinv((2 * magnitude - 1).clamp(-1 + 1e-12, 1 - 1e-12))
        level = (MAGNITUDE + DEVIATION * noise).clamp(0, MOST).div(MOST).float()
        signs = torch.where(sign < 0.5, -1.0, 1.0).float()
        stages.append((choice, [partial(_apply_, each, level, signs) for each in OPERATIONS]))
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
    """Stretch every channel to the whole range."""
    images.copy_(functional.autocontrast(images))


def equalize_(images: Images, level: Factor, sign: Factor) -> None:  # noqa: ARG001
    """Make the histogram of every channel flat."""
    images.copy_(functional.equalize(_bytes(images)).float() / 255)


def invert_(images: Images, level: Factor, sign: Factor) -> None:  # noqa: ARG001
    """White becomes black."""
    images.neg_().add_(1)


def posterize_(images: Images, level: Factor, sign: Factor) -> None:  # noqa: ARG001
    """Keep the highest bits, 4 of them at most."""
    step = 2.0 ** (8 - (4 * level).floor()).view(-1, 1, 1, 1)
    images.copy_(_bytes(images).float().div_(step).floor_().mul_(step).div_(255))


def solarize_(images: Images, level: Factor, sign: Factor) -> None:  # noqa: ARG001
    """Invert what is brighter than a threshold; at the highest level nothing is."""
    bright = _bytes(images).float() >= (256 * level).floor().view(-1, 1, 1, 1)
    images.copy_(torch.where(bright, 1 - images, images))


def solarize_add_(images: Images, level: Factor, sign: Factor) -> None:  # noqa: ARG001
    """Brighten what is darker than the middle, by up to 110 of 255."""
    more = images + (110 * level).floor().div(255).view(-1, 1, 1, 1)
    images.copy_(torch.where(_bytes(images) < 128, more.clamp(max=1), images))


def colour_(images: Images, level: Factor, sign: Factor) -> None:  # noqa: ARG001
    """Saturation, by a factor of up to 1.9."""
    image_ops.adjust_saturation_(images, _enhancement(level))


def contrast_(images: Images, level: Factor, sign: Factor) -> None:  # noqa: ARG001
    """Contrast, by a factor of up to 1.9."""
    image_ops.adjust_contrast_(images, _enhancement(level))


def brightness_(images: Images, level: Factor, sign: Factor) -> None:  # noqa: ARG001
    """Brightness, by a factor of up to 1.9."""
    image_ops.adjust_brightness_(images, _enhancement(level))


def sharpness_(images: Images, level: Factor, sign: Factor) -> None:  # noqa: ARG001
    """Away from a smoothed image, whose border stays as it was."""
    flat = images.flatten(0, 1).unsqueeze(1)
    smooth = images.clone()
    smooth[..., 1:-1, 1:-1] = conv2d(flat, SMOOTH[None, None]).view_as(smooth[..., 1:-1, 1:-1])
    factor = _enhancement(level).view(-1, 1, 1, 1)
    images.copy_(smooth.lerp_(images, factor).clamp_(0, 1))


def rotate_(images: Images, level: Factor, sign: Factor) -> None:
    """Up to 30 degrees around the centre."""
    angle = torch.deg2rad(30 * level * sign)
    cos, sin = angle.cos(), angle.sin()
    y, x = images.shape[2] / 2, images.shape[3] / 2
    rows = [cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y]
    _resample_(images, torch.stack(rows, dim=1))


def shear_x_(images: Images, level: Factor, sign: Factor) -> None:
    """Lower rows are moved sideways, by up to 0.3 of their height."""
    _resample_(images, _matrix(level, at=1, value=0.3 * level * sign))


def shear_y_(images: Images, level: Factor, sign: Factor) -> None:
    """Right columns are moved up or down, by up to 0.3 of their distance."""
    _resample_(images, _matrix(level, at=3, value=0.3 * level * sign))


def translate_x_(images: Images, level: Factor, sign: Factor) -> None:
    """By up to 0.45 of the width."""
    _resample_(images, _matrix(level, at=2, value=0.45 * images.shape[3] * level * sign))


def translate_y_(images: Images, level: Factor, sign: Factor) -> None:
    """By up to 0.45 of the height."""
    _resample_(images, _matrix(level, at=5, value=0.45 * images.shape[2] * level * sign))


OPERATIONS = (
    *(auto_contrast_, equalize_, invert_, rotate_, posterize_, solarize_, solarize_add_, colour_),
    *(contrast_, brightness_, sharpness_, shear_x_, shear_y_, translate_x_, translate_y_),
)
"""All operations: images, level from 0 to 1 and sign of each; in the order of the official code."""


def _enhancement(level: Factor) -> Factor:
    return 1.8 * level + 0.1


def _bytes(images: Images) -> Tensor:
    return images.mul(255).round_().to(torch.uint8)


def _matrix(level: Factor, at: int, value: Factor) -> Tensor:
    """The identity as Pillow's (a, b, c, d, e, f), with one entry changed."""
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
