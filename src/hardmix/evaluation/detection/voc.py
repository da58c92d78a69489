"""PASCAL VOC: data in its layout (Annotations/, ImageSets/Main/, JPEGImages/), and its AP.

A folder with VOC2007 and VOC2012 follows the paper's protocol: train on trainval of both, test on
the test images of 2007. Any other folder in this layout has the splits and classes of its files.
Objects marked difficult are kept, because the protocol trains on them.

AP is computed as detectron2 does for the paper's test images:

- Scores are rounded to 3 decimals and boxes to one; the most certain detections come first, and
  equal ones in their own order.
- Pixels are counted from 1, and those at both ends of a box belong to it.
- A detection is compared only with the object of its class that it overlaps most. It is right if
  their IoU is above the threshold and no earlier detection has found the object, and wrong
  otherwise; if the object is difficult, the detection is ignored.

COCO's AP of the same detections differs by as much as the paper's gains; hence the separate types
`VocAP` and `CocoAP`.
"""

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple
from xml.etree import ElementTree

import numpy as np
from jaxtyping import Bool, Float64, Int64

from hardmix.data.image_files import IMAGE_SUFFIXES, printable
from hardmix.errors import InputError
from hardmix.evaluation.detection.samples import (
    DetectionImage,
    DetectionSet,
    DetectionSplits,
    FoundObjects,
    for_training,
)

# fmt: off
VOC_CLASSES = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat",
    "chair", "cow", "diningtable", "dog", "horse", "motorbike", "person",
    "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)
# fmt: on
"""The 20 classes of VOC, in their usual order."""

_FOLDERS = ("Annotations", "ImageSets/Main", "JPEGImages")


class _VocObject(NamedTuple):
    name: str
    corners: tuple[float, float, float, float]
    """xmin, ymin, xmax, ymax as in the file: inclusive, with pixels counted from 1."""
    difficult: bool


class _Annotation(NamedTuple):
    id: str
    path: str
    height: int
    width: int
    objects: list[_VocObject]


def open_voc(root: Path) -> DetectionSplits:
    """Open training and test images of VOC2007 and VOC2012, or of a folder in VOC's layout."""
    devkit = root / "VOCdevkit" if (root / "VOCdevkit").is_dir() else root
    if any((devkit / year).is_dir() for year in ("VOC2007", "VOC2012")):
        return _voc_07_12(devkit)
    _check_layout(root)
    train_name, test_name = _splits(root)
    train, test = _read(root, train_name), _read(root, test_name)
    classes = sorted({thing.name for file in (*train, *test) for thing in file.objects})
    return _numbered(train, test, classes)


def _voc_07_12(devkit: Path) -> DetectionSplits:
    absent = [year for year in ("VOC2007", "VOC2012") if not (devkit / year).is_dir()]
    if absent:
        present = {"VOC2007", "VOC2012"}.difference(absent).pop()
        raise InputError(
            f"data.root={printable(devkit)} has {present} but not {absent[0]}: the protocol trains"
            f" on both. Add it, or set data.root={printable(devkit / present)} to use only one."
        )
    for year in ("VOC2007", "VOC2012"):
        _check_layout(devkit / year)
    train = _read(devkit / "VOC2007", "trainval") + _read(devkit / "VOC2012", "trainval")
    return _numbered(train, _read(devkit / "VOC2007", "test"), VOC_CLASSES)


def _check_layout(root: Path) -> None:
    absent = [name for name in _FOLDERS if not (root / name).is_dir()]
    if not absent:
        return
    inside = sorted(root.glob("*/Annotations")) if root.is_dir() else []
    hint = f"set data.root={printable(inside[0].parent)}" if inside else "choose another data.root"
    what = f"has no folder {' or '.join(absent)}" if root.is_dir() else "is not a folder"
    raise InputError(
        f"data.root={printable(root)} {what}. PASCAL VOC's layout is {', '.join(_FOLDERS)}: {hint}."
    )


def _splits(root: Path) -> tuple[str, str]:
    """Return the names of the lists to train and to test on."""
    lists = {file.stem for file in (root / "ImageSets" / "Main").glob("*.txt")}
    for train, test in (("trainval", "test"), ("train", "test"), ("train", "val")):
        if {train, test} <= lists:
            return train, test
    raise InputError(
        f"data.root={printable(root)}: ImageSets/Main lacks lists to train and to test on: write"
        " the names of the images to trainval.txt and test.txt, or to train.txt and val.txt."
    )


