"""AP of boxes or masks by the rules of COCO, computed by pycocotools (the extra `detection`)."""

import contextlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hardmix.errors import InputError
from hardmix.evaluation.detection.samples import (
    DetectionImage,
    DetectionSet,
    FoundObjects,
    Mask,
    Rle,
    coco_tools,
)

Json = dict[str, Any]
Kind = Literal["box", "mask"]


@dataclass(frozen=True)
class CocoAP:
    """COCO's AP, from 0 to 1; NaN if there is no such object. Not comparable with VOC's."""

    kind: Kind
    ap: float
    """Over IoU .50, .55, ..., .95."""
    ap50: float
    ap75: float
    small: float
    """AP of objects of less than 32 x 32 pixels."""
    medium: float
    large: float
    """AP of objects of more than 96 x 96 pixels."""


def coco_ap(test: DetectionSet, detections: Mapping[int, FoundObjects], kind: Kind) -> CocoAP:
    """Return the AP of detections by image id; an image without an entry has none.

    Scored are the objects of the set, so that invalid ones that were skipped do not count.
    """
    known = {image.id for image in test.images}
    foreign = [image for image in detections if image not in known]
    if foreign:
        raise InputError(
            f"{len(foreign)} images with detections (first: id {foreign[0]}) are not among the"
            " test images: use the annotations of the images that were tested."
        )
    truth = _truth(test)
    numbers = _evaluate(truth, _results(detections, kind), "bbox" if kind == "box" else "segm")
    return CocoAP(kind, *(value if value >= 0 else float("nan") for value in numbers))


def _truth(test: DetectionSet) -> Json:
    """The true objects as pycocotools takes them; it reads an annotation's id 0 as "none"."""
    objects = [
        {"id": number, "image_id": image.id, **values}
        for number, (image, values) in enumerate(
            ((image, values) for image in test.images for values in _objects(image)), start=1
        )
    ]
    return {
        "info": {},
        "images": [{"id": i.id, "height": i.height, "width": i.width} for i in test.images],
        "categories": [{"id": n, "name": name} for n, name in enumerate(test.classes)],
        "annotations": objects,
    }


def _objects(image: DetectionImage) -> list[Json]:
    sizes = image.boxes[:, 2:] - image.boxes[:, :2]
    boxes = np.concatenate([image.boxes[:, :2], sizes], axis=1).tolist()
    areas = sizes.prod(axis=1) if image.areas is None else image.areas
    masks = [None] * len(boxes) if image.masks is None else image.masks
    columns = zip(boxes, areas, image.classes, image.crowd, masks, strict=True)
    return [
        {
            "bbox": box,
            "area": float(area),
            "category_id": int(number),
            "iscrowd": int(crowd),
            **({} if mask is None else {"segmentation": _segmentation(mask)}),
        }
        for box, area, number, crowd, mask in columns
    ]


def _segmentation(mask: Mask) -> Any:
    if isinstance(mask, Rle):
        return {"size": [mask.height, mask.width], "counts": mask.counts}
    return [polygon.reshape(-1).tolist() for polygon in mask]


def _results(detections: Mapping[int, FoundObjects], kind: Kind) -> list[Json]:
    """Detections as pycocotools takes them.

    Boxes or masks, never both: the size of a mask (small, medium, large) would be that of its box.
    """
    entries: list[Json] = []
    for image, found in detections.items():
        if kind == "mask" and found.masks is None:
            raise InputError(f"the detections in image {image} have no masks: use kind='box'.")
        corners = found.boxes.astype(np.float64)
        boxes = np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], axis=1).tolist()
        for number, (score, label) in enumerate(
            zip(found.scores.tolist(), found.classes.tolist(), strict=True)
        ):
            entry: Json = {"image_id": image, "category_id": label, "score": score}
            if kind == "box" or found.masks is None:
                entry["bbox"] = boxes[number]
            else:
                entry["segmentation"] = _segmentation(found.masks[number])
            entries.append(entry)
    return entries


def _evaluate(content: Json, results: list[Json], kind: str) -> list[float]:
    """The first six of pycocotools' numbers."""
    coco, evaluation = coco_tools("coco").COCO, coco_tools("cocoeval").COCOeval
    with contextlib.redirect_stdout(io.StringIO()):  # it prints as it goes
        truth = coco()
        truth.dataset = content
        truth.createIndex()
        run = evaluation(truth, _found(coco, truth, results), kind)
        run.evaluate()
        run.accumulate()
        run.summarize()
    return [float(value) for value in run.stats[:6]]


def _found(coco: Any, truth: Any, results: list[Json]) -> Any:
    if results:
        return truth.loadRes(results)
    nothing = coco()  # loadRes refuses an empty list
    nothing.dataset = {**truth.dataset, "annotations": []}
    nothing.createIndex()
    return nothing
