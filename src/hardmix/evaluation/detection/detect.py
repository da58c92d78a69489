"""`hardmix detect RUN`: a run's encoder fine-tuned as a detector (Sec. 5.2, Tables 2 and 3).

    RUN/detection/voc-24k/trial-0/    checkpoints, metrics.jsonl, result.json, pictures/*.png
    RUN/results/detection-voc-24k.json    mean and standard deviation over the trials

Running the same command again resumes: finished trials are read, not repeated.
"""

import dataclasses
import io
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hardmix.errors import InputError
from hardmix.evaluation.detection.coco_data import open_coco
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
from hardmix.evaluation.detection.drawing import compare
from hardmix.evaluation.detection.samples import DetectionSplits, FoundObjects
from hardmix.evaluation.detection.testing import Scores, find_objects, score
from hardmix.evaluation.detection.transforms import check_readable
from hardmix.evaluation.detection.voc_data import open_voc
from hardmix.evaluation.features import load_encoder
from hardmix.models.backbones import build_backbone
from hardmix.runs.folder import Run
from hardmix.runs.weight_files import read_weights
from hardmix.runtime.atomic_files import locked_folder, remove_leftovers, write_atomically
from hardmix.runtime.console import progress, say, table, warn
from hardmix.runtime.device import choose_compute
from hardmix.runtime.distributed import broadcast_text, is_main, meet
from hardmix.runtime.random_numbers import seed_of
from hardmix.settings.detection_options import DetectionConfig
from hardmix.settings.saved import read_json

PICTURES = 6
"""Test images that are drawn for each trial."""

NAMED = 5
"""Invalid objects that are reported one by one; the others are only counted."""


def evaluate(
    path: Path,
    config: DetectionConfig,
    root: Path,
    *,
    weights: Path | None = None,
    out: Path | None = None,
) -> dict[str, Any]:
    """Train and test `config.trials` detectors on the data in `root`; means go to results/."""
    run = Run.open(path)
    name = f"detection-{config.task}-{config.schedule}" + (
        "" if config.start == "run" else f"-{config.start}"
    )
    starting_trunk(path, config, weights, seed=0)  # raises if it cannot become a detector
    splits = open_splits(config, root)
    check_readable(splits.test.images, config.workers)
    folder = out or run.path / "detection" / name.removeprefix("detection-")
    claim(folder, config, root, weights)
    trials = []
    with locked_folder(folder):
        for number in range(config.trials):
            seed = config.seed + number
            trunk = starting_trunk(path, config, weights, seed)
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
    path: Path, config: DetectionConfig, weights: Path | None, seed: int
) -> nn.Module:
    """Return the network to fine-tune: the run's, or the same architecture as a baseline."""
    if (weights is None) == (config.start == "supervised"):
        raise InputError(
            f"start={config.start!r} with weights={weights}: start='supervised' needs a file of"
            " torchvision's weights, and no other start takes one (--from, --weights)."
        )
    encoder = load_encoder(path)
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
    given = {"settings": values, "data": str(root), "weights": weights and str(weights)}
    wanted = json.loads(json.dumps(given))
    file = folder / "settings.json"
    if file.exists():
        try:
            found = read_json(file)
        except (OSError, ValueError) as error:
            raise InputError(f"{file} is not JSON: {error}; choose another folder.") from error
        if found != wanted:
            before = found.get("settings", {}) if isinstance(found, dict) else {}
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
            found = read_json(file)
            _headline(found["scores"])
            text = json.dumps(found)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
            raise InputError(
                f"{file} is incomplete ({error}): delete it to test the trial again."
            ) from error
    text = broadcast_text(text)
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
    meet()  # a process that could not build its own is noticed before the others wait on GPUs
    training = DetectorTraining(
        config, seed, splits.train, Run(folder), detector, optimizer, compute
    )
    restore(training)
    batches = Batches(splits.train, config, seed, device)
    curve = train(training, batches, splits)
    batches.close()
    scores, found = test(training, splits)
    result = {"seed": seed, "scores": scores, "curve": curve, "unreadable": len(batches.unreadable)}
    result["seconds"] = time.monotonic() - started
    if is_main():
        draw(folder / "pictures", splits, found)
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
    """Return the AP on the test images, and the detections."""
    config = training.config
    found = find_objects(
        training.detector, splits.test.images, config.test_side, config.workers, training.compute
    )
    return score(config.task, splits.test, found), found


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
    """Return each number's mean and sample deviation over trials (None for a single trial)."""
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
