"""AP by the rules of PASCAL VOC, as detectron2 applies them to the paper's test images.

- Scores are rounded to 3 decimals and boxes to one; the most certain detections come first, equal
  ones in their own order.
- Pixels are counted from 1 and those at both ends of a box belong to it.
- A detection is compared only with the object of its class that it overlaps most. It is right if
  their IoU is above the threshold and no earlier detection has found the object, wrong otherwise;
  if the object is difficult, the detection is ignored.

COCO's AP of the same detections differs by as much as the paper's gains; hence the separate types
`VocAP` and `CocoAP`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float64, Int64

from hardmix.errors import InputError
from hardmix.evaluation.detection.samples import DetectionImage, FoundObjects

Metric = Literal["VOC07 11-point", "VOC12 area"]

THRESHOLDS = tuple(percent / 100 for percent in range(50, 100, 5))
"""Thresholds that the IoU must exceed."""

# Not 0.1, 0.2, ...: the protocol counts in steps of a binary 0.1, and 3 * 0.1 > 3 / 10.
_RECALLS = np.arange(11) * 0.1

_NOTHING = -1.0
"""IoU of a detection in an image without an object of its class."""


@dataclass(frozen=True)
class VocAP:
    """Means over classes, from 0 to 1. Not comparable with COCO's AP."""

    metric: Metric
    ap: float
    """Over the thresholds .50, .55, ..., .95."""
    ap50: float
    ap75: float
    by_class: tuple[float, ...]
    """AP over the thresholds; NaN for a class without objects, which the means ignore."""


@dataclass(frozen=True, eq=False)
class _Matches:
    """All detections, in the order of images, and the object each overlaps most."""

    scores: Float64[np.ndarray, " found"]
    classes: Int64[np.ndarray, " found"]
    overlaps: Float64[np.ndarray, " found"]
    objects: Int64[np.ndarray, " found"]
    """Indices of objects, counted over all images."""
    difficult: Bool[np.ndarray, " found"]


def voc_ap(
    images: Sequence[DetectionImage],
    detections: Sequence[FoundObjects],
    number_of_classes: int,
    metric: Metric = "VOC07 11-point",
) -> VocAP:
    """Return the AP of the detections in each image.

    For a class without objects, detectron2 reports an AP of 0 (11 points) or NaN (area); here the
    means ignore it. VOC itself has no such class.
    """
    if len(images) != len(detections) or not images:
        raise InputError(
            f"{len(detections)} lists of detections for {len(images)} images: pass one per image."
        )
    matches = _match(images, detections)
    counts = np.zeros(number_of_classes, dtype=np.int64)
    for image in images:
        counted = np.append(image.classes[~image.difficult], image.unfindable)
        counts += np.bincount(counted, minlength=number_of_classes)
    table = np.full((number_of_classes, len(THRESHOLDS)), np.nan)
    for number in np.flatnonzero(counts):
        table[number] = _class_ap(matches, int(number), int(counts[number]), metric)
    if not counts.any():
        raise InputError(
            f"none of the {len(images)} test images has an object that counts: AP is undefined."
        )
    means = np.nanmean(table, axis=0)
    return VocAP(
        metric,
        float(means.mean()),
        float(means[THRESHOLDS.index(0.5)]),
        float(means[THRESHOLDS.index(0.75)]),
        tuple(table.mean(axis=1).tolist()),
    )


def _match(images: Sequence[DetectionImage], detections: Sequence[FoundObjects]) -> _Matches:
    overlaps, objects, difficult, before = [], [], [], 0
    for image, found in zip(images, detections, strict=True):
        if not (np.isfinite(found.boxes).all() and np.isfinite(found.scores).all()):
            raise InputError(f"the detections in image {image.id} contain NaN or infinity.")
        shares = np.full((len(found.classes), len(image.classes) + 1), _NOTHING)
        same = found.classes[:, None] == image.classes
        shares[:, :-1] = np.where(same, _iou(_counted(found), _annotated(image)), _NOTHING)
        best = shares.argmax(axis=1)
        overlaps.append(shares[np.arange(len(best)), best])
        objects.append(before + best)
        difficult.append(np.append(image.difficult, False)[best])
        before += len(image.classes) + 1
    # float32 times 1000 is exact in float64, so that this rounds as printing to 3 decimals does.
    scores = [found.scores.astype(np.float64).round(3) for found in detections]
    return _Matches(
        np.concatenate(scores),
        np.concatenate([found.classes for found in detections]),
        np.concatenate(overlaps),
        np.concatenate(objects),
        np.concatenate(difficult),
    )


def _counted(found: FoundObjects) -> Float64[np.ndarray, "found 4"]:
    """Return boxes as the protocol writes them: pixels from 1, one decimal."""
    boxes = found.boxes + np.array([1, 1, 0, 0], dtype=np.float32)
    return np.asarray(boxes.astype(np.float64).round(1))


def _annotated(image: DetectionImage) -> Float64[np.ndarray, "objects 4"]:
    return np.asarray(image.boxes + np.array([1.0, 1.0, 0.0, 0.0]))


def _iou(
    first: Float64[np.ndarray, "a 4"], second: Float64[np.ndarray, "b 4"]
) -> Float64[np.ndarray, "a b"]:
    """Return the intersection over union, counting the last pixel of each box."""
    low = np.maximum(first[:, None, :2], second[None, :, :2])
    high = np.minimum(first[:, None, 2:], second[None, :, 2:])
    shared = np.maximum(high - low + 1, 0).prod(axis=2)
    areas = [(boxes[:, 2:] - boxes[:, :2] + 1).prod(axis=1) for boxes in (first, second)]
    return np.asarray(shared / (areas[0][:, None] + areas[1] - shared))


def _class_ap(
    matches: _Matches, number: int, positives: int, metric: Metric
) -> Float64[np.ndarray, " thresholds"]:
    """Return the AP of one class at each threshold."""
    mine = np.flatnonzero(matches.classes == number)
    order = mine[np.argsort(-matches.scores[mine], kind="stable")]
    overlaps, objects = matches.overlaps[order], matches.objects[order]
    values = []
    for threshold in THRESHOLDS:
        hit = overlaps > threshold
        neither = hit & matches.difficult[order]
        candidates = np.flatnonzero(hit & ~neither)
        right = np.zeros(len(order), dtype=np.bool_)
        right[candidates[np.unique(objects[candidates], return_index=True)[1]]] = True
        recall = np.cumsum(right) / positives
        precision = np.cumsum(right) / np.maximum(np.cumsum(~neither), 1)
        values.append(average_precision(recall, precision, metric))
    return np.array(values)


def average_precision(
    recall: Float64[np.ndarray, " found"], precision: Float64[np.ndarray, " found"], metric: Metric
) -> float:
    """Return the average precision, from recall and precision after each detection.

    The precision at a recall is the best one there or later; it is averaged over 11 recalls, or
    over the whole curve.
    """
    best = np.append(np.maximum.accumulate(precision[::-1])[::-1], 0.0)
    if metric == "VOC07 11-point":
        return float(best[np.searchsorted(recall, _RECALLS)].mean())
    return float((np.diff(recall, prepend=0.0) * best[:-1]).sum())
