"""COCO: data in its layout, annotations/instances_*.json next to folders of images, and its AP.

Category ids, which have gaps in COCO, become class numbers 0, 1, ... in the order of the ids. AP is
computed by pycocotools (the extra `detection`).
"""

import contextlib
import io
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from hardmix.data.image_files import printable
from hardmix.errors import InputError
from hardmix.evaluation.detection.samples import (
    DetectionImage,
    DetectionSet,
    DetectionSplits,
    FoundObjects,
    Mask,
    Rle,
    coco_tools,
    decode_mask,
    for_training,
    run_lengths,
)

Json = dict[str, Any]
Kind = Literal["box", "mask"]


class _CocoObject(NamedTuple):
    number: int
    box: tuple[float, float, float, float]
    crowd: bool
    mask: Mask
    area: float


class _InvalidObjectError(ValueError):
    """An object to skip; the message gives the reason."""


def open_coco(root: Path, year: int = 2017) -> DetectionSplits:
    """Open the training images that have objects, and the validation images."""
    coco_tools("cocoeval")  # fail now if it is missing, not after training
    train, test = (
        read_coco(annotation_file(root, split, year), root / f"{split}{year}")
        for split in ("train", "val")
    )
    if train.classes != test.classes:
        raise InputError(
            f"data.root={printable(root)}: the train and val annotations have different categories:"
            " use files of the same data set."
        )
    return DetectionSplits(for_training(train), test)


def annotation_file(root: Path, split: str, year: int = 2017) -> Path:
    """Return the path of a split's annotations in COCO's layout."""
    return root / "annotations" / f"instances_{split}{year}.json"


def read_coco(annotations: Path, images: Path) -> DetectionSet:
    """Read the images listed in an annotation file, sorted by id."""
    content = read_json(annotations)
    try:
        return _read(content, annotations, images)
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"data.root: {printable(annotations)} is not in COCO's format"
            f" ({type(error).__name__}: {error}): see https://cocodataset.org/#format-data."
        ) from error


