"""Weighted k nearest neighbours on frozen features: an accuracy in seconds, nothing trained.

Instance discrimination's classifier (Wu et al. 2018): each of the k most similar training images
votes for its class with exp(similarity / temperature).
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from hardmix.errors import InputError

CHUNK = 1024
"""Test images compared with all training images at once."""


class Accuracy(NamedTuple):
    """Shares of test images whose class is the first, or among the first five."""

    top1: float
    top5: float


def knn_accuracy(
    train_features: Float[Tensor, "train dim"],
    train_labels: Int[Tensor, " train"],
    test_features: Float[Tensor, "test dim"],
    test_labels: Int[Tensor, " test"],
    *,
    k: int = 200,
    temperature: float = 0.07,
    leave_one_out: bool = False,
) -> Accuracy:
    """Accuracy of the k-NN vote, exact, a chunk of test images at a time.

    `leave_one_out`: the test images are the training images, and none votes for itself.
    """
    if bool((train_labels < 0).any()) or bool((test_labels < 0).any()):
        raise InputError("labels hold -1 (unknown): k-NN accuracy needs the class of every image.")
    if k < 1:
        raise InputError(f"k={k} is below 1: it counts the neighbours that vote.")
    k = min(k, len(train_labels) - leave_one_out)
    train = normalize(train_features.float(), dim=1)
    classes = int(max(train_labels.max(), test_labels.max())) + 1
    first = five = 0
    for start in range(0, len(test_labels), CHUNK):
        test = normalize(test_features[start : start + CHUNK].float(), dim=1)
        similarity = test @ train.T
        if leave_one_out:
            own = torch.arange(len(test), device=test.device)
            similarity[own, own + start] = -torch.inf
        near = similarity.topk(k, dim=1)
        votes = torch.zeros(len(test), classes, device=test.device)
        votes.scatter_add_(1, train_labels[near.indices], ((near.values - 1) / temperature).exp())
        ranked = votes.topk(min(5, classes), dim=1).indices
        right = ranked == test_labels[start : start + CHUNK].unsqueeze(1)
        first += int(right[:, 0].sum())
        five += int(right.any(dim=1).sum())
    return Accuracy(first / len(test_labels), five / len(test_labels))