def _read(root: Path, split: str) -> list[_Annotation]:
    """Read all annotations of a split; one error reports all that are missing or broken."""
    names = _names(root / "ImageSets" / "Main" / f"{split}.txt")
    images = {
        Path(file).stem: file
        for file in sorted(os.listdir(root / "JPEGImages"))
        if Path(file).suffix.lower() in IMAGE_SUFFIXES
    }
    read, faults = [], []
    for name in names:
        try:
            if name not in images:
                raise ValueError(f"no image JPEGImages/{name}.jpg")
            read.append(_annotation(root, name, images[name]))
        except (OSError, ValueError, ElementTree.ParseError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            faults.append(f"{name}: {reason}")
    if faults:
        raise InputError(
            f"data.root={printable(root)}: {len(faults)} of {len(names)} images of the split"
            f" {split} cannot be used ({'; '.join(faults[:3])}): fix them, or remove them from"
            f" ImageSets/Main/{split}.txt."
        )
    return read


def _names(file: Path) -> list[str]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"data.root: {printable(file)} cannot be read: {error}.") from error
    # The lists of a single class have a second word on each line.
    names = [line.split()[0] for line in lines if line.strip()]
    if len(set(names)) < max(1, len(names)):
        what = "lists an image twice" if names else "lists no images"
        raise InputError(f"data.root: {printable(file)} {what}: write each name on its own line.")
    return names


def _annotation(root: Path, name: str, image: str) -> _Annotation:
    tree = ElementTree.parse(root / "Annotations" / f"{name}.xml").getroot()
    height, width = (int(_text(tree, f"size/{side}")) for side in ("height", "width"))
    if height < 1 or width < 1:
        raise ValueError(f"<size> is {width} x {height}")
    objects = [_object(element) for element in tree.findall("object")]
    return _Annotation(name, str(root / "JPEGImages" / image), height, width, objects)


def _object(element: ElementTree.Element) -> _VocObject:
    corners = [float(_text(element, f"bndbox/{key}")) for key in ("xmin", "ymin", "xmax", "ymax")]
    difficult = (element.findtext("difficult") or "0").strip()
    return _VocObject(
        _text(element, "name"),
        (corners[0], corners[1], corners[2], corners[3]),
        difficult not in ("", "0"),
    )


def _text(element: ElementTree.Element, path: str) -> str:
    text = (element.findtext(path) or "").strip()
    if not text:
        raise ValueError(f"no <{path.replace('/', '><')}> in <{element.tag}>")
    return text


def _numbered(
    train: list[_Annotation], test: list[_Annotation], classes: Iterable[str]
) -> DetectionSplits:
    names = tuple(classes)
    return DetectionSplits(for_training(_convert(train, names)), _convert(test, names, tested=True))


def _convert(
    annotations: list[_Annotation], classes: tuple[str, ...], tested: bool = False
) -> DetectionSet:
    """Number the classes; if `tested`, objects with invalid boxes count, as in detectron2."""
    numbers = {name: number for number, name in enumerate(classes)}
    images, dropped = [], []
    for file in annotations:
        valid, lost = [], []
        for thing in file.objects:
            if thing.name not in numbers:
                raise InputError(
                    f"{printable(file.path)}: the class {thing.name!r} in its annotation is not"
                    " one of VOC's 20: correct it."
                )
            fault = _fault(thing, file)
            if fault is None:
                valid.append(thing)
                continue
            counts = tested and not thing.difficult
            lost += [numbers[thing.name]] if counts else []
            end = "; it counts as not found" if counts else ""
            dropped.append(f"{file.id}: {thing.name} {fault}{end}")
        images.append(_detection_image(file, valid, numbers, lost))
    return DetectionSet(tuple(images), classes, tuple(dropped))


def _fault(thing: _VocObject, file: _Annotation) -> str | None:
    """Return why a box cannot be used, if so; one that is partly outside the image can."""
    left, top, right, bottom = thing.corners
    box = f"[{', '.join(f'{value:g}' for value in thing.corners)}]"
    if not all(map(math.isfinite, thing.corners)):
        return f"{box} contains NaN or infinity"
    if right < left or bottom < top:  # both ends belong to the box: one pixel is a box
        return f"{box} has no size"
    if right < 1 or bottom < 1 or left > file.width or top > file.height:
        return f"{box} is outside the image of {file.width} x {file.height}"
    return None


def _detection_image(
    file: _Annotation, things: list[_VocObject], numbers: dict[str, int], lost: list[int]
) -> DetectionImage:
    boxes = np.array([thing.corners for thing in things], dtype=np.float64).reshape(-1, 4)
    boxes[:, :2] -= 1  # the left edge of pixel 1 is 0, the right edge of pixel n is n
    return DetectionImage(
        file.id,
        file.path,
        file.height,
        file.width,
        boxes,
        np.array([numbers[thing.name] for thing in things], dtype=np.int64),
        np.array([thing.difficult for thing in things], dtype=np.bool_),
        np.zeros(len(things), dtype=np.bool_),
        unfindable=np.array(lost, dtype=np.int64),
    )


Metric = Literal["VOC07 11-point", "VOC12 area"]

THRESHOLDS = tuple(percent / 100 for percent in range(50, 100, 5))
"""Thresholds that the IoU must exceed."""

# The protocol counts in steps of a binary 0.1, and 3 * 0.1 > 3 / 10.
_RECALLS = np.arange(11) * 0.1

_NOTHING = -1.0
"""IoU of a detection in an image without an object of its class."""


@dataclass(frozen=True)
class VocAP:
    """Means over classes, from 0 to 1. Not comparable with COCO's AP."""

    metric: Metric
    ap: float
    """Mean over the thresholds .50, .55, ..., .95."""
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
    """Return boxes as the protocol writes them: pixels counted from 1, one decimal."""
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