def read_json(file: Path) -> Json:
    """Read an annotation file and check that its ids are unique."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(
            f"data.root: the annotations {printable(file)} cannot be read ({reason}): COCO's layout"
            " is annotations/instances_train2017.json, instances_val2017.json, train2017, val2017."
        ) from error
    parts = ("images", "annotations", "categories")
    if not isinstance(content, dict) or not all(
        isinstance(content.get(part), list) for part in parts
    ):
        raise InputError(
            f"data.root: {printable(file)} is not in COCO's format: it must be an object with the"
            f" lists {', '.join(parts)}."
        )
    for part in parts:
        ids = [entry.get("id") for entry in content[part]]
        if len(set(ids)) < len(ids) or None in ids:
            raise InputError(
                f"data.root: {printable(file)}: the ids of {part} are missing or not unique:"
                " number them."
            )
    return content


def category_ids(content: Json) -> list[int]:
    """Return the category ids of classes 0, 1, ..."""
    return sorted(int(category["id"]) for category in content["categories"])


def _read(content: Json, file: Path, folder: Path) -> DetectionSet:
    names = {int(category["id"]): str(category["name"]) for category in content["categories"]}
    numbers = {category: number for number, category in enumerate(category_ids(content))}
    records = sorted(content["images"], key=lambda record: int(record["id"]))
    _check_images(records, folder)
    sizes = {int(record["id"]): (record["height"], record["width"]) for record in records}
    objects: dict[int, list[_CocoObject]] = {image: [] for image in sizes}
    dropped = []
    for entry in content["annotations"]:
        try:
            if entry["image_id"] not in sizes:
                raise _InvalidObjectError(f"its image {entry['image_id']} is not in the file")
            objects[entry["image_id"]].append(_object(entry, *sizes[entry["image_id"]], numbers))
        except _InvalidObjectError as error:
            dropped.append(f"{file.name}: annotation {entry['id']}: {error}")
    images = tuple(_image(record, folder, objects[int(record["id"])]) for record in records)
    return DetectionSet(images, tuple(names[category] for category in numbers), tuple(dropped))


def _check_images(records: list[Json], folder: Path) -> None:
    if not records:
        raise InputError("data.root: the annotations list no images: use another file.")
    names = [str(record["file_name"]) for record in records]
    absent = [name for name in names if not os.path.isfile(folder / name)]
    if absent:
        shown = ", ".join(map(printable, absent[:3]))
        raise InputError(
            f"data.root: {len(absent)} of {len(names)} images in the annotations are not in"
            f" {printable(folder)} ({shown}): unpack all of them, or use the right folder."
        )


def _object(entry: Json, height: int, width: int, numbers: dict[int, int]) -> _CocoObject:
    if entry["category_id"] not in numbers:
        raise InputError(
            f"data.root: annotation {entry['id']} has category_id={entry['category_id']}, which is"
            " not in the categories of the file: add it there or correct the annotation."
        )
    x, y, wide, high = (float(value) for value in entry["bbox"])
    if not all(map(math.isfinite, (x, y, wide, high))) or wide <= 0 or high <= 0:
        raise _InvalidObjectError(f"the box {entry['bbox']} has no size")
    if x >= width or y >= height or x + wide <= 0 or y + high <= 0:
        raise _InvalidObjectError(
            f"the box {entry['bbox']} is outside the {width} x {height} image"
        )
    try:
        mask = _mask(entry.get("segmentation"), height, width)
        area = entry.get("area") or decode_mask(mask, height, width).sum()
        if not math.isfinite(area):
            raise ValueError(f"its area is {area}")
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise _InvalidObjectError(f"the mask cannot be used ({error})") from error
    return _CocoObject(
        numbers[entry["category_id"]],
        (x, y, x + wide, y + high),
        bool(entry.get("iscrowd", 0)),
        mask,
        float(area),
    )


def _mask(segmentation: Any, height: int, width: int) -> Mask:
    if isinstance(segmentation, dict):
        if list(segmentation["size"]) != [height, width]:
            raise ValueError(f"its size {segmentation['size']} is not the image's")
        counts = segmentation["counts"]
        runs = counts if isinstance(counts, list) else run_lengths(counts.encode("ascii"))
        if min(runs, default=0) < 0 or sum(runs) != height * width:  # pycocotools does not check
            raise ValueError(f"its runs do not add up to {height} x {width} pixels")
        if isinstance(counts, list):
            coded = coco_tools("mask").frPyObjects(segmentation, height, width)["counts"]
            return Rle(height, width, coded)
        return Rle(height, width, counts.encode("ascii"))
    polygons = [flat for flat in segmentation or [] if len(flat) >= 6 and len(flat) % 2 == 0]
    if not polygons:
        raise ValueError("neither run lengths nor a polygon of 3 or more points")
    shapes = tuple(np.array(flat, dtype=np.float64).reshape(-1, 2) for flat in polygons)
    size = np.array([width, height])
    if not all(((shape >= -size) & (shape <= 2 * size)).all() for shape in shapes):
        # pycocotools walks along every edge: a far corner would fill the memory.
        raise ValueError("a corner is far outside the image, NaN or infinite")
    return shapes


def _image(record: Json, folder: Path, objects: list[_CocoObject]) -> DetectionImage:
    return DetectionImage(
        int(record["id"]),
        str(folder / record["file_name"]),
        int(record["height"]),
        int(record["width"]),
        np.array([thing.box for thing in objects], dtype=np.float64).reshape(-1, 4),
        np.array([thing.number for thing in objects], dtype=np.int64),
        np.zeros(len(objects), dtype=np.bool_),
        np.array([thing.crowd for thing in objects], dtype=np.bool_),
        tuple(thing.mask for thing in objects),
        np.array([thing.area for thing in objects], dtype=np.float64),
    )


@dataclass(frozen=True)
class CocoAP:
    """COCO's AP, from 0 to 1; NaN if there is no such object. Not comparable with VOC's."""

    kind: Kind
    ap: float
    """Mean over IoU .50, .55, ..., .95."""
    ap50: float
    ap75: float
    small: float
    """AP of objects of less than 32 x 32 pixels."""
    medium: float
    large: float
    """AP of objects of more than 96 x 96 pixels."""


def coco_ap(test: DetectionSet, detections: Mapping[int, FoundObjects], kind: Kind) -> CocoAP:
    """Return the AP of detections by image id; an image without an entry has no detections.

    Only the objects of the set are scored: invalid ones, which were skipped, do not count.
    """
    ids = {image.id for image in test.images}
    foreign = [image for image in detections if image not in ids]
    if foreign:
        raise InputError(
            f"{len(foreign)} images with detections (first: id {foreign[0]}) are not among the"
            " test images: use the annotations of the images that were tested."
        )
    truth = _truth(test)
    numbers = _evaluate(truth, _results(detections, kind), "bbox" if kind == "box" else "segm")
    return CocoAP(kind, *(value if value >= 0 else float("nan") for value in numbers))


def _truth(test: DetectionSet) -> Json:
    """Return the true objects as pycocotools takes them; it reads the id 0 as "no annotation"."""
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
    """Return detections as pycocotools takes them: boxes or masks.

    With both, the size of a mask (small, medium, large) would be that of its box.
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
    """Return the first six of pycocotools' numbers."""
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
