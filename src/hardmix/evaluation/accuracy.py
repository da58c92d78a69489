"""Top-1 and top-5 accuracy, which every evaluation reports."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from hardmix.errors import InputError


class Accuracy(NamedTuple):
    """Fractions of test images whose class is ranked first, or among the first five."""

    top1: float
    """Top-1 accuracy, from 0 to 1."""
    top5: float
    """Top-5 accuracy, from 0 to 1."""


def accuracy_of(scores: Float[Tensor, "test classes"], labels: Int[Tensor, " test"]) -> Accuracy:
    """Return the accuracy of class scores; with five classes or fewer, top-5 is 1."""
    return accuracy_from(count_right(scores, labels), len(labels))


def count_right(
    scores: Float[Tensor, "test classes"], labels: Int[Tensor, " test"]
) -> Int64[Tensor, " 2"]:
    """Return how many true classes are ranked first, and how many among the first five."""
    ranked = scores.topk(min(5, scores.shape[1]), dim=1).indices
    right = ranked == labels.to(ranked.device).unsqueeze(1)
    return torch.stack([right[:, 0].sum(), right.any(dim=1).sum()])


def accuracy_from(right: Int64[Tensor, " 2"], number: int) -> Accuracy:
    """Return the accuracy, given the sums of `count_right` over this number of images."""
    return Accuracy(*(right.float() / number).tolist())  # one read, because it waits for a GPU


def count_classes(
    train_labels: Int[Tensor, " train"], test_labels: Int[Tensor, " test"], needed_by: str
) -> int:
    """Return the number of classes; raise InputError if a label is unknown."""
    lowest, highest = torch.stack(torch.aminmax(torch.cat([train_labels, test_labels]))).tolist()
    if lowest < 0:
        raise InputError(
            f"labels contain -1 (unknown): {needed_by} needs the class of every image."
        )
    return int(highest) + 1


def mean_and_deviation(values: list[float]) -> tuple[float, float]:
    """Return the mean and the sample standard deviation, which is 0 for a single value."""
    numbers = torch.tensor(values, dtype=torch.float64)
    return float(numbers.mean()), float(numbers.std()) if len(values) > 1 else 0.0
