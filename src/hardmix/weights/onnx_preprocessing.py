"""An encoder that takes uint8 images of any size: the evaluation crop as part of its graph.

Resizing is linear and separable: a matrix for the rows, one for the columns. Their entries depend
on the image's size alone, so that ONNX computes them out of the shape.
"""

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn

from hardmix.data.augment import channel_statistics
from hardmix.evaluation.features import TrainedEncoder

LONGEST = 4
"""Sides longer than this many times the short one are cut first, as `evaluation_crop` does."""


class WithPreprocessing(nn.Module):
    """uint8 images to features: `evaluation_crop`, normalisation, trunk."""

    mean: Tensor
    std: Tensor

    def __init__(self, encoder: TrainedEncoder) -> None:
        super().__init__()
        self.trunk, self.size = encoder.trunk, encoder.image_size
        mean, std = channel_statistics(encoder.channels)
        self.register_buffer("mean", torch.tensor(mean)[:, None, None])
        self.register_buffer("std", torch.tensor(std)[:, None, None])

    def forward(
        self, images: UInt8[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch features"]:
        """Features of images that have one size, whichever."""
        height, width = (torch.full((1,), images.shape[axis], dtype=torch.int64) for axis in (2, 3))
        down = self._weights(height, width, images.shape[2])
        across = self._weights(width, height, images.shape[3])
        crops = down @ images.float() @ across.T
        crops = crops.round().clamp(0, 255) / 255  # uint8 again, as a file's crop would be
        features: Tensor = self.trunk((crops - self.mean) / self.std)
        return features

    def _weights(
        self,
        side: Int64[Tensor, " 1"],
        other: Int64[Tensor, " 1"],
        pixels: int | torch.SymInt | torch.SymInt,
    ) -> Float[Tensor, "size pixels"]:
        """How much each of a side's pixels counts in each of the crop's."""
        short = torch.minimum(side, other)
        length = torch.minimum(side, LONGEST * short)
        start = _middle(side - length)
        ready = (side == self.size) & (other == self.size)  # stays as it is
        resized = torch.where(ready, side, round(self.size * 256 / 224) * length // short)
        first = _middle(resized - self.size)
        scale = length.float() / resized.float()
        reach = scale.clamp_min(1)
        centre = (torch.arange(self.size).float() + first.float() + 0.5) * scale
        pixel = torch.arange(pixels).float() + 0.5 - start.float()
        inside = (pixel > 0) & (pixel < length.float())
        weights = (1 - ((pixel[None] - centre[:, None]) / reach).abs()).clamp_min(0) * inside
        return weights / weights.sum(dim=1, keepdim=True)


def _middle(spare: Int64[Tensor, " 1"]) -> Int64[Tensor, " 1"]:
    """Where the middle begins: as torchvision's center_crop rounds."""
    return (spare.float() / 2).round().long()
