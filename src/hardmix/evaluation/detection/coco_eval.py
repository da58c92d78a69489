"""AP of boxes or masks by the rules of COCO, computed by pycocotools (the extra `detection`)."""

import contextlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hardmix.data.image_files import printable
from hardmix.errors import InputError
from hardmix.evaluation.detection.coco_data import Json, category_ids, read_json
from hardmix.evaluation.detection.samples import FoundObjects, coco_tools

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


def coco_ap(annotations: Path, detections: Mapping[int, FoundObjects], kind: Kind) -> CocoAP:
    """Return the AP of detections by image id; an image without an entry has none."""
    content = read_json(annotations)
    known = {image["id"] for image in content["images"]}
    foreign = [image for image in detections if image not in known]
    if foreign:
        raise InputError(
            f"{len(foreign)} images with detections (first: id {foreign[0]}) are not in"
            f" {printable(annotations)}: use the annotations of the images that were tested."
        )
    results = _results(detections, category_ids(content), kind)
    numbers = _evaluate(content, results, "bbox" if kind == "box" else "segm")
    return CocoAP(kind, *(value if value >= 0 else float("nan") for value in numbers))


def _results(
    detections: Mapping[int, FoundObjects], categories: list[int], kind: Kind
) -> list[Json]:
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
            entry: Json = {"image_id": image, "category_id": categories[label], "score": score}
            if kind == "box" or found.masks is None:
                entry["bbox"] = boxes[number]
            else:
                mask = found.masks[number]
                entry["segmentation"] = {"size": [mask.height, mask.width], "counts": mask.counts}
            entries.append(entry)
    return entries


def _evaluate(content: Json, results: list[Json], kind: str) -> list[float]:
    """The first six of pycocotools' numbers."""
    coco, evaluation = coco_tools("coco").COCO, coco_tools("cocoeval").COCOeval
    with contextlib.redirect_stdout(io.StringIO()):  # it prints as it goes
        truth = coco()
        truth.dataset = {"info": {}, **content}
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
