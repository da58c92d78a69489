"""`hardmix knn RUN`: weighted k nearest neighbours on frozen features; nothing is trained.

Instance discrimination's classifier (Wu et al. 2018): each of the k most similar training images
votes for its class with exp(similarity / temperature).
"""

from collections.abc import Callable, Sequence
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

USUAL_K = (20, 200)
"""Both are recorded. More neighbours than a class has images cannot all be right."""


def measure(path: Path, options: KnnOptions, data: DataConfig | None = None) -> dict[str, Any]:
    """Measure the k-NN accuracy of a run and write it to RUN/results/knn.json."""
    evaluated = open_evaluated_run(path, data, options.precision)
    trunks: dict[str, nn.Module] = {"encoder": evaluated.encoder}
    trunks |= {name: baseline_trunk(evaluated, name) for name in options.baseline}
    k = options.k or usual_k(len(evaluated.train), evaluated.num_classes)
    by_trunk = {
        name: knn_accuracies(
            *evaluated.split_features(trunk, gathered=False),
            ks=(k, *USUAL_K),
            temperature=options.temperature,
            device=evaluated.compute.device,
            shared=True,
        )
        for name, trunk in trunks.items()
    }
    accuracies = {name: by_k[k] for name, by_k in by_trunk.items()}
    result = {
        **accuracies["encoder"]._asdict(),
        "by_k": {str(each): by_trunk["encoder"][each]._asdict() for each in USUAL_K},
        "baselines": {name: accuracies[name]._asdict() for name in options.baseline},
        "k": k,
        "temperature": options.temperature,
        "train": len(evaluated.train),
        "test": len(evaluated.test),
    }
    counts = f"{len(evaluated.train)} training images, {len(evaluated.test)} test images"
    rows = accuracies | {
        f"encoder, k = {each}": by_trunk["encoder"][each] for each in USUAL_K if each != k
    }
    return evaluated.conclude("knn", result, f"k-NN accuracy (k = {k}, {counts})", rows)


def usual_k(labelled: int, classes: int) -> int:
    """Return 200 (Wu et al. 2018), or 20 if a class has fewer than 200 labelled images."""
    few, many = USUAL_K
    return many if labelled >= many * classes else few


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
    return knn_accuracies(
        train_features,
        train_labels,
        test_features,
        test_labels,
        ks=(k,),
        temperature=temperature,
        leave_one_out=leave_one_out,
        device=device,
        shared=shared,
        between=between,
    )[k]


def knn_accuracies(
    train_features: Float[Tensor, "train dim"],
    train_labels: Int[Tensor, " train"],
    test_features: Float[Tensor, "test dim"],
    test_labels: Int[Tensor, " test"],
    *,
    ks: Sequence[int],
    temperature: float = 0.07,
    leave_one_out: bool = False,
    device: torch.device | None = None,
    shared: bool = False,
    between: Callable[[], None] = lambda: None,
) -> dict[int, Accuracy]:
    """Return `knn_accuracy` for several numbers of neighbours, which are looked up once."""
    many = gather_uneven if shared else _alone
    everyone = many(train_labels), many(test_labels)
    classes, device = count_classes(*everyone, "k-NN"), device or train_features.device
    labels = send(everyone[0], device)
    right = {k: torch.zeros(2, dtype=torch.int64, device=device) for k in ks}
    for found in neighbours(
        train_features,
        test_features,
        max(_checked(k) for k in ks),
        device=device,
        leave_one_out=leave_one_out,
        shared=shared,
        between=between,
    ):
        for k in right:
            votes = _votes(found.first(k), labels, classes, temperature)
            right[k] += count_right(votes, send(test_labels[found.queries], device))
    counts = {k: add_up(each) if shared else each for k, each in right.items()}
    return {k: accuracy_from(each, len(everyone[1])) for k, each in counts.items()}


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
