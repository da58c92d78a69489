"""`hardmix linear RUN`: accuracy of a linear classifier on the frozen trunk (Sec. 5, App. C.1).

The paper's protocol trains it on random crops, with official MoCo's details: trunk in evaluation
mode, weights from N(0, 0.01), SGD with momentum 0.9 and no weight decay. Every process encodes its
rows of a batch; the gradient is that of the whole batch's mean loss, so that the result depends on
the number of processes only through rounding. Every finished epoch is saved, and the same command
resumes after it.

`cached` extracts features once instead and fits in seconds; its results are labelled as those of
another protocol.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hardmix.data.batches import Batch
from hardmix.data.loading import ViewLoader
from hardmix.errors import InputError
from hardmix.evaluation.accuracy import Accuracy, accuracy_of, mean_and_deviation
from hardmix.evaluation.evaluated_run import EvaluatedRun, open_evaluated_run, single_view
from hardmix.evaluation.features import Features
from hardmix.evaluation.probe import cross_validated_penalty, new_classifier, probe_accuracy
from hardmix.evaluation.trained_encoder import weights_hash
from hardmix.runs.checkpoints import optimizer_tensors, share_optimizer
from hardmix.runs.folder import Run
from hardmix.runtime.console import Meter, progress, say, warn
from hardmix.runtime.device import one_launch
from hardmix.runtime.distributed import (
    add_up,
    broadcast_object,
    is_main,
    rank,
    share_state,
    together,
    world_size,
)
from hardmix.settings.config import DataConfig
from hardmix.settings.evaluations import (
    LINEAR_PRESETS,
    LinearConfig,
    LinearOptions,
    LinearPreset,
    ProbeSolver,
)
from hardmix.settings.schedules import step

Curve = list[dict[str, float]]
"""Epoch, learning rate, loss and test accuracy of each epoch."""
SMALL = 100_000
"""Training images below which features are cached, unless a preset is given."""


def measure(path: Path, options: LinearOptions, data: DataConfig | None = None) -> dict[str, Any]:
    """Evaluate by the protocol of the options; by default, small data sets are cached."""
    evaluated = open_evaluated_run(path, data, options.precision, options.checkpoint)
    cached = options.cached
    if cached is None:
        named = options.preset is not None or bool(options.changes)
        cached = not named and len(evaluated.train) < SMALL
    if cached:
        return measure_cached(evaluated, options)
    return measure_on_crops(evaluated, options)


def measure_cached(
    evaluated: EvaluatedRun, options: LinearOptions, name: str = "linear-cached"
) -> dict[str, Any]:
    """Fit a classifier per seed to cached features; writes RUN/results/NAME.json."""
    solver, seeds = options.solver, options.seeds
    arrays = evaluated.split_features(evaluated.encoder)
    penalty = options.penalty
    tried: dict[float, float] = {}
    if penalty is None:
        say("Cross-validating the probe's penalty on the training images.")
        penalty, tried = cross_validated_penalty(*arrays[:2], solver=solver)
        say(f"Penalty {penalty:g}: held-out accuracy {_listed(tried)}.")
    accuracies = [
        probe_accuracy(*arrays, solver=solver, penalty=penalty, seed=seed) for seed in range(seeds)
    ]
    top1, deviation = mean_and_deviation([each.top1 for each in accuracies])
    top5, deviation5 = mean_and_deviation([each.top5 for each in accuracies])
    result = {
        "protocol": cached_protocol(solver),
        "top1": top1,
        "top1_std": deviation,
        "top5": top5,
        "top5_std": deviation5,
        "seeds": seeds,
        "penalty": penalty,
        "penalty_chosen_by": "cross-validation" if tried else "the user",
        "cross_validation": {f"{each:g}": accuracy for each, accuracy in tried.items()},
        "train": len(evaluated.train),
        "test": len(evaluated.test),
    }
    say("This is not the paper's protocol, which trains on random crops and needs a preset.")
    row = f"{solver}, penalty {penalty:g}, {seeds} seeds, ± {deviation:.4f}"
    rows = {row: Accuracy(top1, top5)}
    return evaluated.conclude(name, result, "linear probe, cached features", rows)


def _listed(accuracies: Mapping[float, float]) -> str:
    return ", ".join(f"{value:.4f} with {penalty:g}" for penalty, value in accuracies.items())


def cached_protocol(solver: ProbeSolver) -> str:
    """Return the name of the cached protocol in a result file."""
    return f"cached features, {solver}: not the paper's"


def measure_on_crops(evaluated: EvaluatedRun, options: LinearOptions) -> dict[str, Any]:
    """Run the paper's protocol; writes RUN/results/linear.json, led by the last epoch's result."""
    config, protocol = _protocol(evaluated, options)
    check_batch(config, len(evaluated.train))  # before the minutes of the features
    before = weights_hash(evaluated.encoder)
    test = evaluated.features(evaluated.encoder, evaluated.test, "test features")
    training = train_classifier(evaluated, config, test, before)
    curve = training.curve
    unchanged = weights_hash(evaluated.encoder) == before
    assert unchanged, "the trunk changed under linear evaluation"
    best = max(curve, key=lambda line: line["top1"])
    result = {
        "protocol": protocol,
        "top1": curve[-1]["top1"],
        "top5": curve[-1]["top5"],
        "best_top1": best["top1"],
        "best_top5": best["top5"],
        "best_epoch": best["epoch"],
        "trunk_unchanged": unchanged,
        "curve": curve,
        "settings": config.__dict__,
    }
    rows = {
        "after the last epoch": Accuracy(curve[-1]["top1"], curve[-1]["top5"]),
        f"best epoch ({best['epoch']})": Accuracy(best["top1"], best["top5"]),
    }
    result = evaluated.conclude("linear", result, f"linear evaluation, {protocol}", rows)
    forget_epochs(training)
    return result


def _protocol(evaluated: EvaluatedRun, options: LinearOptions) -> tuple[LinearConfig, str]:
    """Return the settings of the preset, or of the run's recipe, with changes, and their name."""
    recipe = evaluated.run.config().recipe
    of_recipe: LinearPreset = next((p for p in LINEAR_PRESETS if p == recipe), "imagenet100")
    preset = options.preset or of_recipe
    changes: dict[str, Any] = options.changes
    changed = "".join(f", {name} {value}" for name, value in changes.items())
    config = replace(LINEAR_PRESETS[preset], seed=options.seed, **changes)
    return config, f"preset {preset}{changed}"


