"""What can be chosen for the evaluations of a trained encoder. Imports no torch.

detection_options.py has those of detectors.
"""

from dataclasses import dataclass
from typing import Literal

from hardmix.settings.bounds import check_above, check_between

ProbeSolver = Literal["lbfgs", "sgd"]
"""How the linear probe on cached features is fitted."""


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
        check_above(self, "linear", epochs=0, batch_size=0, lr=0, seed=-1)
        check_between(self, "linear", 0.0, 1.0, "min_scale")


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

    def __post_init__(self) -> None:
        check_above(self, "finetune", labels=0, epochs=0, batch_size=0, lr=0)
        check_above(self, "finetune", classifier_lr=0, seed=-1)
        check_between(self, "finetune", 0.0, 1.0, "labels", "min_scale")
