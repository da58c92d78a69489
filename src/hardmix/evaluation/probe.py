"""A linear classifier fitted in seconds to frozen features that were extracted once.

Not the paper's protocol, which trains on random crops for 60 or 100 epochs (linear.py).
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hardmix.evaluation.accuracy import Accuracy, accuracy_of, count_classes
from hardmix.runtime.device import send
from hardmix.runtime.random_numbers import permutation
from hardmix.settings.evaluation_options import ProbeSolver
from hardmix.settings.schedules import cosine

SGD_EPOCHS, SGD_BATCH, SGD_RATE = 30, 256, 0.1


def probe_accuracy(
    train_features: Float[Tensor, "train dim"],
    train_labels: Int[Tensor, " train"],
    test_features: Float[Tensor, "test dim"],
    test_labels: Int[Tensor, " test"],
    *,
    solver: ProbeSolver = "lbfgs",
    penalty: float = 1e-4,
    seed: int = 0,
) -> Accuracy:
    """Return the test accuracy of multinomial logistic regression on standardised features.

    `penalty` times the sum of the squared weights is added to the loss. The problem is convex:
    L-BFGS reaches nearly the same classifier for every seed, SGD less so.
    """
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
    """Momentum 0.9, no weight decay, cosine to 0 over `SGD_EPOCHS` epochs."""
    optimizer = torch.optim.SGD(classifier.parameters(), lr=SGD_RATE, momentum=0.9)
    for epoch in range(SGD_EPOCHS):
        for group in optimizer.param_groups:
            group["lr"] = SGD_RATE * cosine(epoch, SGD_EPOCHS)
        order = send(permutation(seed, epoch, number), classifier.weight.device)
        for rows in order.split(SGD_BATCH):
            optimizer.zero_grad()
            loss(rows).backward()
            optimizer.step()
