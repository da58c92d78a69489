"""`hardmix detect RUN`: a run's encoder fine-tuned as a detector (Sec. 5.2, Tables 2 and 3).

    RUN/detection/voc-24k/trial-0/    checkpoints, metrics.jsonl, result.json, pictures/*.png
    RUN/results/detection-voc-24k.json    mean and standard deviation over the trials

Running the same command again resumes: finished trials are read, not repeated.
"""

import dataclasses
import io
import json
import math
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import nn

from hardmix.data.image_files import read_image
from hardmix.data.workers import WorkerPool
from hardmix.errors import InputError
from hardmix.evaluation.detection.boxes import Size
from hardmix.evaluation.detection.c4 import C4Detector, paste, resized
from hardmix.evaluation.detection.coco import coco_ap, open_coco
from hardmix.evaluation.detection.detector_training import (
    Batches,
    DetectorTraining,
    build_detector,
    build_optimizer,
    precise_statistics,
    restore,
    save,
    train_until,
)
from hardmix.evaluation.detection.samples import (
    DetectionImage,
    DetectionSet,
    DetectionSplits,
    FoundObjects,
    Mask,
    decode_mask,
    found_objects,
)
from hardmix.evaluation.detection.transforms import DetectorInput, check_readable, plain_input
from hardmix.evaluation.detection.voc import open_voc, voc_ap
from hardmix.evaluation.trained_encoder import load_encoder
from hardmix.models.backbones import build_backbone
from hardmix.runs.checkpoints import step_named
from hardmix.runs.folder import Run
from hardmix.runs.weight_files import read_weights
from hardmix.runtime.console import progress, say, table, warn
from hardmix.runtime.device import Compute, choose_compute, send
from hardmix.runtime.distributed import (
    broadcast_object,
    gather_objects,
    is_main,
    meet,
    rank,
    world_size,
)
from hardmix.runtime.files import locked_folder, read_json, remove_leftovers, write_atomically
from hardmix.runtime.random_numbers import seed_of
from hardmix.settings.evaluations import DetectionConfig, DetectionTask

PICTURES = 6
"""Test images that are drawn for each trial."""

NAMED = 5
"""Invalid objects that are reported one by one; the others are only counted."""

SHOWN = 0.5
"""Smallest score of a detection that is drawn."""

LONGEST_DRAWN = 640
"""Pixels of a picture's longest side."""

COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")
"""Okabe and Ito's colours, which colour-blind people can distinguish."""

_HEAD, _GAP = 20, 8
"""Pixels above a picture and between two."""

Scores = dict[str, dict[str, float | None]]
"""Full name of a metric -> ap, ap50, ap75 and more, from 0 to 1; None if undefined."""


def evaluate(
    path: Path,
    config: DetectionConfig,
    root: Path,
    *,
    weights: Path | None = None,
    out: Path | None = None,
    checkpoint: str | None = None,
) -> dict[str, Any]:
    """Train and test `config.trials` detectors on the data in `root`; write means to results/.

    They start from the run's encoder, from one of its checkpoints, or from a baseline.
    """
    run = Run.open(path)
    name = f"detection-{config.task}-{config.schedule}" + (
        "" if config.start == "run" else f"-{config.start}"
    )
    if checkpoint is not None:
        name += f"-{step_named(run.checkpoints, checkpoint)}"
    starting_trunk(path, config, weights, 0, checkpoint)  # raises if it cannot become a detector
    splits = open_splits(config, root)
    check_readable(splits.test.images, config.workers)
    folder = out or run.path / "detection" / name.removeprefix("detection-")
    claim(folder, config, root, weights)
    trials = []
    with locked_folder(folder):
        for number in range(config.trials):
            seed = config.seed + number
            trunk = starting_trunk(path, config, weights, seed, checkpoint)
            trials.append(run_trial(folder / f"trial-{number}", seed, trunk, config, splits))
    result = {
        "metrics": summary([trial["scores"] for trial in trials]),
        "trials": trials,
        "settings": dataclasses.asdict(config),
        "start": config.start,
        "weights": None if weights is None else str(weights),
        "data": str(root),
        "images": {"train": len(splits.train.images), "test": len(splits.test.images)},
        "classes": list(splits.test.classes),
        "invalid_objects": len(splits.train.dropped) + len(splits.test.dropped),
    }
    if is_main():
        file = run.write_result(name, result)
        show(result, config)
        say(f"Wrote {file}")
        say(f"Pictures of true and detected objects: {folder / 'trial-0' / 'pictures'}")
    return result