@dataclass
class ClassifierTraining:
    """A classifier's training between two epochs."""

    classifier: nn.Linear
    optimizer: torch.optim.SGD
    loader: ViewLoader
    folder: Run
    """Where epochs are saved."""
    curve: Curve = field(default_factory=list)


def train_classifier(
    evaluated: EvaluatedRun, config: LinearConfig, test: Features, trunk_hash: str
) -> ClassifierTraining:
    """Train on random crops; test on centre crops after every epoch.

    `trunk_hash` is the hash of the trunk's weights: epochs saved for another trunk are not resumed.
    """
    training = _start(evaluated, config, test.features.shape[1], trunk_hash)
    restore(training)
    loader, device = training.loader, evaluated.compute.device
    first = len(training.curve)
    steps = loader.steps_per_epoch
    with progress("linear", config.epochs * steps, first * steps) as meter:
        for epoch in range(first, config.epochs):
            for group in training.optimizer.param_groups:
                group["lr"] = config.lr * step(epoch, config.milestones)
            loss = train_epoch(evaluated, training, epoch, meter)
            with torch.no_grad():
                scores = training.classifier(test.features.to(device))
            rate = training.optimizer.param_groups[0]["lr"]
            accuracy = accuracy_of(scores, test.labels)._asdict()
            training.curve.append({"epoch": epoch, "lr": rate, "loss": loss, **accuracy})
            save(training)
    loader.close()
    return training


def check_batch(config: LinearConfig, number: int) -> None:
    """Raise InputError unless the images fill a batch and the processes can share it."""
    if config.batch_size > number:
        raise InputError(
            f"linear.batch_size={config.batch_size} exceeds the {number} training"
            " images: lower linear.batch_size, or set linear.cached."
        )
    if config.batch_size % world_size():
        raise InputError(
            f"linear.batch_size={config.batch_size} is not divisible by the {world_size()}"
            f" processes, which share a batch: choose a multiple of {world_size()}."
        )


def _start(
    evaluated: EvaluatedRun, config: LinearConfig, width: int, trunk_hash: str
) -> ClassifierTraining:
    number = len(evaluated.train)
    device = evaluated.compute.device
    classifier = new_classifier(width, evaluated.num_classes, config.seed).to(device)
    data = single_view(evaluated.data, config.min_scale)
    options = data, config.batch_size, config.seed, device, rank(), world_size()
    loader = ViewLoader(evaluated.train, *options, views=1, keep_last=True)
    settings = [trunk_hash, asdict(config), data.image_size, data.reduce, number]
    name = hashlib.sha256(json.dumps(settings, default=str).encode()).hexdigest()[:12]
    optimizer = torch.optim.SGD(
        classifier.parameters(), lr=config.lr, momentum=0.9, fused=one_launch(device)
    )
    folder = Run(evaluated.run.path / "linear" / name)
    return ClassifierTraining(classifier, optimizer, loader, folder)


