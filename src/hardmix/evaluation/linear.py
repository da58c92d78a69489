"""`hardmix linear RUN`: how well a linear classifier does on the frozen trunk (Sec. 5, App. C.1).

The paper's protocol trains it on random crops, with official MoCo's details: trunk in evaluation
mode, weights from N(0, 0.01), SGD with momentum 0.9 and no weight decay. `cached` extracts features
once instead and fits in seconds: another protocol, and labelled so.
"""

import hashlib
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hardmix.data.loading import ViewLoader
from hardmix.errors import InputError
from hardmix.evaluation.accuracy import accuracy_of, mean_and_deviation
from hardmix.evaluation.evaluated_run import Subject, open_subject, single_view
from hardmix.evaluation.features import Features
from hardmix.evaluation.probe import new_classifier, probe_accuracy
from hardmix.runtime.console import Meter, progress, say, table
from hardmix.runtime.distributed import one_process_only
from hardmix.settings.config import DataConfig
from hardmix.settings.evaluation_options import LinearConfig, ProbeSolver
from hardmix.settings.schedules import step

SMALL = 100_000
"""With fewer training images than this, features are cached unless a preset is asked for."""


def evaluate_cached(
    path: Path,
    data: DataConfig | None = None,
    *,
    solver: ProbeSolver = "lbfgs",
    seeds: int = 3,
) -> dict[str, Any]:
    """Features once, then a classifier for each seed; the result is RUN/results/linear-cached."""
    started = time.monotonic()
    subject = open_subject(path, data)
    train = subject.features(subject.encoder, subject.train, "training features")
    test = subject.features(subject.encoder, subject.test, "test features")
    arrays = train.features, train.labels, test.features, test.labels
    found = [probe_accuracy(*arrays, solver=solver, seed=seed) for seed in range(seeds)]
    top1, deviation = mean_and_deviation([each.top1 for each in found])
    top5, deviation5 = mean_and_deviation([each.top5 for each in found])
    result = {
        "protocol": f"cached features, {solver}: not the paper's",
        "top1": top1,
        "top1_std": deviation,
        "top5": top5,
        "top5_std": deviation5,
        "seeds": seeds,
        "data": subject.train.name,
        "seconds": time.monotonic() - started,
    }
    file = subject.run.write_result("linear-cached", result)
    row = [[f"{solver}, {seeds} seeds", f"{top1:.4f} ± {deviation:.4f}", f"{top5:.4f}"]]
    table("linear probe, cached features", ["", "top 1", "top 5"], row)
    say("This is not the paper's protocol, which trains on random crops: see --preset.")
    say(f"Wrote {file}")
    return result


def evaluate(
    path: Path, config: LinearConfig, data: DataConfig | None = None, protocol: str = "own"
) -> dict[str, Any]:
    """The paper's protocol; the result is RUN/results/linear.json, its headline the last epoch."""
    one_process_only("linear evaluation with a preset (--cached takes many)")
    started = time.monotonic()
    subject = open_subject(path, data)
    before = fingerprint(subject.encoder)
    test = subject.features(subject.encoder, subject.test, "test features")
    curve = train_classifier(subject, config, test)
    unchanged = fingerprint(subject.encoder) == before
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
        "data": subject.train.name,
        "seconds": time.monotonic() - started,
    }
    file = subject.run.write_result("linear", result)
    rows = [
        ["after the last epoch", f"{result['top1']:.4f}", f"{result['top5']:.4f}"],
        [f"best epoch ({best['epoch']})", f"{best['top1']:.4f}", f"{best['top5']:.4f}"],
    ]
    table(f"linear evaluation, {protocol}", ["", "top 1", "top 5"], rows)
    say(f"Wrote {file}")
    return result


def train_classifier(
    subject: Subject, config: LinearConfig, test: Features
) -> list[dict[str, float]]:
    """Train on random crops; test after every epoch on the centre crop."""
    if config.batch_size > len(subject.train):
        raise InputError(
            f"linear.batch_size={config.batch_size} exceeds the {len(subject.train)} training"
            " images: lower --batch-size, or use --cached."
        )
    device = subject.compute.device
    width = test.features.shape[1]
    classifier = new_classifier(width, subject.num_classes, config.seed).to(device)
    optimizer = torch.optim.SGD(classifier.parameters(), lr=config.lr, momentum=0.9)
    data = single_view(subject.data, config.min_scale)
    loader = ViewLoader(subject.train, data, config.batch_size, config.seed, device, views=1)
    curve = []
    with progress("linear", config.epochs * loader.steps_per_epoch) as meter:
        for epoch in range(config.epochs):
            for group in optimizer.param_groups:
                group["lr"] = config.lr * step(epoch, config.milestones)
            loss = train_epoch(subject, classifier, optimizer, loader, epoch, meter)
            with torch.no_grad():
                accuracy = accuracy_of(classifier(test.features.to(device)), test.labels)
            rate = optimizer.param_groups[0]["lr"]
            curve.append({"epoch": epoch, "lr": rate, "loss": loss, **accuracy._asdict()})
    loader.close()
    return curve


def train_epoch(
    subject: Subject,
    classifier: nn.Linear,
    optimizer: torch.optim.Optimizer,
    loader: ViewLoader,
    epoch: int,
    meter: Meter,
) -> float:
    """One pass over the training images; returns the mean loss."""
    total = torch.zeros((), device=subject.compute.device)
    for number, batch in enumerate(loader.epoch(epoch), start=1):
        with torch.no_grad(), subject.compute.autocast():
            features = subject.encoder(batch.query.contiguous(memory_format=torch.channels_last))
        loss = cross_entropy(classifier(features.float()), batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
        meter.advance(epoch * loader.steps_per_epoch + number, f"epoch {epoch + 1}")
    return float(total) / loader.steps_per_epoch


def fingerprint(module: nn.Module) -> str:
    """Of every parameter and buffer, bit for bit."""
    total = hashlib.sha256()
    for name, value in module.state_dict().items():
        total.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return total.hexdigest()
