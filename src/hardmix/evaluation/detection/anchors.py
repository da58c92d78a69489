"""The RPN's anchors in detectron2's order: rows, columns, then sizes, then ratios in each size."""

from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from hardmix.runtime.device import send

STRIDE = 16
"""Pixels per cell of the map that the RPN reads: layer3's, for every size of image."""

SIZES = (32, 64, 128, 256, 512)
"""Roots of the anchors' areas, in pixels."""

RATIOS = (0.5, 1.0, 2.0)
"""Heights over widths."""

PER_CELL = len(SIZES) * len(RATIOS)


def cell_anchors() -> Float[Tensor, "15 4"]:
    """Return the anchors around the point (0, 0), not rounded, as in detectron2."""
    anchors = []
    for size in SIZES:
        for ratio in RATIOS:
            width = (size**2 / ratio) ** 0.5
            height = ratio * width
            anchors.append((-width / 2, -height / 2, width / 2, height / 2))
    return torch.tensor(anchors)


def anchors_of(features: Float[Tensor, "images channels rows columns"]) -> Float[Tensor, "n 4"]:
    """Return all anchors of a map, the same for every image; the first cell is at (0, 0)."""
    rows, columns = features.shape[-2:]
    y = torch.arange(rows, device=features.device).float() * STRIDE
    x = torch.arange(columns, device=features.device).float() * STRIDE
    y, x = torch.meshgrid(y, x, indexing="ij")
    corners = torch.stack([x, y, x, y], dim=-1).reshape(-1, 1, 4)
    return (corners + _on_device(features.device)).reshape(-1, 4)


@cache
def _on_device(device: torch.device) -> Tensor:
    return send(cell_anchors(), device)
