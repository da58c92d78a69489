"""The linear probe: logistic regression on frozen features that were extracted once.

It minimises  mean cross-entropy + penalty * (sum of squared weights)  on standardised features. The
penalty matters more than most differences between encoders, so it is cross-validated on the
training labels over powers of ten unless it is passed. This is not the paper's protocol, which
trains on random crops for 60 or 100 epochs (linear.py).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hardmix.evaluation.accuracy import Accuracy, accuracy_of, count_classes
from hardmix.runtime.device import send
from hardmix.runtime.random_numbers import permutation, seed_of
from hardmix.settings.evaluations import ProbeSolver
from hardmix.settings.schedules import cosine

SGD_EPOCHS, SGD_BATCH, SGD_RATE = 30, 256, 0.1

PENALTIES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
"""Penalties to try, the strongest first."""
FOLDS = 5
"""Parts of the training images, each of which is held out in turn."""
ENOUGH_HELD_OUT = 10_000
"""Held-out images that make the choice certain enough: no further part is held out."""


class ChosenPenalty(NamedTuple):
    """The penalty with the highest cross-validated accuracy."""

    penalty: float
    """The chosen penalty: the strongest of equally good ones."""
    accuracies: dict[float, float]
    """Top-1 accuracy on held-out training images, by penalty."""


def probe_accuracy(
    train_features: Float[Tensor, "train dim"],
    train_labels: Int[Tensor, " train"],
    test_features: Float[Tensor, "test dim"],
    test_labels: Int[Tensor, " test"],
    *,
    solver: ProbeSolver = "lbfgs",
    penalty: float | None = None,
    seed: int = 0,
) -> Accuracy:
    """Return the test accuracy of multinomial logistic regression on standardised features.

    `penalty` times the sum of the squared weights is added to the loss; None cross-validates it on
    the training images (`cross_validated_penalty`). The problem is convex: L-BFGS reaches nearly
    the same classifier for every seed, SGD less so.
    """
    if penalty is None:
        chosen = cross_validated_penalty(train_features, train_labels, solver=solver)
        penalty = chosen.penalty
    classes = count_classes(train_labels, test_labels, "a linear probe")
    mean, std = train_features.mean(dim=0), train_features.std(dim=0).clamp(min=1e-6)
    train, test = (train_features - mean) / std, (test_features - mean) / std
    classifier = new_classifier(train.shape[1], classes, seed).to(train.device)

    def loss(rows: Tensor | slice) -> Tensor:
        value = cross_entropy(classifier(train[rows]), train_labels[rows])
        return value + penalty * classifier.weight.square().sum()

    with torch.enable_grad():
        if solver == "lbfgs":
            _fit_lbfgs(classifier, loss)
        else:
            _fit_sgd(classifier, loss, len(train), seed)
    with torch.no_grad():
        return accuracy_of(classifier(test), test_labels)


def cross_validated_penalty(
    features: Float[Tensor, "train dim"],
    labels: Int[Tensor, " train"],
    *,
    solver: ProbeSolver = "lbfgs",
    folds: int = FOLDS,
) -> ChosenPenalty:
    """Choose the penalty by cross-validation on training images alone.

    The images are divided into five parts at random, the same way at every call, and each part is
    predicted by a probe fitted to the others; with many images fewer parts are held out. Penalties
    are tried from the strongest down, until two in a row are worse than the best.
    """
    order = permutation(seed_of("cross-validation"), 0, len(labels)).to(labels.device)
    parts = [part for part in order.chunk(folds) if len(part) < len(labels)]
    needed = -(-ENOUGH_HELD_OUT // max(1, len(parts[0]))) if parts else 0
    accuracies: dict[float, float] = {}
    for penalty in PENALTIES:
        right = 0.0
        held_out = parts[: max(1, needed)]
        for part in held_out:
            kept = torch.cat([other for other in parts if other is not part])
            accuracy = probe_accuracy(
                features[kept],
                labels[kept],
                features[part],
                labels[part],
                solver=solver,
                penalty=penalty,
            )
            right += len(part) * accuracy.top1
        accuracies[penalty] = right / max(1, sum(map(len, held_out)))
        best = max(accuracies, key=lambda each: accuracies[each])
        if PENALTIES.index(penalty) - PENALTIES.index(best) >= 2:
            break
    return ChosenPenalty(best, accuracies)


def new_classifier(width: int, classes: int, seed: int) -> nn.Linear:
    """Return a classifier initialised as in official MoCo: weights N(0, 0.01), bias 0."""
    classifier = nn.Linear(width, classes)
    generator = torch.Generator().manual_seed(seed)
    nn.init.normal_(classifier.weight, std=0.01, generator=generator)
    nn.init.zeros_(classifier.bias)
    return classifier


LossOf = Callable[[Tensor | slice], Tensor]
"""Returns the loss on these rows of the training features."""


def _fit_lbfgs(classifier: nn.Linear, loss: LossOf) -> None:
    optimizer = torch.optim.LBFGS(
        classifier.parameters(), max_iter=200, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(slice(None))
        value.backward()
        return value

    optimizer.step(closure)


def _fit_sgd(classifier: nn.Linear, loss: LossOf, number: int, seed: int) -> None:
    """Fit with momentum 0.9, no weight decay, and a cosine to 0 over `SGD_EPOCHS` epochs."""
    optimizer = torch.optim.SGD(classifier.parameters(), lr=SGD_RATE, momentum=0.9)
    for epoch in range(SGD_EPOCHS):
        for group in optimizer.param_groups:
            group["lr"] = SGD_RATE * cosine(epoch, SGD_EPOCHS)
        order = send(permutation(seed, epoch, number), classifier.weight.device)
        for rows in order.split(SGD_BATCH):
            optimizer.zero_grad()
            loss(rows).backward()
            optimizer.step()
