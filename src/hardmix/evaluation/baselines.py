"""Features that nobody trained: raw pixels, colours, plain features, a network of random weights.

All are modules, like any trunk. An encoder that is not better than these has learnt nothing useful.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, normalize

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

DIRECTIONS, FIELDS = 8, 4
"""Directions of edges, and fields along a side in which they are counted."""

PART_WEIGHTS = (1.0, 0.5, 2.0)
"""Weights of colours, layout and edges in `PlainFeatures`."""


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


class PlainFeatures(nn.Module):
    """Colours, their layout, and directions of edges: features to look at images without weights.

    Three descriptions side by side: the histogram of colours, the mean colours of 6 x 6 fields,
    and, for each of 4 x 4 fields, how much of its edges runs in each direction. Edges count most.
    """

    def forward(self, images: Float[Tensor, "batch channels y x"]) -> Float[Tensor, "batch plain"]:
        """Return the features of images that are normalised as for a trunk."""
        layout = adaptive_avg_pool2d(images, 6).flatten(1)
        parts = [ColourHistogram()(images), layout, edge_directions(images.mean(dim=1))]
        weighted = zip(PART_WEIGHTS, parts, strict=True)
        return torch.cat([weight * normalize(part, dim=1) for weight, part in weighted], dim=1)


def edge_directions(grey: Float[Tensor, "batch y x"]) -> Float[Tensor, "batch values"]:
    """Return the strength of edges by field and direction, relative to that of the field."""
    across = grey[:, 1:-1, 2:] - grey[:, 1:-1, :-2]
    down = grey[:, 2:, 1:-1] - grey[:, :-2, 1:-1]
    strength = (across.square() + down.square()).sqrt()
    # Without sign: a dark edge on a light ground is like a light one on a dark ground.
    place = (torch.atan2(down, across) / torch.pi % 1) * DIRECTIONS
    lower = place.floor()
    share = place - lower
    bins = torch.arange(DIRECTIONS, device=grey.device)[None, :, None, None]
    first, second = ((lower + step)[:, None] % DIRECTIONS == bins for step in (0, 1))
    weights = first * (1 - share)[:, None] + second * share[:, None]
    fields = adaptive_avg_pool2d(weights * strength[:, None], FIELDS)
    length = fields.square().sum(dim=1, keepdim=True).sqrt()
    usual = length.mean(dim=(2, 3), keepdim=True)
    return (fields / (length + usual + 1e-6)).flatten(1)


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
