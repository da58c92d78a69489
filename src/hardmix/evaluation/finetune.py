"""`hardmix finetune RUN --labels 0.1`: all weights trained on a fraction of the labels.

This is not in the paper: it is the usual semi-supervised evaluation. The subset has the same number
of images of every class and is chosen by the seed.
"""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hardmix.data.loading import ViewLoader
from hardmix.errors import InputError
from hardmix.evaluation.accuracy import Accuracy, accuracy_of
from hardmix.evaluation.evaluated_run import EvaluatedRun, open_evaluated_run, single_view
from hardmix.evaluation.probe import new_classifier
from hardmix.runtime.console import progress
from hardmix.runtime.device import one_launch
from hardmix.runtime.random_numbers import permutation, seed_of
from hardmix.settings.config import DataConfig
from hardmix.settings.evaluations import FinetuneConfig
from hardmix.settings.schedules import cosine


def measure(path: Path, options: FinetuneConfig, data: DataConfig | None = None) -> dict[str, Any]:
    """Fine-tune the encoder, or with `untrained` the same network from random weights."""
    evaluated = open_evaluated_run(path, data, options.precision, options.checkpoint)
    assert evaluated.train.labels is not None
    chosen = balanced_subset(
        evaluated.train.labels, options.labels, evaluated.num_classes, options.seed
    )
    evaluated = evaluated._replace(train=evaluated.train.select(chosen))
    trunk: nn.Module = copy.deepcopy(evaluated.encoder.trunk)
    if options.untrained:
        trunk = evaluated.baseline("untrained")
    accuracy = score(evaluated, train(evaluated, trunk, options))
    result: dict[str, Any] = {
        **accuracy._asdict(),
        "labels": options.labels,
        "images": len(chosen),
        "start": "random weights" if options.untrained else "pre-trained",
        "settings": {k: v for k, v in dataclasses.asdict(options).items() if k != "checkpoint"},
    }
    name = f"finetune-{options.labels:g}" + ("-untrained" if options.untrained else "")
    title = f"fine-tuned on {len(chosen)} labelled images"
    return evaluated.conclude(name, result, title, {result["start"]: accuracy})


def balanced_subset(
    labels: Int[Tensor, " n"], share: float, num_classes: int, seed: int
) -> Int[Tensor, " m"]:
    """Return a fraction of the images, the same number of every class; 1 means all images."""
    if share == 1.0:
        return torch.arange(len(labels))
    number = max(1, round(share * len(labels) / num_classes))
    order = permutation(seed_of("labels", seed), 0, len(labels))
    chosen = []
    for label in range(num_classes):
        of_class = order[labels[order] == label]
        if len(of_class) < number:
            raise InputError(
                f"finetune.labels={share} needs {number} images of every class, but class {label}"
                f" has {len(of_class)}: lower finetune.labels, or use 1.0 for all."
            )
        chosen.append(of_class[:number])
    return torch.cat(chosen).sort().values


def train(evaluated: EvaluatedRun, trunk: nn.Module, config: FinetuneConfig) -> nn.Sequential:
    """Train trunk and classifier with SGD and a cosine schedule, each at its own learning rate."""
    device = evaluated.compute.device
    classifier = new_classifier(_width(evaluated, trunk), evaluated.num_classes, config.seed)
    model = nn.Sequential(trunk, classifier).to(device).train()
    rates = [config.lr, config.classifier_lr]
    groups = [{"params": part.parameters()} for part in model]
    optimizer = torch.optim.SGD(
        groups,
        lr=config.lr,
        momentum=0.9,
        weight_decay=config.weight_decay,
        fused=one_launch(device),
    )
    data = single_view(evaluated.data, config.min_scale)
    size = min(config.batch_size, len(evaluated.train))
    loader = ViewLoader(evaluated.train, data, size, config.seed, device, views=1)
    with progress("fine-tuning", config.epochs * loader.steps_per_epoch) as meter:
        for epoch in range(config.epochs):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * cosine(epoch, config.epochs)
            for number, batch in enumerate(loader.epoch(epoch), start=1):
                with evaluated.compute.autocast():
                    logits = model(batch.query.contiguous(memory_format=torch.channels_last))
                loss = cross_entropy(logits.float(), batch.labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                meter.advance(
                    epoch * loader.steps_per_epoch + number, f"epoch {epoch + 1} of {config.epochs}"
                )
    loader.close()
    return model.eval()


def score(evaluated: EvaluatedRun, model: nn.Module) -> Accuracy:
    """Return the accuracy on the test images' centre crops."""
    test = evaluated.features(model, evaluated.test, "test")
    return accuracy_of(test.features, test.labels)


def _width(evaluated: EvaluatedRun, trunk: nn.Module) -> int:
    size = evaluated.data.image_size
    images = torch.zeros(2, evaluated.data.channels, size, size, device=evaluated.compute.device)
    with torch.no_grad():
        return int(trunk.eval()(images).shape[1])
