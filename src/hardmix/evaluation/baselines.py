"""Baselines that nobody trained: raw pixels, a colour histogram, a network with random weights.

All are modules, like any trunk. An encoder that is not better than these has learnt nothing useful.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from hardmix.data.colours import channel_statistics
from hardmix.models.backbones import build_backbone
from hardmix.runtime.random_numbers import seed_of
from hardmix.settings.evaluations import Baseline

BINS = 8
"""Bins for each of red, green and blue: 512 colours."""
ONE_CHANNEL_BINS = 64
"""Bins for each channel of images that do not have three."""
PIXELS = 32
"""Side to which `ReducedPixels` reduces images."""


class ColourHistogram(nn.Module):
    """The share of pixels of each colour, in images that are normalised as for a trunk.

    The square root is taken, so that the cosine of two features is the Bhattacharyya coefficient of
    their histograms: with plain counts, one large area of sky would decide alone.
    """

    def forward(
        self, images: Float[Tensor, "batch channels y x"]
    ) -> Float[Tensor, "batch colours"]:
        """Return the square roots of the shares of pixels in each bin."""
        channels = images.shape[1]
        mean, std = (images.new_tensor(values) for values in channel_statistics(channels))
        pixels = images.flatten(2) * std[:, None] + mean[:, None]
        if channels == 3:
            red, green, blue = _bins(pixels, BINS).unbind(dim=1)
            return _counts((red * BINS + green) * BINS + blue, BINS**3).sqrt()
        bands = _bins(pixels, ONE_CHANNEL_BINS).unbind(dim=1)
        return torch.cat([_counts(band, ONE_CHANNEL_BINS) for band in bands], dim=1).sqrt()


def _bins(pixels: Tensor, number: int) -> Tensor:
    return (pixels * number).long().clamp_(0, number - 1)


def _counts(bins: Tensor, number: int) -> Tensor:
    """Return the share of each row's entries in each bin."""
    counts = torch.zeros(len(bins), number, device=bins.device)
    counts.scatter_add_(1, bins, torch.ones_like(bins, dtype=counts.dtype))
    return counts / bins.shape[1]


class ReducedPixels(nn.Module):
    """Raw pixels of images, which are reduced to 32 x 32 if they are larger."""

    def forward(self, images: Float[Tensor, "batch channels y x"]) -> Float[Tensor, "batch pixels"]:
        """Return the pixels of each image as a row."""
        height, width = (min(PIXELS, side) for side in images.shape[2:])
        reduced: Tensor = adaptive_avg_pool2d(images, (height, width))
        return reduced.flatten(1)


def baseline_trunk(
    baseline: Baseline, backbone: str, channels: int, image_size: int, seed: int
) -> nn.Module:
    """Return a baseline; `untrained` is the backbone with a run's initial weights, by its seed."""
    if baseline == "pixels":
        return ReducedPixels()
    if baseline == "colours":
        return ColourHistogram()
    torch.manual_seed(seed_of("weights", seed))
    return build_backbone(backbone, channels, image_size).trunk