def starting_trunk(
    path: Path,
    config: DetectionConfig,
    weights: Path | None,
    seed: int,
    checkpoint: str | None = None,
) -> nn.Module:
    """Return the network to fine-tune: the run's, or a baseline of the same architecture."""
    if (weights is None) == (config.start == "supervised"):
        raise InputError(
            f"start={config.start!r} with weights={weights}: start='supervised' needs a file of"
            " torchvision's weights, and no other start takes one (--from, --weights)."
        )
    if checkpoint is not None and config.start != "run":
        raise InputError(
            f"checkpoint={checkpoint} with start={config.start!r}: a baseline does not start from"
            " the run; omit one of the two."
        )
    encoder = load_encoder(path, checkpoint=checkpoint)
    if encoder.channels != 3:
        raise InputError(
            f"{path} was trained on images of {encoder.channels} channels: a detector needs 3."
        )
    trunk = encoder.trunk
    if config.start != "run":
        torch.manual_seed(seed_of("detector's trunk", seed))
        trunk = build_backbone(encoder.backbone).trunk
    if weights is not None:
        load_supervised(trunk, weights, encoder.backbone)
    torch.manual_seed(seed_of("detector's heads", seed))
    build_detector(trunk, 1, config)
    return trunk


def load_supervised(trunk: nn.Module, file: Path, backbone: str) -> None:
    """Load the weights of a classifier of the same architecture, without its last layer."""
    tensors = {k: v for k, v in read_weights(file).tensors.items() if not k.startswith("fc.")}
    wanted = trunk.state_dict()
    other = wanted.keys() ^ tensors.keys()
    other |= {name for name in wanted.keys() & tensors if wanted[name].shape != tensors[name].shape}
    if other:
        raise InputError(
            f"weights={file} does not fit {backbone}: {len(other)} tensors differ, such as"
            f" {min(other)}; use torchvision's file for that network."
        )
    trunk.load_state_dict(tensors)


def open_splits(config: DetectionConfig, root: Path) -> DetectionSplits:
    """Open the data; invalid objects are reported and skipped."""
    splits = open_voc(root) if config.task == "voc" else open_coco(root)
    for split, data in zip(("training", "test"), splits, strict=True):
        say(f"{split}: {len(data.images)} images, {len(data.classes)} classes")
        for fault in data.dropped[:NAMED]:
            warn(f"skipped: {fault}")
        if len(data.dropped) > NAMED:
            warn(f"skipped: {len(data.dropped) - NAMED} more invalid objects of the {split} data")
    return splits


def claim(folder: Path, config: DetectionConfig, root: Path, weights: Path | None) -> None:
    """Record the settings in the folder; raise InputError if it was started with others."""
    free = ("trials", "workers", "device", "log_every")
    values = {k: v for k, v in dataclasses.asdict(config).items() if k not in free}
    facts = {"settings": values, "data": str(root), "weights": weights and str(weights)}
    wanted = json.loads(json.dumps(facts))
    file = folder / "settings.json"
    if file.exists():
        try:
            recorded = read_json(file)
        except (OSError, ValueError) as error:
            raise InputError(f"{file} is not JSON: {error}; choose another folder.") from error
        if recorded != wanted:
            before = recorded.get("settings", {}) if isinstance(recorded, dict) else {}
            after = wanted["settings"]
            changed = [k for k in after if before.get(k) != after[k]] or ["data or weights"]
            raise InputError(
                f"{folder} was started with other settings ({', '.join(changed)}): use the same"
                " settings to resume, or another folder."
            )
    if is_main():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(file, json.dumps(wanted, indent=2).encode())
        except OSError as error:
            raise InputError(f"out={folder} cannot be written: {error.strerror}.") from error


def _finished(file: Path) -> dict[str, Any] | None:
    """Return the result of a finished trial, read by rank 0 for all; None if unfinished."""
    text = ""
    if is_main() and file.exists():
        try:
            result = read_json(file)
            _headline(result["scores"])
            text = json.dumps(result)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
            raise InputError(
                f"{file} is incomplete ({error}): delete it to test the trial again."
            ) from error
    text = broadcast_object(text)
    return json.loads(text) if text else None


