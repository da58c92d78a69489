"""Crops of images: random ones for views, drawn as torchvision draws them, and those of evaluation.

A worker crops what it has decoded: many small images of one size at once, others one by one, with
the same pixels. A GPU crops whole batches, within 1e-5 of them.
"""

import math
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float32, Float64, Int64, UInt8
from torch import Tensor
from torch.nn.functional import interpolate
from torchvision.transforms.v2 import functional

ATTEMPTS = 10
"""How often torchvision's RandomResizedCrop tries to fit a crop before it takes the centre."""

CROP_DRAWS = 2 * ATTEMPTS + 2
"""Random numbers of a view's crop; they come before all others."""

RATIOS = (3 / 4, 4 / 3)
"""Least and largest width of a crop over its height."""

LARGEST = 1 << 25
"""Most bytes of a table of weights. Larger images are resized one by one."""

PIECE = 64
"""Images that are cropped at a time, so that they stay in the processor's cache."""

EXACT_BITS = 16
"""Most binary digits of a weight: with the 8 of a pixel they fill the 24 of a float."""


class CropBoxes(NamedTuple):
    """A rectangle in each image, in pixels."""

    top: Int64[Tensor, " batch"]
    left: Int64[Tensor, " batch"]
    height: Int64[Tensor, " batch"]
    width: Int64[Tensor, " batch"]


def draw_crops(
    draws: Float64[Tensor, f"batch {CROP_DRAWS}"],
    heights: Int64[Tensor, " batch"],
    widths: Int64[Tensor, " batch"],
    min_scale: float,
    max_scale: float = 1.0,
) -> CropBoxes:
    """Draw crops as torchvision's RandomResizedCrop(scale=(min_scale, max_scale)) does.

    The first of ten attempts that fits the image is taken, at a random place; if none does, the
    largest crop of an allowed shape from the centre.
    """
    h, w = heights.double(), widths.double()
    area = (h * w)[:, None] * (min_scale + (max_scale - min_scale) * draws[:, :ATTEMPTS])
    low, high = math.log(RATIOS[0]), math.log(RATIOS[1])
    ratio = torch.exp(low + (high - low) * draws[:, ATTEMPTS : 2 * ATTEMPTS])
    tall, wide = (area / ratio).sqrt_().round_(), (area * ratio).sqrt_().round_()
    fits = (tall > 0) & (tall <= h[:, None]) & (wide > 0) & (wide <= w[:, None])
    any_fits = fits.any(dim=1)
    first = fits.int().argmax(dim=1, keepdim=True)
    largest_height, largest_width = (w / RATIOS[0]).round_(), (h * RATIOS[1]).round_()
    height = torch.where(any_fits, tall.gather(1, first)[:, 0], largest_height.minimum(h))
    width = torch.where(any_fits, wide.gather(1, first)[:, 0], largest_width.minimum(w))
    spare_rows, spare_columns = h - height, w - width
    top = torch.where(any_fits, (spare_rows + 1) * draws[:, -2], spare_rows / 2)
    left = torch.where(any_fits, (spare_columns + 1) * draws[:, -1], spare_columns / 2)
    return CropBoxes(*(value.floor().long() for value in (top, left, height, width)))


def resized_crops(
    images: UInt8[Tensor, "batch channels height width"], crops: CropBoxes, size: int
) -> Float32[Tensor, "batch channels {size} {size}"]:
    """Crop and resize as `resized_crop(antialias=True)`, within 1e-5, by two batched matmuls.

    Resizing is linear and separable, so a sample's crop is one matrix for its rows and one for its
    columns, with zeros for the pixels outside.
    """
    height, width = images.shape[2:]
    down = _triangle_weights(crops.top, crops.height, height, size, images.device)
    across = _triangle_weights(crops.left, crops.width, width, size, images.device)
    across /= 255  # the range of uint8, where dividing costs least
    narrow = torch.bmm(images.float().flatten(1, 2), across.mT)
    return torch.matmul(down[:, None], narrow.unflatten(1, (-1, height)))


def _triangle_weights(
    start: Tensor, length: Tensor, source: int, size: int, device: torch.device
) -> Float32[Tensor, "batch {size} {source}"]:
    """Return the weight of each of `source` pixels in each of `size` resized ones.

    This is a triangle around the resized pixel's centre, as wide as that pixel but never narrower
    than a source pixel, which is antialiasing. Pixels outside the crop are infinitely far away.
    """
    start, length = (value.to(device, torch.float32).unsqueeze(1) for value in (start, length))
    reach = (length / size).clamp_min(1)
    centre = (torch.arange(size, device=device) + 0.5) * (length / size)
    pixel = torch.arange(source, device=device) + 0.5 - start
    pixel = torch.where((pixel > 0) & (pixel < length), pixel, torch.inf)
    weights = (pixel / reach)[:, None, :] - (centre / reach)[:, :, None]
    weights = weights.abs_().neg_().add_(1).clamp_min_(0)
    return weights.div_(weights.sum(dim=2, keepdim=True))


