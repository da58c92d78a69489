"""A linear classifier on frozen, cached features: fitted in seconds, labelled as such.

Not the paper's protocol, which trains on augmented images for 60 or 100 epochs.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hardmix.errors import InputError


def probe_accuracy(
    train_features: Float[Tensor, "train dim"],
    train_labels: Int[Tensor, " train"],
    test_features: Float[Tensor, "test dim"],
    test_labels: Int[Tensor, " test"],
    *,
    penalty: float = 1e-4,
    iterations: int = 200,
) -> float:
    """Test accuracy of multinomial logistic regression: L-BFGS on standardised features."""
    if bool((train_labels < 0).any()) or bool((test_labels < 0).any()):
        raise InputError("labels hold -1 (unknown): a linear probe needs the class of every image.")
    mean, std = train_features.mean(dim=0), train_features.std(dim=0).clamp(min=1e-6)
    train, test = (train_features - mean) / std, (test_features - mean) / std
    classes = int(max(train_labels.max(), test_labels.max())) + 1
    classifier = nn.Linear(train.shape[1], classes, device=train.device)
    nn.init.zeros_(classifier.weight)
    nn.init.zeros_(classifier.bias)
    optimizer = torch.optim.LBFGS(
        classifier.parameters(), max_iter=iterations, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = cross_entropy(classifier(train), train_labels)
        value = value + penalty * classifier.weight.square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    with torch.no_grad():
        right = classifier(test).argmax(dim=1) == test_labels
    return float(right.float().mean())
