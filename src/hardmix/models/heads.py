"""Projection heads: what is between a trunk's features and the loss."""

from collections.abc import Callable

from torch import nn

from hardmix.settings.named_choices import Head

HEADS: dict[Head, Callable[[int, int], nn.Module]] = {
    "linear": nn.Linear,
    "mlp": lambda width, dim: nn.Sequential(
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, dim)
    ),
}
"""From width to dim: MoCo-v1's layer, and MoCo-v2's two with as many hidden units as features."""
