"""Projection heads, between a trunk's features and the loss."""

from collections.abc import Callable

from torch import nn

from hardmix.settings.named_choices import Head

HEADS: dict[Head, Callable[[int, int], nn.Module]] = {
    "linear": nn.Linear,
    "mlp": lambda width, dim: nn.Sequential(
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, dim)
    ),
}
"""Heads from width to dim: MoCo-v1's layer, and MoCo-v2's two, with `width` hidden units."""
