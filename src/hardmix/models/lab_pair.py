"""CMC's trunk of two halves, one for lightness and one for colours.

It takes images like any other trunk, in RGB and normalised with ImageNet's statistics, and converts
them to Lab; each half sees its own channels. Lab and its ranges are those of the authors' code
(skimage's rgb2lab, D65; HobbitLong/CMC).
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import conv2d

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""ImageNet's statistics, as in data/colours.py, which this room may not import."""

TO_XYZ = (
    (0.412453, 0.357580, 0.180423),
    (0.212671, 0.715160, 0.072169),
    (0.019334, 0.119193, 0.950227),
)
"""Matrix from linear RGB to XYZ."""
WHITE = (0.95047, 1.0, 1.08883)
"""XYZ of D65 for the standard observer of 1931."""
LOWEST, HIGHEST = (0.0, -86.183, -107.857), (100.0, 98.233, 94.478)
"""Ranges of L, a and b over all RGB colours; each is scaled to [-1, 1]."""


class LabPair(nn.Module):
    """Two trunks, one for L and one for a and b; their features are put side by side."""

    def __init__(self, light: nn.Module, colours: nn.Module) -> None:
        super().__init__()
        self.light, self.colours = light, colours
        self.to_lab = ToLab()

    def forward(self, images: Float[Tensor, "batch 3 y x"]) -> Float[Tensor, "batch width"]:
        """Return the features of both halves, side by side."""
        return torch.cat(self.halves(images), dim=1)

    def halves(
        self, images: Float[Tensor, "batch 3 y x"]
    ) -> tuple[Float[Tensor, "batch half"], Float[Tensor, "batch half"]]:
        """Return the features of lightness and of colours."""
        lab = self.to_lab(images)
        return self.light(lab[:, :1]), self.colours(lab[:, 1:])


class ToLab(nn.Module):
    """Converts normalised RGB to L, a and b in [-1, 1], in float32 even inside autocast."""

    mean: Tensor
    std: Tensor
    white: Tensor
    middle: Tensor
    reach: Tensor
    matrix: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name, values in {
            "mean": MEAN,
            "std": STD,
            "white": WHITE,
            "middle": tuple((low + high) / 2 for low, high in zip(LOWEST, HIGHEST, strict=True)),
            "reach": tuple((high - low) / 2 for low, high in zip(LOWEST, HIGHEST, strict=True)),
        }.items():
            self.register_buffer(name, torch.tensor(values).view(-1, 1, 1), persistent=False)
        self.register_buffer("matrix", torch.tensor(TO_XYZ)[..., None, None], persistent=False)

    def forward(self, images: Float[Tensor, "batch 3 y x"]) -> Float[Tensor, "batch 3 y x"]:
        """Return the images in Lab."""
        with torch.autocast(images.device.type, enabled=False):
            colours = (images.float() * self.std + self.mean).clamp(0, 1)
            bright = ((colours + 0.055) / 1.055) ** 2.4
            linear = torch.where(colours > 0.04045, bright, colours / 12.92)
            xyz = conv2d(linear, self.matrix) / self.white
            root = xyz.clamp(min=1e-6) ** (1 / 3)
            x, y, z = torch.where(xyz > 0.008856, root, 7.787 * xyz + 16 / 116).unbind(dim=1)
            lab = torch.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], dim=1)
            return (lab - self.middle) / self.reach
