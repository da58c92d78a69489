"""Matching boxes with objects, and sampling boxes for a loss (detectron2's rules)."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hardmix.runtime.device import send

Shuffle = Callable[[int], Tensor]
"""n -> an order of 0..n-1; `torch.randperm`, or `torch.arange` for "the first ones"."""


class Matches(NamedTuple):
    """The object that each box overlaps most, and whether the box is positive or negative."""

    targets: Int[Tensor, " n"]
    """0 for all boxes if an image has no object; then none is positive."""
    positive: Bool[Tensor, " n"]
    negative: Bool[Tensor, " n"]
    """A box that is neither positive nor negative is ignored by the loss."""


class Sampling(NamedTuple):
    """Boxes sampled per image for a loss."""

    boxes: int
    positive: float
    """Largest fraction of positives; negatives fill the rest."""


def match(
    iou: Float[Tensor, "targets n"], *, low: float, high: float, best: bool = False
) -> Matches:
    """Positive from overlap `high` on, negative below `low`.

    `best`: every object also has its boxes of largest overlap as positives, ties included, each
    with the target of its own largest overlap, which can be another object.
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
