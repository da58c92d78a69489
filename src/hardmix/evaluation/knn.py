"""`hardmix knn RUN`: weighted k nearest neighbours on frozen features; nothing is trained.

Instance discrimination's classifier (Wu et al. 2018): each of the k most similar training images
votes for its class with exp(similarity / temperature).
"""

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import normalize

from hardmix.errors import InputError
from hardmix.evaluation.accuracy import Accuracy, accuracy_of, count_classes
from hardmix.evaluation.evaluated_run import baseline_trunk, open_evaluated_run
from hardmix.settings.config import DataConfig
from hardmix.settings.evaluation_options import KnnOptions

CHUNK = 1024
"""Test images compared with all training images at once."""


def measure(path: Path, options: KnnOptions, data: DataConfig | None = None) -> dict[str, Any]:
    """Measure the k-NN accuracy of a run and write it to RUN/results/knn.json."""
    evaluated = open_evaluated_run(path, data, options.precision)
    trunks: dict[str, nn.Module] = {"encoder": evaluated.encoder}
    trunks |= {name: baseline_trunk(evaluated, name) for name in options.baseline}
    k, temperature = options.k, options.temperature
    found = {
        name: knn_accuracy(*evaluated.split_features(trunk), k=k, temperature=temperature)
        for name, trunk in trunks.items()
    }
    result = {
        **found["encoder"]._asdict(),
        "baselines": {name: found[name]._asdict() for name in options.baseline},
        "k": k,
        "temperature": temperature,
        "train": len(evaluated.train),
        "test": len(evaluated.test),
    }
    counts = f"{len(evaluated.train)} training images, {len(evaluated.test)} test images"
    return evaluated.conclude("knn", result, f"k-NN accuracy (k = {k}, {counts})", found)


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
    """Return the accuracy of the exact k-NN vote.

    With `leave_one_out`, the test images are the training images and none votes for itself.
    """
    classes = count_classes(train_labels, test_labels, "k-NN")
    if k < 1:
        raise InputError(f"k={k} must be at least 1: the number of neighbours that vote.")
    k = min(k, len(train_labels) - leave_one_out)
    train = normalize(train_features.float(), dim=1)
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