def run_trial(
    folder: Path,
    seed: int,
    trunk: nn.Module,
    config: DetectionConfig,
    splits: DetectionSplits,
) -> dict[str, Any]:
    """Train and test one detector, without repeating what is already done."""
    file = folder / "result.json"
    finished = _finished(file)
    if finished is not None:
        say(f"{folder.name} is finished: {_headline(finished['scores'])}")
        return finished
    if is_main():
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder / "checkpoints")
    started = time.monotonic()
    compute = choose_compute(config.device, config.precision)
    device = compute.device
    torch.manual_seed(seed_of("detector's heads", seed))
    detector = build_detector(trunk, len(splits.train.classes), config, device)
    optimizer = build_optimizer(detector, config)
    meet()  # a process that could not build its detector is noticed before the others wait
    training = DetectorTraining(
        config, seed, splits.train, Run(folder), detector, optimizer, compute
    )
    restore(training)
    batches = Batches(splits.train, config, seed, device)
    curve = train(training, batches, splits)
    batches.close()
    scores, detections = test(training, splits)
    result = {"seed": seed, "scores": scores, "curve": curve, "unreadable": len(batches.unreadable)}
    result["seconds"] = time.monotonic() - started
    if is_main():
        draw(folder / "pictures", splits, detections)
        write_atomically(file, json.dumps(result, indent=2).encode())
    say(f"{folder.name}: {_headline(scores)}")
    return result


