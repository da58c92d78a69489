"""What can be chosen for the evaluations of a trained encoder. Imports no torch.

detection_options.py has those of detectors. An evaluation is an entry in `EVALUATION_OPTIONS`, a
title in titles.py, a file in evaluation/ and its line in `EVALUATIONS` there.
"""

from dataclasses import dataclass
from typing import Literal

from hardmix.errors import InputError
from hardmix.settings.bounds import check_above, check_at_least, check_between, shown

ProbeSolver = Literal["lbfgs", "sgd"]
"""How the linear probe on cached features is fitted."""

Baseline = Literal["pixels", "untrained"]
"""What needs no training: raw pixels, or the same network with random weights."""

LinearPreset = Literal["imagenet100", "imagenet1k", "official-moco"]
"""Whose linear evaluation: the paper's two (App. C.1), or official MoCo's."""


@dataclass(frozen=True, kw_only=True)
class KnnOptions:
    """k-NN accuracy of a run's encoder: nothing is trained."""

    k: int = 200
    """Neighbours that vote."""
    temperature: float = 0.07
    """Of the votes."""
    baseline: tuple[Baseline, ...] = ()
    """Also score what needs no training: the floor."""

    def __post_init__(self) -> None:
        check_at_least(self, "knn", k=1)
        check_above(self, "knn", temperature=0)


@dataclass(frozen=True, kw_only=True)
class LinearConfig:
    """A linear classifier on a frozen trunk (App. C.1); defaults are those of ImageNet-100."""

    epochs: int = 60
    """Passes over the training images."""
    batch_size: int = 128
    """Images per step."""
    lr: float = 10.0
    """Initial learning rate."""
    milestones: tuple[int, ...] = (30, 40, 50)
    """Epochs at which the learning rate is divided by ten."""
    min_scale: float = 0.08
    """Smallest share of the image's area that a training crop takes: torchvision's default."""
    seed: int = 0
    """Of the classifier's first weights, the order and the crops."""

    def __post_init__(self) -> None:
        check_at_least(self, "linear", epochs=1, batch_size=1, seed=0)
        check_above(self, "linear", lr=0)
        check_between(self, "linear", 0.0, 1.0, "min_scale")


@dataclass(frozen=True, kw_only=True)
class LinearOptions:
    """Linear evaluation of a run's encoder.

    With a preset, the paper's protocol: a classifier trained on random crops. Without one, features
    are extracted once and a classifier is fitted in seconds (--cached), where the images are fewer
    than 100,000.
    """

    preset: LinearPreset | None = None
    """Whose protocol."""
    cached: bool | None = None
    """Fit on features extracted once."""
    solver: ProbeSolver = "lbfgs"
    """Of --cached."""
    seeds: int = 3
    """Classifiers fitted by --cached."""
    epochs: int | None = None
    """Other than the preset's."""
    batch_size: int | None = None
    """Other than the preset's."""
    lr: float | None = None
    """Other than the preset's."""
    milestones: tuple[int, ...] | None = None
    """Epochs of lr x 0.1, other than the preset's."""
    seed: int = 0
    """Of the classifier that is trained on crops."""

    def __post_init__(self) -> None:
        if not 1 <= self.seeds <= 1000:
            raise InputError(
                f"--seeds {shown(self.seeds)} is not between 1 and 1000: it counts classifiers."
            )

    @property
    def changes(self) -> dict[str, object]:
        """What differs from the preset, by name."""
        names = ("epochs", "batch_size", "lr", "milestones")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """All weights trained on a share of the labels; not in the paper."""

    labels: float = 1.0
    """Share of the labels: 0.01, 0.1, 1.0; the same number of images from every class."""
    epochs: int = 30
    """Passes over the chosen images."""
    batch_size: int = 128
    """Images per step, at most."""
    lr: float = 0.01
    """Initial learning rate of the trunk."""
    classifier_lr: float = 0.1
    """That of the new classifier on it."""
    weight_decay: float = 1e-4
    """On all weights."""
    min_scale: float = 0.2
    """Smallest share of the image's area that a training crop takes."""
    seed: int = 0
    """Of the labels chosen, the classifier's first weights, the order and the crops."""
    untrained: bool = False
    """Start from random weights, to compare."""

    def __post_init__(self) -> None:
        check_at_least(self, "finetune", epochs=1, batch_size=1, weight_decay=0, seed=0)
        check_above(self, "finetune", labels=0, lr=0, classifier_lr=0)
        check_between(self, "finetune", 0.0, 1.0, "labels", "min_scale")


LINEAR_PRESETS: dict[LinearPreset, LinearConfig] = {
    "imagenet100": LinearConfig(),
    "imagenet1k": LinearConfig(epochs=100, batch_size=512, lr=30.0, milestones=(60, 80)),
    "official-moco": LinearConfig(epochs=100, batch_size=256, lr=30.0, milestones=(60, 80)),
}
"""Linear evaluation as the paper (App. C.1) and official MoCo run it."""

EVALUATION_OPTIONS: dict[str, type] = {
    "knn": KnnOptions,
    "linear": LinearOptions,
    "finetune": FinetuneConfig,
}
"""Options of an evaluation by its command: hardmix NAME RUN [options] [--data.*]."""
