"""A linear classifier on frozen features of random crops, trained by any number of processes.

Every process encodes its rows of a batch; the gradient is that of the whole batch's mean loss, so
that the result depends on the number of processes only through rounding. An epoch is saved when it
is finished: the same command resumes from there.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hardmix.data.batches import Batch
from hardmix.data.loading import ViewLoader
from hardmix.errors import InputError
from hardmix.evaluation.accuracy import accuracy_of
from hardmix.evaluation.evaluated_run import EvaluatedRun, single_view
from hardmix.evaluation.features import Features
from hardmix.evaluation.probe import new_classifier
from hardmix.runs.checkpoints import optimizer_tensors, share_optimizer
from hardmix.runs.folder import Run
from hardmix.runtime.console import Meter, progress, say, warn
from hardmix.runtime.distributed import (
    add_up,
    broadcast_text,
    is_main,
    rank,
    share_state,
    together,
    world_size,
)
from hardmix.settings.evaluation_options import LinearConfig
from hardmix.settings.schedules import step

Curve = list[dict[str, float]]
"""Epoch, learning rate, loss and test accuracy of each epoch."""


@dataclass
class ClassifierTraining:
    """The state between two epochs."""

    classifier: nn.Linear
    optimizer: torch.optim.SGD
    loader: ViewLoader
    folder: Run
    """Where epochs are saved."""
    curve: Curve = field(default_factory=list)


def train_classifier(
    evaluated: EvaluatedRun, config: LinearConfig, test: Features, fingerprint: str
) -> ClassifierTraining:
    """Train on random crops; test on centre crops after every epoch.

    `fingerprint` is that of the trunk: epochs saved for another one are not resumed.
    """
    training = _start(evaluated, config, test.features.shape[1], fingerprint)
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


def _start(
    evaluated: EvaluatedRun, config: LinearConfig, width: int, fingerprint: str
) -> ClassifierTraining:
    number = len(evaluated.train)
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
    device = evaluated.compute.device
    classifier = new_classifier(width, evaluated.num_classes, config.seed).to(device)
    data = single_view(evaluated.data, config.min_scale)
    options = data, config.batch_size, config.seed, device, rank(), world_size()
    loader = ViewLoader(evaluated.train, *options, views=1, keep_last=True)
    made_of = [fingerprint, asdict(config), data.image_size, data.reduce, number]
    name = hashlib.sha256(json.dumps(made_of, default=str).encode()).hexdigest()[:12]
    optimizer = torch.optim.SGD(classifier.parameters(), lr=config.lr, momentum=0.9)
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
    """Save a finished epoch; a full disk is no reason to lose the others."""
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
    """Resume after the last epoch that was saved, if any; rank 0 reads it for all."""
    found = training.folder.load_checkpoint() if is_main() else None
    text = json.dumps([] if found is None else _curve(training.folder, found.manifest))
    training.curve = json.loads(broadcast_text(text))
    if not training.curve:
        return
    tensors = {} if found is None else found.tensors
    if found is not None:
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
    """Return the accuracy after each saved epoch, as far as it is what `save` writes."""
    curve = manifest.get("curve")
    lines = curve if isinstance(curve, list) else []
    known = all(
        isinstance(line, dict) and {"epoch", "top1", "top5"} <= line.keys() for line in lines
    )
    if not known or len(lines) != manifest["step"]:
        raise InputError(
            f"{folder.checkpoints} holds no classifier of hardmix, although its checksums match:"
            " delete the folder, and the classifier is trained from its start."
        )
    return lines


def forget_epochs(training: ClassifierTraining) -> None:
    """Delete the saved epochs of an evaluation whose result is written."""
    if is_main():
        shutil.rmtree(training.folder.path, ignore_errors=True)
        with suppress(OSError):  # those of other settings stay
            training.folder.path.parent.rmdir()