def train(
    training: DetectorTraining, batches: Batches, splits: DetectionSplits
) -> list[dict[str, Any]]:
    """Train to the end with regular checkpoints and tests; returns the tests' results.

    As in detectron2, every test and the last checkpoint have precise batch norm.
    """
    config, folder = training.config, training.folder
    title = f"{config.task} {folder.path.name}"
    with progress(title, config.iterations, training.step) as meter:
        while training.step < config.iterations:
            every = [config.save_every, config.test_every or config.iterations]
            stop = min(config.iterations, *((training.step // each + 1) * each for each in every))
            train_until(training, stop, batches, meter)
            tested = config.test_every and stop % config.test_every == 0
            if tested or stop == config.iterations:
                precise_statistics(training, batches)
            if tested and stop < config.iterations:
                scores, _ = test(training, splits)
                if is_main():
                    folder.log({"step": stop, "scores": scores})
                say(f"step {stop}: {_headline(scores)}")
            save(training)
    return [line for line in folder.metrics() if "scores" in line]


def test(training: DetectorTraining, splits: DetectionSplits) -> tuple[Scores, list[FoundObjects]]:
    """Return the AP on the test images, and the detections in them."""
    config = training.config
    detections = find_objects(
        training.detector, splits.test.images, config.test_side, config.workers, training.compute
    )
    return score(config.task, splits.test, detections), detections


def draw(folder: Path, splits: DetectionSplits, found: list[FoundObjects]) -> None:
    """Draw a few evenly spaced test images with true and detected objects."""
    folder.mkdir(exist_ok=True)
    images = splits.test.images
    for number in range(min(PICTURES, len(images))):
        place = number * len(images) // min(PICTURES, len(images))
        buffer = io.BytesIO()
        compare(images[place], found[place], splits.test.classes).save(buffer, "PNG")
        write_atomically(folder / f"{number}.png", buffer.getvalue())


def summary(trials: list[Scores]) -> dict[str, dict[str, Any]]:
    """Return each number's mean and sample deviation over the trials; a single trial has none."""
    means: dict[str, dict[str, Any]] = {}
    for metric, names in trials[0].items():
        means[metric] = {}
        for name in names:
            values = [value for trial in trials if (value := trial[metric][name]) is not None]
            means[metric][name] = {
                "mean": statistics.fmean(values) if values else None,
                "std": statistics.stdev(values) if len(values) > 1 else None,
                "trials": len(values),
            }
    return means


def show(result: dict[str, Any], config: DetectionConfig) -> None:
    """Print a table with one line per metric."""
    rows = []
    for metric, numbers in result["metrics"].items():
        row = [metric]
        for name in ("ap", "ap50", "ap75"):
            mean, std = numbers[name]["mean"], numbers[name]["std"]
            text = "-" if mean is None else f"{100 * mean:.2f}"
            row.append(text + ("" if std is None else f" ± {100 * std:.2f}"))
        rows.append(row)
    trials = f"{config.trials} trial{'s' * (config.trials != 1)}"
    table(f"{config.task} {config.schedule}, {trials}", ["", "AP", "AP50", "AP75"], rows)


def _headline(scores: Scores) -> str:
    metric, numbers = next(iter(scores.items()))
    shown = [
        f"{name} {100 * value:.1f}"
        for name, key in (("AP", "ap"), ("AP50", "ap50"), ("AP75", "ap75"))
        if (value := numbers[key]) is not None
    ]
    return f"{metric}: {', '.join(shown)}"


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
    detections = []
    with progress("detecting", len(mine)) as meter:
        for number, image in enumerate(pool.run(mine), start=1):
            detections.append(find_in(detector, image, compute))
            meter.advance(number)
    pool.close()
    everyone = gather_objects(detections)
    return [
        everyone[number % world_size()][number // world_size()] for number in range(len(images))
    ]


def find_in(detector: C4Detector, image: DetectorInput, compute: Compute) -> FoundObjects:
    """Return the detections in one image, in the pixels of its file."""
    seen = Size(*image.image.shape[1:])
    original = Size(image.sample.height, image.sample.width)
    with compute.autocast():
        detections = detector.detect([send(image.image, compute.device)])[0]
    detections = resized(detections, seen, original)
    masks = None if detections.masks is None else paste(detections, original)
    return found_objects(detections.boxes, detections.scores, detections.classes, masks)


def score(task: DetectionTask, test: DetectionSet, found: Sequence[FoundObjects]) -> Scores:
    """Return the AP by the rules of VOC or of COCO, each under its own name."""
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


def compare(
    sample: DetectionImage, found: FoundObjects, classes: Sequence[str], score: float = SHOWN
) -> Image.Image:
    """Draw the image twice: with its true objects, and with those detected above `score`."""
    kept = found.scores >= score
    masks = found.masks and tuple(
        mask for mask, keep in zip(found.masks, kept, strict=True) if keep
    )
    names = [classes[number] for number in sample.classes]
    guesses = [
        f"{classes[number]} {value:.2f}"
        for number, value in zip(found.classes[kept], found.scores[kept], strict=True)
    ]
    truth = _draw(sample, sample.boxes, sample.classes, names, sample.masks)
    answer = _draw(sample, found.boxes[kept], found.classes[kept], guesses, masks)
    titles = (f"true: {len(names)}", f"detected (score {score:g} or more): {len(guesses)}")
    return _side_by_side((truth, answer), titles)


def _draw(
    sample: DetectionImage,
    boxes: np.ndarray,
    numbers: np.ndarray,
    texts: Sequence[str],
    masks: Sequence[Mask] | None,
) -> Image.Image:
    pixels = read_image(sample.path).permute(1, 2, 0).numpy().copy()
    for number, mask in zip(numbers, masks or (), strict=False):
        inside = decode_mask(mask, sample.height, sample.width)
        colour = np.array(_rgb(int(number)))
        pixels[inside] = (0.55 * pixels[inside] + 0.45 * colour).astype(np.uint8)
    picture = Image.fromarray(pixels)
    scale = min(1.0, LONGEST_DRAWN / max(picture.size))
    size = tuple(max(1, round(side * scale)) for side in picture.size)
    picture = picture.resize((size[0], size[1]))
    pen = ImageDraw.Draw(picture)
    for box, number, text in zip(boxes * scale, numbers, texts, strict=True):
        colour_name = COLOURS[int(number) % len(COLOURS)]
        pen.rectangle([float(value) for value in box], outline=colour_name, width=2)
        place = (float(box[0]) + 3, float(box[1]) + 2)
        pen.rectangle(pen.textbbox(place, text), fill=colour_name)
        pen.text(place, text, fill="black")
    return picture


def _side_by_side(pictures: Sequence[Image.Image], titles: Sequence[str]) -> Image.Image:
    width = sum(max(picture.width, 160) for picture in pictures) + _GAP * (len(pictures) + 1)
    height = max(picture.height for picture in pictures) + _HEAD + _GAP
    sheet = Image.new("RGB", (width, height), "white")
    pen, left = ImageDraw.Draw(sheet), _GAP
    for picture, title in zip(pictures, titles, strict=True):
        pen.text((left, 4), title, fill="black")
        sheet.paste(picture, (left, _HEAD))
        left += max(picture.width, 160) + _GAP
    return sheet


def _rgb(number: int) -> tuple[int, int, int]:
    colour = COLOURS[number % len(COLOURS)]
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
