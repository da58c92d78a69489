"""A detector's detections in the test images, and its AP by the rules of the task."""

import math
from collections.abc import Sequence
from functools import partial

from hardmix.data.workers import WorkerPool
from hardmix.evaluation.detection.boxes import Size
from hardmix.evaluation.detection.c4 import C4Detector
from hardmix.evaluation.detection.coco_eval import coco_ap
from hardmix.evaluation.detection.detections import paste, resized
from hardmix.evaluation.detection.samples import (
    DetectionImage,
    DetectionSet,
    FoundObjects,
    found_objects,
)
from hardmix.evaluation.detection.transforms import DetectorInput, plain_input
from hardmix.evaluation.detection.voc_eval import voc_ap
from hardmix.runtime.console import progress
from hardmix.runtime.device import Compute, send
from hardmix.runtime.distributed import gather_objects, rank, world_size
from hardmix.settings.detection_options import DetectionTask

Scores = dict[str, dict[str, float | None]]
"""Full name of a metric -> ap, ap50, ap75 and more, from 0 to 1; None if undefined."""


def find_objects(
    detector: C4Detector,
    images: Sequence[DetectionImage],
    side: int,
    workers: int | None,
    compute: Compute,
) -> list[FoundObjects]:
    """Return the detections in each image, in order; the processes share the images."""
    detector.eval()
    mine = list(images)[rank() :: world_size()]
    pool = WorkerPool(partial(plain_input, side=side), workers, compute.device)
    found = []
    with progress("detecting", len(mine)) as meter:
        for number, each in enumerate(pool.run(mine), start=1):
            found.append(find_in(detector, each, compute))
            meter.advance(number)
    pool.close()
    everyone = gather_objects(found)
    return [
        everyone[number % world_size()][number // world_size()] for number in range(len(images))
    ]


def find_in(detector: C4Detector, each: DetectorInput, compute: Compute) -> FoundObjects:
    """Return one image's detections, in the pixels of its file."""
    seen = Size(*each.image.shape[1:])
    original = Size(each.sample.height, each.sample.width)
    with compute.autocast():
        seen_objects = detector.detect([send(each.image, compute.device)])[0]
    found = resized(seen_objects, seen, original)
    masks = None if found.masks is None else paste(found, original)
    return found_objects(found.boxes, found.scores, found.classes, masks)


def score(task: DetectionTask, test: DetectionSet, found: Sequence[FoundObjects]) -> Scores:
    """Return AP by the rules of VOC or of COCO, each under its own name."""
    if task == "voc":
        number = len(test.classes)
        aps = [
            voc_ap(test.images, found, number),
            voc_ap(test.images, found, number, "VOC12 area"),
        ]
        return {each.metric: {"ap": each.ap, "ap50": each.ap50, "ap75": each.ap75} for each in aps}
    by_id = {int(image.id): each for image, each in zip(test.images, found, strict=True)}
    scores: Scores = {}
    for kind in ("box", "mask"):
        ap = coco_ap(test, by_id, kind)
        values = {name: value for name, value in vars(ap).items() if name != "kind"}
        scores[f"COCO {kind}"] = {
            name: None if math.isnan(value) else value for name, value in values.items()
        }
    return scores
