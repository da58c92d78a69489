"""Boxes (x1, y1, x2, y2) in pixels, by detectron2's rules: coding, overlaps, matching, sampling.

A box is as wide as x2 - x1: there is no "+ 1" as in VOC's evaluation.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torchvision.ops import box_iou

from hardmix.runtime.device import send

LARGEST_GROWTH = math.log(1000 / 16)
"""Log of the factor, 62.5, by which a width or height grows at most: exp() cannot overflow."""


class Size(NamedTuple):
    """An image's height and width without padding."""

    height: int
    width: int


class Scale(NamedTuple):
    """Factors on the deltas that make the losses of centre and extent weigh about the same."""

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
    """Return the boxes that the deltas stand for; axes before the last broadcast."""
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
    """Return which boxes have an area: detectron2 drops only those of width or height 0."""
    return (boxes[:, 2:] > boxes[:, :2]).all(dim=1)


def overlaps(
    targets: Float[Tensor, "targets 4"], boxes: Float[Tensor, "n 4"]
) -> Float[Tensor, "targets n"]:
    """Return the intersection over union; it is 0, not 0 / 0, for two boxes without area."""
    return torch.nan_to_num(box_iou(targets, boxes), nan=0.0)


Shuffle = Callable[[int], Tensor]
"""Takes n and returns an order of 0 to n - 1, as `torch.randperm` does, or `torch.arange`."""


class Matches(NamedTuple):
    """The object that each box overlaps most, and whether the box is positive or negative."""

    targets: Int[Tensor, " n"]
    """The object's index; 0 for all boxes of an image without objects, where none is positive."""
    positive: Bool[Tensor, " n"]
    negative: Bool[Tensor, " n"]
    """A box that is neither positive nor negative is ignored by the loss."""


class Sampling(NamedTuple):
    """The boxes of an image that are sampled for a loss."""

    boxes: int
    """Number of boxes."""
    positive: float
    """Largest fraction of positives; negatives fill the rest."""


def match(
    iou: Float[Tensor, "targets n"], *, low: float, high: float, best: bool = False
) -> Matches:
    """Match every box with the object that it overlaps most.

    A box is positive from the overlap `high` on, and negative below `low`. With `best`, the boxes
    that overlap an object most are positive too, ties included; the target of such a box is still
    the object that it overlaps most itself, which may be another one.
    """
    if len(iou) == 0:
        none = torch.zeros(iou.shape[1], dtype=torch.bool, device=iou.device)
        return Matches(none.long(), none, ~none)
    largest, targets = iou.max(dim=0)
    positive, negative = largest >= high, largest < low
    if best:
        chosen = (iou == iou.amax(dim=1, keepdim=True)).any(dim=0)
        positive, negative = positive | chosen, negative & ~chosen
    return Matches(targets, positive, negative)


def sample(
    matches: Matches, sampling: Sampling, shuffle: Shuffle
) -> tuple[Int[Tensor, " positive"], Int[Tensor, " negative"]]:
    """Return the indices of the sampled positives and negatives, fewer if there are few."""
    positive, negative = matches.positive.nonzero()[:, 0], matches.negative.nonzero()[:, 0]
    wanted = min(int(sampling.boxes * sampling.positive), len(positive))
    return (
        positive[_order(len(positive), shuffle, positive.device)[:wanted]],
        negative[_order(len(negative), shuffle, negative.device)[: sampling.boxes - wanted]],
    )


def _order(count: int, shuffle: Shuffle, device: torch.device) -> Int[Tensor, " n"]:
    return send(shuffle(count), device)