def train_epoch(
    evaluated: EvaluatedRun, training: ClassifierTraining, epoch: int, meter: Meter
) -> float:
    """Train for one epoch; returns the mean loss per image."""
    loader, parameters = training.loader, list(training.classifier.parameters())
    total = torch.zeros((), device=evaluated.compute.device)
    for number, (batch, size) in enumerate(together(_batches(loader, epoch)), start=1):
        training.optimizer.zero_grad(set_to_none=False)
        if batch is not None:
            with torch.no_grad(), evaluated.compute.autocast():
                images = batch.query.contiguous(memory_format=torch.channels_last)
                features = evaluated.encoder(images)
            logits = training.classifier(features.float())
            loss = cross_entropy(logits, batch.labels, reduction="sum")
            (loss / size).backward()
            total += loss.detach()
        _add_gradients(parameters)
        training.optimizer.step()
        meter.advance(epoch * loader.steps_per_epoch + number, f"epoch {epoch + 1}")
    return float(add_up(total)) / len(loader.images)


def _batches(loader: ViewLoader, epoch: int) -> Iterator[tuple[Batch | None, int]]:
    """Yield this process's part of each batch, if it has one, and the size of the whole."""
    batches = loader.epoch(epoch)
    for number in range(loader.steps_per_epoch):
        mine, size = loader.sizes(number)
        yield next(batches) if mine else None, size


def _add_gradients(parameters: list[nn.Parameter]) -> None:
    """Add up the gradients of all processes, in one call."""
    if world_size() == 1:
        return
    gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
    everyone = add_up(torch.cat([each.flatten() for each in gradients]))
    parts = everyone.split([each.numel() for each in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)


def save(training: ClassifierTraining) -> None:
    """Save a finished epoch; if the disk is full, training continues without it."""
    if not is_main():
        return
    tensors: dict[str, Tensor] = dict(training.classifier.state_dict())
    moving = optimizer_tensors(training.optimizer)
    tensors |= {f"optimizer.{name}": value for name, value in moving.items()}
    try:
        training.folder.path.mkdir(parents=True, exist_ok=True)
        facts = {"curve": training.curve}
        training.folder.save_checkpoint(len(training.curve), tensors, facts)
    except OSError as error:
        warn(f"epoch {len(training.curve)} of the classifier could not be saved: {error}.")


def restore(training: ClassifierTraining) -> None:
    """Resume after the last saved epoch, if any; rank 0 reads it for all."""
    checkpoint = training.folder.load_checkpoint() if is_main() else None
    text = json.dumps([] if checkpoint is None else _curve(training.folder, checkpoint.manifest))
    training.curve = json.loads(broadcast_object(text))
    if not training.curve:
        return
    tensors = {} if checkpoint is None else checkpoint.tensors
    if checkpoint is not None:
        training.classifier.load_state_dict({name: tensors[name] for name in ("weight", "bias")})
    share_state(training.classifier)
    moving = {
        name.removeprefix("optimizer."): tensor
        for name, tensor in tensors.items()
        if name.startswith("optimizer.")
    }
    share_optimizer(training.optimizer, moving)
    say(f"Resuming the classifier after epoch {len(training.curve)}.")


def _curve(folder: Run, manifest: dict[str, Any]) -> Curve:
    """Return the accuracy after each saved epoch; raise InputError unless `save` wrote it."""
    curve = manifest.get("curve")
    lines = curve if isinstance(curve, list) else []
    complete = all(
        isinstance(line, dict) and {"epoch", "top1", "top5"} <= line.keys() for line in lines
    )
    if not complete or len(lines) != manifest["step"]:
        raise InputError(
            f"{folder.checkpoints} holds no classifier of hardmix, although its checksums match:"
            " delete the folder to train the classifier from the start."
        )
    return lines


def forget_epochs(training: ClassifierTraining) -> None:
    """Delete the saved epochs of an evaluation whose result is written."""
    if is_main():
        shutil.rmtree(training.folder.path, ignore_errors=True)
        with suppress(OSError):  # it still holds epochs of other settings
            training.folder.path.parent.rmdir()
