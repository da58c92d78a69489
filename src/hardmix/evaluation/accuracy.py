"""Top-1 and top-5 accuracy, which every evaluation reports."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


class Accuracy(NamedTuple):
    """Fractions of test images whose class is ranked first, or among the first five."""

    top1: float
    """Top-1 accuracy, from 0 to 1."""
    top5: float
    """Top-5 accuracy, from 0 to 1."""


def accuracy_of(scores: Float[Tensor, "test classes"], labels: Int[Tensor, " test"]) -> Accuracy:
    """Return the accuracy of class scores; with five classes or fewer, top-5 is 1."""
    ranked = scores.topk(min(5, scores.shape[1]), dim=1).indices
    right = ranked == labels.to(ranked.device).unsqueeze(1)
    return Accuracy(float(right[:, 0].float().mean()), float(right.any(dim=1).float().mean()))


def mean_and_deviation(values: list[float]) -> tuple[float, float]:
    """Return the mean and the sample standard deviation, which is 0 for a single value."""
    numbers = torch.tensor(values, dtype=torch.float64)
    return float(numbers.mean()), float(numbers.std()) if len(values) > 1 else 0.0
