"""Crops of many small images of one size at once, with the bits of torch's own resizing.

Torch resizes uint8 in whole numbers: weights are rounded to 15 bits, and a pixel to 8 bits once
after the columns and once after the rows. All sums are exact in float32, unless a crop is reduced
to an eighth, so two batched matmuls give the same pixels as a call for each crop, in half the time.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float32, Float64, Int64, UInt8
from torch import Tensor
from torch.nn.functional import interpolate

from hardmix.data.image_ops import CropBoxes

LARGEST = 1 << 25
"""Bytes of a table of weights. Larger images take long enough to be resized one by one."""
PIECE = 64
"""Images worked on at a time: they stay in the processor's cache."""
EXACT_BITS = 16
"""Behind the point of a weight: with 8 of a pixel they fill a float's 24."""


class CropWeights(NamedTuple):
    """How much each pixel of a line counts in each resized one, for every crop of the line."""

    table: Float32[Tensor, "crops size source"]
    first: Int64[Tensor, " lengths"]
    """Row of the table for the crop of this length that starts at 0; the next start follows it."""

    def of(self, start: Int64[Tensor, " n"], length: Int64[Tensor, " n"]) -> Int64[Tensor, " n"]:
        """Rows of the table for these crops."""
        return self.first[length] + start


def crop_equals(
    images: Sequence[UInt8[Tensor, "channels _ _"]] | UInt8[Tensor, "batch channels height width"],
    boxes: CropBoxes,
    size: int,
) -> UInt8[Tensor, "views batch channels {size} {size}"] | None:
    """All views of images of one size; None where they are better resized one by one.

    The boxes are those of all images' first views, then of their second views.
    """
    channels, height, width = images[0].shape
    equal = isinstance(images, Tensor) or all(i.shape == images[0].shape for i in images)
    if not equal or not _same_as_torch(height, width, size):
        return None
    if not isinstance(images, Tensor):
        images = torch.stack(list(images))
    down, across = crop_weights(height, size), crop_weights(width, size)
    assert down is not None
    assert across is not None
    rows = down.of(boxes.top, boxes.height).view(-1, len(images))
    columns = across.of(boxes.left, boxes.width).view(-1, len(images))
    crops = torch.empty(*rows.shape, channels, size, size, dtype=torch.uint8)
    for start in range(0, len(images), PIECE):
        piece = slice(start, start + PIECE)
        pixels = images[piece].float()
        for view, out in enumerate(crops[:, piece]):
            wide = across.table.index_select(0, columns[view, piece]).mT
            narrow = torch.bmm(pixels.flatten(1, 2), wide).add_(0.5).floor_()
            tall = down.table.index_select(0, rows[view, piece])[:, None]
            done = torch.matmul(tall, narrow.view(len(out), channels, height, size))
            out.copy_(done.add_(0.5))
    return crops


@lru_cache(maxsize=8)
def crop_weights(source: int, size: int) -> CropWeights | None:
    """For lines of `source` pixels; None where the table would be large or not exact."""
    if 2 * source * (source + 1) * size * source > LARGEST:
        return None
    table = np.zeros((source * (source + 1) // 2, size, source), dtype=np.float32)
    first, row = [0], 0
    for length in range(1, source + 1):
        weights, bits = _rounded_weights(length, size)
        if bits > EXACT_BITS:
            return None
        first.append(row)
        for start in range(source - length + 1):
            table[row, :, start : start + length] = weights
            row += 1
    return CropWeights(torch.from_numpy(table), torch.tensor(first))


def _rounded_weights(length: int, size: int) -> tuple[Float64[np.ndarray, "size length"], int]:
    """Torch's weights: a triangle, rounded to as many bits as leave the largest below 2^15."""
    reach = max(length / size, 1.0)
    centre = (np.arange(size)[:, None] + 0.5) * (length / size)
    weights = np.maximum(0.0, 1 - np.abs((np.arange(length) - centre + 0.5) * (1 / reach)))
    weights /= weights.sum(axis=1, keepdims=True)
    bits = 0
    while bits < 22 and int(0.5 + weights.max() * 2 ** (bits + 1)) < 2**15:
        bits += 1
    return np.floor(weights * 2**bits + 0.5) / 2**bits, bits


@cache
def _same_as_torch(height: int, width: int, size: int) -> bool:
    """Whether it is so on this machine: other processors and versions may round otherwise."""
    down, across = crop_weights(height, size), crop_weights(width, size)
    if down is None or across is None:
        return False
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(256, (1, 1, height, width), generator=generator, dtype=torch.uint8)
    for share in torch.rand(32, 2, generator=generator, dtype=torch.float64).tolist():
        tall, wide = (
            1 + int(part * (side - 1)) for part, side in zip(share, (height, width), strict=True)
        )
        narrow = image[0, 0, :tall, :wide].float() @ across.table[across.first[wide], :, :wide].T
        resized = down.table[down.first[tall], :, :tall] @ narrow.add_(0.5).floor_()
        wanted = interpolate(
            image[..., :tall, :wide], [size, size], mode="bilinear", antialias=True
        )
        if not torch.equal(resized.add_(0.5).to(torch.uint8), wanted[0, 0]):
            return False
    return True
