"""`hardmix knn RUN`: weighted k nearest neighbours on frozen features; nothing is trained.

Instance discrimination's classifier (Wu et al. 2018): each of the k most similar training images
votes for its class with exp(similarity / temperature).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hardmix.errors import InputError
from hardmix.evaluation.accuracy import Accuracy, accuracy_from, count_classes, count_right
from hardmix.evaluation.evaluated_run import baseline_trunk, open_evaluated_run
from hardmix.evaluation.neighbours import NearestRows, neighbours
from hardmix.runtime.device import send
from hardmix.runtime.distributed import add_up, gather_uneven
from hardmix.settings.config import DataConfig
from hardmix.settings.evaluation_options import KnnOptions


def measure(path: Path, options: KnnOptions, data: DataConfig | None = None) -> dict[str, Any]:
    """Measure the k-NN accuracy of a run and write it to RUN/results/knn.json."""
    evaluated = open_evaluated_run(path, data, options.precision)
    trunks: dict[str, nn.Module] = {"encoder": evaluated.encoder}
    trunks |= {name: baseline_trunk(evaluated, name) for name in options.baseline}
    k, temperature = options.k, options.temperature
    found = {
        name: knn_accuracy(
            *evaluated.split_features(trunk, gathered=False),
            k=k,
            temperature=temperature,
            device=evaluated.compute.device,
            shared=True,
        )
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
    device: torch.device | None = None,
    shared: bool = False,
    between: Callable[[], None] = lambda: None,
) -> Accuracy:
    """Return the accuracy of the exact k-NN vote.

    With `leave_one_out`, the test images are the training images and none votes for itself. It is
    computed on `device`; None means that of the training features. With `shared`, every process
    passes its own part of all four, and gets the accuracy of the whole. `between` is called before
    each part of the test images, equally often on every process.
    """
    many = gather_uneven if shared else _alone
    everyone = many(train_labels), many(test_labels)
    classes, device = count_classes(*everyone, "k-NN"), device or train_features.device
    labels = send(everyone[0], device)
    right = torch.zeros(2, dtype=torch.int64, device=device)
    for found in neighbours(
        train_features,
        test_features,
        _checked(k),
        device=device,
        leave_one_out=leave_one_out,
        shared=shared,
        between=between,
    ):
        votes = _votes(found, labels, classes, temperature)
        right += count_right(votes, send(test_labels[found.queries], device))
    return accuracy_from(add_up(right) if shared else right, len(everyone[1]))


def knn_votes(
    train_features: Float[Tensor, "train dim"],
    train_labels: Int[Tensor, " train"],
    test_features: Float[Tensor, "test dim"],
    test_labels: Int[Tensor, " test"],
    *,
    k: int = 200,
    temperature: float = 0.07,
    leave_one_out: bool = False,
) -> Float[Tensor, "test classes"]:
    """Return the votes for each class, of which `knn_accuracy` takes the highest."""
    classes, device = count_classes(train_labels, test_labels, "k-NN"), train_features.device
    parts = neighbours(
        train_features, test_features, _checked(k), device=device, leave_one_out=leave_one_out
    )
    votes = torch.zeros(len(test_labels), classes, device=device)
    for found in parts:
        votes[found.queries] = _votes(found, train_labels, classes, temperature)
    return votes


def _votes(
    found: NearestRows, labels: Int[Tensor, " train"], classes: int, temperature: float
) -> Float[Tensor, "queries classes"]:
    weights = ((found.similarity - 1) / temperature).exp()
    votes = torch.zeros(len(weights), classes, device=weights.device)
    return votes.scatter_add_(1, labels[found.places], weights)


def _checked(k: int) -> int:
    if k < 1:
        raise InputError(f"k={k} must be at least 1: the number of neighbours that vote.")
    return k


def _alone(labels: Tensor) -> Tensor:
    return labels
