"""Data of several examples: small images at hand, two views of each, and one measure.

scikit-learn brings these 1797 handwritten digits along: nothing is downloaded, and a network learns
in seconds. Of photographs one makes views with the transforms of torchvision or lightly.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import normalize

DIM = 64
"""Dimensions of the embedding."""


def read_digits() -> tuple[Tensor, Tensor]:
    """Return images as rows of 8 x 8 numbers from 0 to 1, and the digit that each shows."""
    pixels, digits = load_digits(return_X_y=True)
    return torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits)


def view(images: Tensor) -> Tensor:
    """Return images with a random fifth of the pixels left out."""
    return images * (torch.rand_like(images) > 0.2)


def build_encoder() -> nn.Module:
    """Return a network without batch norm, which would need MoCo's shuffling."""
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, DIM))


@torch.no_grad()
def follow(key_encoder: nn.Module, encoder: nn.Module, share: float = 0.05) -> None:
    """Move MoCo's key encoder a little towards the query encoder: momentum 0.95."""
    for slow, fast in zip(key_encoder.parameters(), encoder.parameters(), strict=True):
        slow.lerp_(fast, share)


@torch.no_grad()
def found(encoder: nn.Module) -> float:
    """Return the share of 500 digits whose second view is closer to the first than any other."""
    images = read_digits()[0][:500]
    first, second = (normalize(encoder(view(images)), dim=1) for _ in range(2))
    closest = (first @ second.T).argmax(dim=1)
    return float((closest == torch.arange(len(images))).float().mean())
