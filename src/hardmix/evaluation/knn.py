"""`hardmix knn RUN`: weighted k nearest neighbours on frozen features; nothing is trained.

Instance discrimination's classifier (Wu et al. 2018): each of the k most similar training images
votes for its class with exp(similarity / temperature). The same vote measures a run during
training and, with the verdict, at its end.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hardmix.data.image_set import ImageSet
from hardmix.data.sources import has_test, open_images
from hardmix.errors import InputError
from hardmix.evaluation.accuracy import Accuracy, accuracy_from, count_classes, count_right
from hardmix.evaluation.evaluated_run import open_evaluated_run
from hardmix.evaluation.features import Features, extract
from hardmix.evaluation.neighbours import NearestRows, neighbours
from hardmix.runtime.console import say
from hardmix.runtime.device import Compute, send
from hardmix.runtime.distributed import add_up, gather_uneven
from hardmix.settings.config import DataConfig, PretrainConfig
from hardmix.settings.evaluations import KnnOptions

USUAL_K = (20, 200)
"""Both are recorded. More neighbours than a class has images cannot all be right."""
KNN_IMAGES = 10_000
"""Most images of each split for k-NN accuracy during training."""


def measure(path: Path, options: KnnOptions, data: DataConfig | None = None) -> dict[str, Any]:
    """Measure the k-NN accuracy of a run and write it to RUN/results/knn.json."""
    evaluated = open_evaluated_run(path, data, options.precision, options.checkpoint)
    trunks: dict[str, nn.Module] = {"encoder": evaluated.encoder}
    trunks |= {name: evaluated.baseline(name) for name in options.baseline}
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
    """Return 200 (Wu et al. 2018), or 20 if classes have fewer than 200 labelled images each."""
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

    With `leave_one_out`, the test images are the training images, and none votes for itself. It is
    computed on `device`; None means the device of the training features. With `shared`, every
    process passes its own part of all four tensors and gets the accuracy of the whole. `between` is
    called before each part of the test images, equally often on every process.
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
    """Return `knn_accuracy` for several numbers of neighbours, which are searched for once."""
    all_train = gather_uneven(train_labels) if shared else train_labels
    all_test = gather_uneven(test_labels) if shared else test_labels
    classes = count_classes(all_train, all_test, "k-NN")
    device = device or train_features.device
    labels = send(all_train, device)
    right = {k: torch.zeros(2, dtype=torch.int64, device=device) for k in ks}
    for near in neighbours(
        train_features,
        test_features,
        max(_checked(k) for k in ks),
        device=device,
        leave_one_out=leave_one_out,
        shared=shared,
        between=between,
    ):
        for k in right:
            votes = _votes(near.first(k), labels, classes, temperature)
            right[k] += count_right(votes, send(test_labels[near.queries], device))
    counts = {k: add_up(each) if shared else each for k, each in right.items()}
    return {k: accuracy_from(each, len(all_test)) for k, each in counts.items()}


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
    """Return the votes for each class; `knn_accuracy` takes the class with the most."""
    classes, device = count_classes(train_labels, test_labels, "k-NN"), train_features.device
    parts = neighbours(
        train_features, test_features, _checked(k), device=device, leave_one_out=leave_one_out
    )
    votes = torch.zeros(len(test_labels), classes, device=device)
    for near in parts:
        votes[near.queries] = _votes(near, train_labels, classes, temperature)
    return votes


def _votes(
    near: NearestRows, labels: Int[Tensor, " train"], classes: int, temperature: float
) -> Float[Tensor, "queries classes"]:
    weights = ((near.similarity - 1) / temperature).exp()
    votes = torch.zeros(len(weights), classes, device=weights.device)
    return votes.scatter_add_(1, labels[near.places], weights)


def _checked(k: int) -> int:
    if k < 1:
        raise InputError(f"k={k} must be at least 1: the number of neighbours that vote.")
    return k


class KnnImages(NamedTuple):
    """Labelled images for k-NN accuracy during training."""

    bank: ImageSet
    """Training images, which vote."""
    test: ImageSet | None
    """Images that are classified; None means those of the bank, each by the others."""


def open_knn_images(config: PretrainConfig, images: ImageSet | None) -> KnnImages | None:
    """Return the labelled images of both splits, or None if k-NN cannot be measured."""
    seed = config.train.seed
    bank = None if images is None else _with_classes(images, seed)
    if bank is None or not (config.train.knn_every or config.train.verdict):
        return None
    if not has_test(config.data):
        return KnnImages(bank, None)
    test = _with_classes(open_images(config.data, "test", seed), 0)
    if test is None:
        say("The test images have no labels: k-NN is measured among the training images.")
    return KnnImages(bank, test)


def _with_classes(images: ImageSet, seed: int) -> ImageSet | None:
    """Return a sample of the images whose class is known; None if there are fewer than two."""
    if images.labels is None or int((images.labels >= 0).sum()) < 2:
        return None
    return images.labelled().subset(KNN_IMAGES, seed)


def knn_of_trunk(
    trunk: nn.Module,
    images: KnnImages,
    data: DataConfig,
    compute: Compute,
    between: Callable[[], None] = lambda: None,
) -> Accuracy:
    """Return the k-NN accuracy of a trunk, whose images all processes share.

    `between` is called before each batch, equally often on every process.
    """

    def features_of(images: ImageSet) -> Features:
        title = "k-NN features"
        return extract(
            trunk, images, data, compute=compute, title=title, between=between, gathered=False
        )

    asked = bank = features_of(images.bank)
    if images.test is not None:
        asked = features_of(images.test)
    return knn_accuracy(
        bank.features,
        bank.labels,
        asked.features,
        asked.labels,
        leave_one_out=asked is bank,
        device=compute.device,
        shared=True,
        between=between,
    )
