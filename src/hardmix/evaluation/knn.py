"""Weighted k nearest neighbours on frozen features: an accuracy in seconds, nothing trained.

Instance discrimination's classifier (Wu et al. 2018): each of the k most similar training images
votes for its class with exp(similarity / temperature).
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from hardmix.errors import InputError
from hardmix.evaluation.accuracy import Accuracy, accuracy_of

CHUNK = 1024
"""Test images compared with all training images at once."""


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
    votes = torch.zeros(len(test_labels), classes, device=train.device)
    for start in range(0, len(test_labels), CHUNK):
        test = normalize(test_features[start : start + CHUNK].float(), dim=1)
        similarity = test @ train.T
        if leave_one_out:
            own = torch.arange(len(test), device=test.device)
            similarity[own, own + start] = -torch.inf
        near = similarity.topk(k, dim=1)
        weights = ((near.values - 1) / temperature).exp()
        votes[start : start + CHUNK].scatter_add_(1, train_labels[near.indices], weights)
    return accuracy_of(votes, test_labels)
