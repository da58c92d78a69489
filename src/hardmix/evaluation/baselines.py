"""Features that nobody trained: raw pixels and colour histograms, as modules like any trunk.

An encoder that is not better than these has learnt nothing of use.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from hardmix.data.augment import channel_statistics

BINS = 8
"""Bins for each of red, green and blue: 512 colours."""
ONE_CHANNEL_BINS = 64
"""Bins for each channel of images that do not have three."""
PIXELS = 32
"""Side to which `ReducedPixels` reduces images."""


class ColourHistogram(nn.Module):
    """How many pixels have each colour; of images normalised as for a trunk.

    The square root is taken, so that the cosine of two features is the histograms' Bhattacharyya
    coefficient: with plain counts, one large area of sky would decide alone.
    """

    def forward(
        self, images: Float[Tensor, "batch channels y x"]
    ) -> Float[Tensor, "batch colours"]:
        """Return the square roots of the shares of pixels in each bin."""
        channels = images.shape[1]
        mean, std = (images.new_tensor(each) for each in channel_statistics(channels))
        pixels = images.flatten(2) * std[:, None] + mean[:, None]
        if channels == 3:
            red, green, blue = _bins(pixels, BINS).unbind(dim=1)
            return _counts((red * BINS + green) * BINS + blue, BINS**3).sqrt()
        each = [
            _counts(band, ONE_CHANNEL_BINS) for band in _bins(pixels, ONE_CHANNEL_BINS).unbind(1)
        ]
        return torch.cat(each, dim=1).sqrt()


def _bins(pixels: Tensor, number: int) -> Tensor:
    return (pixels * number).long().clamp_(0, number - 1)


def _counts(bins: Tensor, number: int) -> Tensor:
    """Return the share of each row's entries in each bin."""
    counts = torch.zeros(len(bins), number, device=bins.device)
    counts.scatter_add_(1, bins, torch.ones_like(bins, dtype=counts.dtype))
    return counts / bins.shape[1]


class ReducedPixels(nn.Module):
    """Raw pixels, reduced to 32 x 32 where images are larger."""

    def forward(self, images: Float[Tensor, "batch channels y x"]) -> Float[Tensor, "batch pixels"]:
        """Return the pixels in a row."""
        height, width = (min(PIXELS, side) for side in images.shape[2:])
        reduced: Tensor = adaptive_avg_pool2d(images, (height, width))
        return reduced.flatten(1)
