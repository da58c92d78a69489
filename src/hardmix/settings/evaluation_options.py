"""Settings of the evaluations of a trained encoder. Imports no torch.

Those of detectors are in detection_options.py. An evaluation is an entry in `EVALUATION_OPTIONS`,
a title in titles.py, a file in evaluation/ and its line in `EVALUATIONS` there.
"""

from dataclasses import dataclass
from typing import Literal

from hardmix.errors import InputError
from hardmix.settings.bounds import check_above, check_at_least, check_between, shown

ProbeSolver = Literal["lbfgs", "sgd"]
"""How the linear probe on cached features is fitted."""

Baseline = Literal["pixels", "untrained", "colours"]
"""Untrained baselines: raw pixels, the same network with random weights, or a colour histogram."""

EvaluationPrecision = Literal["fp32", "bf16"]
"""Number format of forward passes; float32 by default, so that results are comparable."""

LinearPreset = Literal["imagenet100", "imagenet1k", "official-moco"]
"""Whose linear evaluation: the paper's two (App. C.1), or official MoCo's."""


@dataclass(frozen=True, kw_only=True)
class KnnOptions:
    """Measure the k-NN accuracy of a run's encoder; nothing is trained."""

    k: int | None = None
    """Number of nearest neighbours that vote. Unset: 200, or 20 if a class has fewer than 200
    labelled images on average; the accuracies with both are recorded in any case."""
    temperature: float = 0.07
    """Softmax temperature of the vote."""
    baseline: tuple[Baseline, ...] = ()
    """Also score untrained baselines: raw pixels, the network with random weights, or a colour
    histogram."""

    precision: EvaluationPrecision = "fp32"
    """Number format of the encoder's forward passes."""

    def __post_init__(self) -> None:
        check_at_least(self, "knn", k=1)
        check_above(self, "knn", temperature=0)


@dataclass(frozen=True, kw_only=True)
class LinearConfig:
    """A linear classifier on a frozen trunk (App. C.1); the defaults are for ImageNet-100."""

    epochs: int = 60
    """Passes over the training images."""
    batch_size: int = 128
    """Images per step."""
    lr: float = 10.0
    """Initial learning rate."""
    milestones: tuple[int, ...] = (30, 40, 50)
    """Epochs at which the learning rate is divided by ten."""
    min_scale: float = 0.08
    """Smallest area of a training crop, as a fraction of the image; torchvision's default."""
    seed: int = 0
    """Seed of the classifier's initial weights, the order of the images and the crops."""

    def __post_init__(self) -> None:
        check_at_least(self, "linear", epochs=1, batch_size=1, seed=0)
        check_above(self, "linear", lr=0)
        check_between(self, "linear", 0.0, 1.0, "min_scale")


@dataclass(frozen=True, kw_only=True)
class LinearOptions:
    """Train a linear classifier on a run's frozen encoder.

    With a preset, this follows the paper's protocol: the classifier is trained on random crops.
    Without one, and with fewer than 100,000 images, features are extracted once and the classifier
    is fitted to them in seconds (cached).
    """

    preset: LinearPreset | None = None
    """Protocol to follow: the paper's for ImageNet-100 or ImageNet-1k, or official MoCo's."""
    cached: bool | None = None
    """Fit the classifier on features extracted once. Unset: yes without a preset for fewer than
    100,000 images."""
    solver: ProbeSolver = "lbfgs"
    """Solver for cached features."""
    penalty: float | None = None
    """L2 penalty on the weights, for cached features. Unset: cross-validated on the training
    images over powers of ten."""
    seeds: int = 3
    """Number of classifiers fitted to cached features, each with its own seed."""
    epochs: int | None = None
    """Override the preset's number of epochs."""
    batch_size: int | None = None
    """Override the preset's batch size."""
    lr: float | None = None
    """Override the preset's initial learning rate."""
    milestones: tuple[int, ...] | None = None
    """Override the preset's epochs at which the learning rate is divided by ten."""
    seed: int = 0
    """Seed of the classifier that is trained on crops."""

    precision: EvaluationPrecision = "fp32"
    """Number format of the encoder's forward passes."""

    def __post_init__(self) -> None:
        check_at_least(self, "linear", penalty=0)
        if not 1 <= self.seeds <= 1000:
            raise InputError(
                f"linear.seeds={shown(self.seeds)} must be between 1 and 1000: the number of"
                " classifiers."
            )

    @property
    def changes(self) -> dict[str, object]:
        """The settings that override the preset, by name."""
        names = ("epochs", "batch_size", "lr", "milestones")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """Fine-tune all weights on a fraction of the labels; not in the paper."""

    labels: float = 1.0
    """Fraction of the labels to use, such as 0.01, 0.1 or 1.0; the same number of images from
    every class."""
    epochs: int = 30
    """Passes over the chosen images."""
    batch_size: int = 128
    """Most images per step."""
    lr: float = 0.01
    """Initial learning rate of the trunk."""
    classifier_lr: float = 0.1
    """Initial learning rate of the new classifier."""
    weight_decay: float = 1e-4
    """Weight decay, on all weights."""
    min_scale: float = 0.2
    """Smallest area of a training crop, as a fraction of the image."""
    seed: int = 0
    """Seed of the choice of labels, the classifier's initial weights, the order and the crops."""
    untrained: bool = False
    """Start from random weights, for comparison."""

    precision: EvaluationPrecision = "fp32"
    """Number format of the encoder's forward passes."""

    def __post_init__(self) -> None:
        check_at_least(self, "finetune", epochs=1, batch_size=1, weight_decay=0, seed=0)
        check_above(self, "finetune", labels=0, lr=0, classifier_lr=0)
        check_between(self, "finetune", 0.0, 1.0, "labels", "min_scale")


LINEAR_PRESETS: dict[LinearPreset, LinearConfig] = {
    "imagenet100": LinearConfig(),
    "imagenet1k": LinearConfig(epochs=100, batch_size=512, lr=30.0, milestones=(60, 80)),
    "official-moco": LinearConfig(epochs=100, batch_size=256, lr=30.0, milestones=(60, 80)),
}
"""Linear evaluation as run by the paper (App. C.1) and by official MoCo."""

EVALUATION_OPTIONS: dict[str, type] = {
    "knn": KnnOptions,
    "linear": LinearOptions,
    "finetune": FinetuneConfig,
}
"""Options of each evaluation by its name, which is also its command."""
