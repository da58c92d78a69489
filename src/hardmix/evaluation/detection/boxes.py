"""Boxes (x1, y1, x2, y2) in pixels: coding as deltas, clipping, overlaps (detectron2's rules).

A box is as wide as x2 - x1: there is no "+ 1" as in VOC's evaluation.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torchvision.ops import box_iou

LARGEST_GROWTH = math.log(1000 / 16)
"""A width or height is predicted at most 62.5 times as large, so that exp() cannot overflow."""


class Size(NamedTuple):
    """An image's height and width without padding."""

    height: int
    width: int


class Scale(NamedTuple):
    """Factors on the deltas, so that losses weigh centre and extent equally."""

    centre: float
    extent: float


def _centres_and_extents(
    boxes: Float[Tensor, "*n 4"],
) -> tuple[Float[Tensor, "*n 2"], Float[Tensor, "*n 2"]]:
    extents = boxes[..., 2:] - boxes[..., :2]
    return boxes[..., :2] + 0.5 * extents, extents


def encode(
    boxes: Float[Tensor, "n 4"], targets: Float[Tensor, "n 4"], scale: Scale
) -> Float[Tensor, "n 4"]:
    """Return the deltas (x, y, width, height) that turn each box into its target."""
    centres, extents = _centres_and_extents(boxes)
    target_centres, target_extents = _centres_and_extents(targets)
    shift = scale.centre * (target_centres - centres) / extents
    growth = scale.extent * torch.log(target_extents / extents)
    return torch.cat([shift, growth], dim=-1)


def decode(
    boxes: Float[Tensor, "*#n 4"], deltas: Float[Tensor, "*#n 4"], scale: Scale
) -> Float[Tensor, "*#n 4"]:
    """Return the boxes that deltas stand for; axes before the last broadcast."""
    centres, extents = _centres_and_extents(boxes)
    centres = deltas[..., :2] / scale.centre * extents + centres
    extents = (deltas[..., 2:] / scale.extent).clamp(max=LARGEST_GROWTH).exp() * extents
    return torch.cat([centres - 0.5 * extents, centres + 0.5 * extents], dim=-1)


def clip(boxes: Float[Tensor, "*n 4"], size: Size) -> Float[Tensor, "*n 4"]:
    """Clip boxes to the image: x from 0 to the width, not to the width - 1."""
    x = boxes[..., 0::2].clamp(min=0, max=size.width)
    y = boxes[..., 1::2].clamp(min=0, max=size.height)
    return torch.stack([x[..., 0], y[..., 0], x[..., 1], y[..., 1]], dim=-1)


def not_empty(boxes: Float[Tensor, "n 4"]) -> Bool[Tensor, " n"]:
    """Return which boxes have any area: detectron2 drops only those of width or height 0."""
    return (boxes[:, 2:] > boxes[:, :2]).all(dim=1)


def overlaps(
    targets: Float[Tensor, "targets 4"], boxes: Float[Tensor, "n 4"]
) -> Float[Tensor, "targets n"]:
    """Return the intersection over union; 0 for two boxes without area instead of 0 / 0."""
    return torch.nan_to_num(box_iou(targets, boxes), nan=0.0)
