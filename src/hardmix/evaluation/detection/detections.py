"""Detections: selecting them, and mapping them to the original image (detectron2's rules)."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import grid_sample
from torchvision.ops import batched_nms

from hardmix.evaluation.detection.boxes import Size, clip, not_empty


class DetectionSettings(NamedTuple):
    """Which detections of an image are kept; the defaults are detectron2's."""

    score: float = 0.05
    """Detections must score above this."""
    nms: float = 0.5
    limit: int = 100
    """Most detections per image, over all classes."""


class Found(NamedTuple):
    """One image's detections, the best first, in pixels of the image that the detector saw."""

    boxes: Float[Tensor, "n 4"]
    scores: Float[Tensor, " n"]
    classes: Int[Tensor, " n"]
    masks: Float[Tensor, "n side side"] | None = None
    """Probabilities over the box, for its class."""


def choose(
    boxes: Float[Tensor, "n classes 4"],
    probabilities: Float[Tensor, "n classes_and_background"],
    size: Size,
    settings: DetectionSettings,
) -> Found:
    """Return every pair of box and class above the score, after NMS within each class.

    A RoI can be detected as several classes. Boxes are clipped, but none is dropped for being
    small or empty: `resized` drops the empty ones later, after they took one of the places.
    """
    finite = boxes.isfinite().all(dim=2).all(dim=1) & probabilities.isfinite().all(dim=1)
    rows = finite.nonzero().flatten()  # once: a GPU is waited for to know how many
    boxes, scores = clip(boxes[rows], size), probabilities[rows, :-1]
    rows, classes = (scores > settings.score).nonzero(as_tuple=True)
    boxes, scores = boxes[rows, classes], scores[rows, classes]
    kept = batched_nms(boxes.float(), scores, classes, settings.nms)[: settings.limit]
    return Found(boxes[kept], scores[kept], classes[kept])


def resized(found: Found, seen: Size, original: Size) -> Found:
    """Return detections in pixels of the original image, without those of no area there."""
    boxes = found.boxes.clone()
    boxes[:, 0::2] *= original.width / seen.width
    boxes[:, 1::2] *= original.height / seen.height
    boxes = clip(boxes, original)
    kept = not_empty(boxes).nonzero().flatten()
    masks = None if found.masks is None else found.masks[kept]
    return Found(boxes[kept], found.scores[kept], found.classes[kept], masks)


def paste(found: Found, size: Size, threshold: float = 0.5) -> Bool[Tensor, "n y x"]:
    """Return masks of the whole image, of `size`, from the probabilities over each box.

    Bilinear between the probabilities' centres, 0 outside of the box (detectron2's pasting).
    """
    if found.masks is None:
        raise ValueError("these detections have no masks: the detector has no mask branch.")
    pasted = torch.zeros(len(found.boxes), *size, dtype=torch.bool, device=found.boxes.device)
    # One pixel more on each side: there the interpolation towards 0 still has a value.
    first = (found.boxes[:, :2].floor() - 1).clamp(min=0)
    edges = torch.cat([first, found.boxes[:, 2:].ceil() + 1], dim=1).long().tolist()
    for mask, box, image, (x1, y1, x2, y2) in zip(
        found.masks, found.boxes, pasted, edges, strict=True
    ):
        part = image[y1:y2, x1:x2]
        x = _relative(x1, part.shape[1], box[0], box[2])
        y = _relative(y1, part.shape[0], box[1], box[3])
        grid = torch.stack([x.expand(len(y), -1), y[:, None].expand(-1, len(x))], dim=-1)
        values = grid_sample(mask[None, None], grid[None], align_corners=False)[0, 0]
        part.copy_(values >= threshold)
    return pasted


def _relative(
    first: int, count: int, low: Float[Tensor, ""], high: Float[Tensor, ""]
) -> Float[Tensor, " count"]:
    """Centres of pixels, where the box goes from -1 to 1."""
    pixels = torch.arange(first, first + count, device=low.device, dtype=torch.float32) + 0.5
    return (pixels - low) / (high - low) * 2 - 1