def cut_crops(
    images: Sequence[UInt8[Tensor, "channels _ _"]] | UInt8[Tensor, "batch channels height width"],
    boxes: CropBoxes,
    size: int,
) -> UInt8[Tensor, "views batch channels {size} {size}"]:
    """Cut and resize crops of images of any size, with the pixels of torchvision's `resize`.

    The boxes are those of the first view of all images, then of their second view, and so on.
    """
    together = cut_equal_crops(images, boxes, size) if _resizes_bytes() else None
    if together is not None:
        return together
    views = len(boxes.top) // len(images)
    places = torch.stack(boxes, dim=1).unflatten(0, (views, -1)).transpose(0, 1).tolist()
    crops = torch.empty(views, len(images), len(images[0]), size, size, dtype=torch.uint8)
    for row, (image, own) in enumerate(zip(images, places, strict=True)):
        for view, (top, left, height, width) in enumerate(own):
            part = image[:, top : top + height, left : left + width]
            crops[view, row] = _resized(part, [size, size])
    return crops


def _resized(
    image: UInt8[Tensor, "channels _ _"], size: list[int]
) -> UInt8[Tensor, "channels size size"]:
    """Return the result of torchvision's `resize`, whose own checks take half as long again."""
    if _resizes_bytes():
        return interpolate(image[None], size, mode="bilinear", antialias=True)[0]
    resized: Tensor = functional.resize(image, size)
    return resized


@cache
def _resizes_bytes() -> bool:
    """Return whether torchvision resizes uint8 as it is on this CPU; others go through floats."""
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


class CropWeights(NamedTuple):
    """The weight of each pixel of a line in each resized one, for every crop of the line."""

    table: Float32[Tensor, "crops size source"]
    first: Int64[Tensor, " lengths"]
    """Row of the table for the crop of this length that starts at 0; the next start follows it."""

    def rows(self, start: Int64[Tensor, " n"], length: Int64[Tensor, " n"]) -> Int64[Tensor, " n"]:
        """Return the rows of the table for these crops."""
        return self.first[length] + start


def cut_equal_crops(
    images: Sequence[UInt8[Tensor, "channels _ _"]] | UInt8[Tensor, "batch channels height width"],
    boxes: CropBoxes,
    size: int,
) -> UInt8[Tensor, "views batch channels {size} {size}"] | None:
    """Do `cut_crops` for small images of one size, in half the time; None for other images.

    Torch resizes uint8 in integers: weights are rounded to 15 bits, and a pixel to 8 bits once
    after the columns and once after the rows. Unless a crop is reduced to an eighth, all sums are
    exact in float32, so that two batched matmuls give the same pixels as a call for each crop.
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
    rows = down.rows(boxes.top, boxes.height).view(-1, len(images))
    columns = across.rows(boxes.left, boxes.width).view(-1, len(images))
    crops = torch.empty(*rows.shape, channels, size, size, dtype=torch.uint8)
    for start in range(0, len(images), PIECE):
        piece = slice(start, start + PIECE)
        pixels = images[piece].float()
        for view, out in enumerate(crops[:, piece]):
            wide = across.table.index_select(0, columns[view, piece]).mT
            narrow = torch.bmm(pixels.flatten(1, 2), wide).add_(0.5).floor_()
            tall = down.table.index_select(0, rows[view, piece])[:, None]
            resized = torch.matmul(tall, narrow.view(len(out), channels, height, size))
            out.copy_(resized.add_(0.5))
    return crops


@lru_cache(maxsize=8)
def crop_weights(source: int, size: int) -> CropWeights | None:
    """Return the weights for lines of `source` pixels; None if they would be large or not exact."""
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
    """Return torch's weights, a triangle rounded to the bits that keep the largest below 2^15."""
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
    """Return whether pixels are torch's here: other processors may round differently."""
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


def resized_side(size: int) -> int:
    """Return the length to which `evaluation_crop` resizes the short side of an image."""
    return round(size * 256 / 224)


def evaluation_crop(
    image: UInt8[Tensor, "*batch channels height width"], size: int
) -> UInt8[Tensor, "*batch channels {size} {size}"]:
    """Crop as official MoCo evaluates: the short side to size * 256 / 224, then the centre.

    Images that already have this size are taken whole, as CIFAR's are everywhere. (Official MoCo
    would also enlarge photographs that were scaled to 224 pixels before, and cut out the centre.)
    """
    height, width = image.shape[-2:]
    if height == width == size:
        return image
    longest = 4 * min(height, width)  # otherwise a strip of 1 x 20000 pixels would fill the memory
    image = functional.center_crop(image, [min(height, longest), min(width, longest)])
    image = functional.resize(image, [resized_side(size)], antialias=True)
    cropped: Tensor = functional.center_crop(image, [size, size])
    return cropped
