"""A run under evaluation: its encoder, and labelled images to evaluate it on."""

import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hardmix.data.image_set import ImageSet
from hardmix.data.sources import has_test, open_images
from hardmix.errors import InputError
from hardmix.evaluation.accuracy import Accuracy
from hardmix.evaluation.baselines import baseline_trunk
from hardmix.evaluation.features import Features, extract
from hardmix.evaluation.trained_encoder import TrainedEncoder, check_channels, load_encoder
from hardmix.runs.checkpoints import step_named
from hardmix.runs.folder import Run
from hardmix.runtime.console import say, table
from hardmix.runtime.device import Compute, choose_compute
from hardmix.runtime.own_code import call_own, load_own
from hardmix.runtime.random_numbers import permutation, seed_of
from hardmix.settings.config import DataConfig
from hardmix.settings.evaluations import (
    EVALUATIONS,
    Baseline,
    EvaluationPrecision,
    OwnOptions,
    evaluation_kind,
    result_titles,
)

HELD_OUT = 0.2
"""Fraction of the images held out for testing if the data has no test split."""


class EvaluatedRun(NamedTuple):
    """An encoder and the images it is evaluated on."""

    run: Run
    """The run's folder."""
    encoder: TrainedEncoder
    """The frozen encoder, on the device of `compute`."""
    data: DataConfig
    """The run's data config, or the one that was passed."""
    compute: Compute
    """Device and number format."""
    train: ImageSet
    """Labelled training images."""
    test: ImageSet
    """Labelled test images: a fifth of all images if the data has no test split."""
    num_classes: int
    """Number of classes, which is the same in both."""
    started: float
    """When the evaluation started, by `time.monotonic`."""
    checkpoint: str | None = None
    """The checkpoint whose encoder it is; None: the run's encoder."""

    def features(
        self, trunk: nn.Module, images: ImageSet, title: str, *, gathered: bool = True
    ) -> Features:
        """Return the frozen features of the images' evaluation crops (see `extract`)."""
        compute, data = self.compute, self.data
        return extract(trunk, images, data, compute=compute, title=title, gathered=gathered)

    def split_features(
        self, trunk: nn.Module, *, gathered: bool = True
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return features and labels of the training images, then of the test images."""
        train = self.features(trunk, self.train, "training features", gathered=gathered)
        test = self.features(trunk, self.test, "test features", gathered=gathered)
        return train.features, train.labels, test.features, test.labels

    def baseline(self, name: Baseline) -> nn.Module:
        """Return an untrained baseline, on the device."""
        encoder, seed = self.encoder, self.run.config().train.seed
        trunk = baseline_trunk(name, encoder.backbone, encoder.channels, encoder.image_size, seed)
        return trunk.to(self.compute.device).to(memory_format=torch.channels_last)

    def conclude(
        self, name: str, result: dict[str, Any], title: str, rows: dict[str, Accuracy]
    ) -> dict[str, Any]:
        """Show a table, write RUN/results/NAME.json, and return what was written.

        The name of a checkpoint's result ends with its step.
        """
        if self.checkpoint is not None:
            name, result = f"{name}-{self.checkpoint}", result | {"checkpoint": self.checkpoint}
        result |= {"data": self.train.name, "seconds": time.monotonic() - self.started}
        shown = [[row, f"{each.top1:.4f}", f"{each.top5:.4f}"] for row, each in rows.items()]
        table(title, ["", "top 1", "top 5"], shown)  # before writing: the disk may be full
        file = self.run.write_result(name, result)
        say(f"Wrote {file}")
        return result


def open_evaluated_run(
    path: Path | str,
    data: DataConfig | None = None,
    precision: EvaluationPrecision = "fp32",
    checkpoint: str | None = None,
) -> EvaluatedRun:
    """Open a run for evaluation on its own data or on other data, after checking everything."""
    started, path = time.monotonic(), Path(path)
    run = Run.open(path)
    config = run.config()
    data = data or config.data
    encoder = load_encoder(path, or_checkpoint=True, checkpoint=checkpoint)
    check_channels(encoder, data, path)
    train = open_images(data, "train", config.train.seed).labelled()
    if has_test(data):
        test = open_images(data, "test", config.train.seed).labelled()
    else:
        train, test = hold_out(train, config.train.seed)
        say(f"No test split: {len(test)} images, chosen by the seed, are held out for testing.")
    num_classes = _num_classes(train, test)
    compute = choose_compute(config.train.device, precision)
    encoder.to(compute.device).to(memory_format=torch.channels_last)
    step = None if checkpoint is None else step_named(run.checkpoints, checkpoint)
    return EvaluatedRun(run, encoder, data, compute, train, test, num_classes, started, step)


def hold_out(images: ImageSet, seed: int) -> tuple[ImageSet, ImageSet]:
    """Split images into training and test images, for data without a test split."""
    order = permutation(seed_of("held out", seed), 0, len(images))
    number = max(1, int(HELD_OUT * len(images)))
    return images.select(order[number:].sort().values), images.select(order[:number].sort().values)


def _num_classes(train: ImageSet, test: ImageSet) -> int:
    classes, others = train.classes or (), test.classes or ()
    if classes != others:
        raise InputError(
            f"{train.name} has {len(classes)} classes and {test.name} has {len(others)}: training"
            " and test images must have the same classes."
        )
    if len(classes) < 2:
        raise InputError(f"{train.name} has {len(classes)} class: accuracy needs at least two.")
    return len(classes)


def single_view(data: DataConfig, min_scale: float) -> DataConfig:
    """Return the data config for training a classifier: random crop and flip only."""
    return replace(data, augmentation="plain", min_scale=min_scale, views=None)


def run_evaluation(
    name: str, path: Path, options: Any, data: DataConfig | None = None
) -> dict[str, Any]:
    """Evaluate a run by the function `measure` in evaluation/NAME.py; return the result written.

    A name such as "mypackage:function" is that of the user's own function, which must be allowed.
    `data` are other images than the run's; None means the run's own.
    """
    if name not in EVALUATIONS:
        return _run_own(name, path, options, data)
    module = import_module(f"hardmix.evaluation.{name}")
    result: dict[str, Any] = module.measure(path, options, data)
    return result


def _run_own(name: str, path: Path, options: OwnOptions, data: DataConfig | None) -> dict[str, Any]:
    """Evaluate a run by the user's own function, which is called with the `EvaluatedRun`."""
    measure = load_own(name, "the evaluation")
    kind = measure.__name__
    if evaluation_kind(kind) in result_titles():
        raise InputError(f"{name} would overwrite results of {kind}: give it another name.")
    evaluated = open_evaluated_run(path, data, options.precision, options.checkpoint)
    accuracy = call_own(measure, name, evaluated=evaluated)
    if not isinstance(accuracy, Accuracy):
        raise InputError(
            f"{name} returned {type(accuracy).__name__}: it must return an Accuracy, as"
            " hardmix.accuracy_of does."
        )
    return evaluated.conclude(kind, accuracy._asdict(), f"accuracy by {name}", {kind: accuracy})
