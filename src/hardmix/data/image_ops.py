"""The operations of MoCo's augmentations on a batch, each sample with parameters of its own.

Axes: batch, channels, height, width. Images are float in [0, 1]; a trailing underscore changes
them in place. Each equals its namesake in torchvision.transforms.v2.functional on float images.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Float, Float32, Int64, UInt8
from torch import Tensor
from torch.nn.functional import pad

from hardmix.runtime.device import send

LUMA = (0.2989, 0.587, 0.114)
"""Shares of red, green and blue in grey: torchvision's and Pillow's."""

BLUR_RADIUS = 8
"""Pixels to each side that a blur reaches: four of the largest sigma, 0.99994 of its weight."""

LEAST_WEIGHT = 1e-12
"""Of a pixel in a blur; what is less cannot be seen in a float32 sum."""

_TILE = 32
"""Pixels of a line that are blurred by one matrix, at most."""

Images = Float32[Tensor, "batch channels height width"]
Factor = Float32[Tensor, " batch"]


class CropBoxes(NamedTuple):
    """A rectangle in each image, in pixels."""

    top: Int64[Tensor, " batch"]
    left: Int64[Tensor, " batch"]
    height: Int64[Tensor, " batch"]
    width: Int64[Tensor, " batch"]


def resized_crops(
    images: UInt8[Tensor, "batch channels height width"], crops: CropBoxes, size: int
) -> Float32[Tensor, "batch channels {size} {size}"]:
    """Crop and resize as `resized_crop(antialias=True)`, within 1e-5: two batched matmuls.

    Resizing is linear and separable, so a sample's crop is one matrix for its rows and one for its
    columns, with zeros for the pixels outside.
    """
    height, width = images.shape[2:]
    down = _triangle_weights(crops.top, crops.height, height, size, images.device)
    across = _triangle_weights(crops.left, crops.width, width, size, images.device)
    across /= 255  # the range of uint8, where it costs least
    narrow = torch.bmm(images.float().flatten(1, 2), across.mT)
    return torch.matmul(down[:, None], narrow.unflatten(1, (-1, height)))


def _triangle_weights(
    start: Tensor, length: Tensor, source: int, size: int, device: torch.device
) -> Float32[Tensor, "batch {size} {source}"]:
    """How much each of `source` pixels counts in each of `size` resized ones.

    A triangle around the resized pixel's centre, as wide as that pixel but never narrower than a
    source pixel (that is what antialiasing means); pixels outside the crop are infinitely far.
    """
    start, length = (value.to(device, torch.float32).unsqueeze(1) for value in (start, length))
    reach = (length / size).clamp_min(1)
    centre = (torch.arange(size, device=device) + 0.5) * (length / size)
    pixel = torch.arange(source, device=device) + 0.5 - start
    pixel = torch.where((pixel > 0) & (pixel < length), pixel, torch.inf)
    weights = (pixel / reach)[:, None, :] - (centre / reach)[:, :, None]
    weights = weights.abs_().neg_().add_(1).clamp_min_(0)
    return weights.div_(weights.sum(dim=2, keepdim=True))


def adjust_brightness_(images: Images, factor: Factor) -> None:
    """Times `factor`."""
    images.mul_(_per_image(factor)).clamp_(0, 1)


def adjust_contrast_(images: Images, factor: Factor) -> None:
    """Away from the mean of the grey image; of all channels where they are not three."""
    # Rows first: one sum over both axes would depend on the threads when the batch is one image.
    means = images.mean(dim=3).mean(dim=2)
    shares = means.new_tensor(LUMA) if images.shape[1] == 3 else 1 / images.shape[1]
    grey = (means * shares).sum(dim=1)
    images.mul_(_per_image(factor)).add_(_per_image(grey * (1 - factor))).clamp_(0, 1)


def adjust_saturation_(images: Images, factor: Factor) -> None:
    """Away from grey, pixel by pixel; 0 makes it grey."""
    red, green, blue = images.unbind(dim=1)
    grey = red.mul(LUMA[0]).add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2]).unsqueeze_(1)
    images.lerp_(grey, _per_image(1 - factor)).clamp_(0, 1)


def adjust_hue_(images: Images, factor: Factor) -> None:
    """Turn the colour circle by `factor` of a whole turn, without a branch for each sixth of it.

    In sixths, a colour is 1 + (green + blue - red - least) / range away from red, towards green or
    blue, whichever is more; and each primary fades over one sixth, two sixths away from itself.
    Written in as few passes over the pixels as we found: they are what takes the time.
    """
    red, green, blue = images.unbind(dim=1)
    least = torch.minimum(red, green).minimum(blue)
    spread = torch.maximum(red, green).maximum(blue).sub_(least)
    hue = (green + blue).sub_(red).sub_(least).div_(spread.mul(6).add_(1e-12)).add_(1 / 6)
    hue.copysign_(green - blue).add_((factor + 1).view(-1, 1, 1)).frac_()  # a turn more: positive
    low, high = least - spread, torch.add(least, spread, alpha=2)
    fade = torch.empty_like(hue)
    for plane, base, opposite, sixths in [
        (red, low, 3, 6),
        (green, high, 2, -6),
        (blue, high, 4, -6),
    ]:
        torch.sub(hue, opposite / 6, out=fade).abs_().clamp_(1 / 6, 2 / 6)
        torch.addcmul(base, spread, fade, value=sixths, out=plane)


def blur_(images: Images, sigma: Factor) -> None:
    """Gaussian blur with reflected borders; the kernel has `blur_radius` pixels to each side.

    A true Gaussian: official MoCo's Pillow approximates it by boxes and repeats the border.
    As in `resized_crops` a matrix serves the rows and one the columns. They would be zero far from
    the diagonal, so lines are blurred in tiles, and a small matrix serves all tiles.
    """
    height, width = images.shape[2:]
    across = _gaussian_band(sigma, width)
    down = across if height == width else _gaussian_band(sigma, height)
    tiles = _reached(images, axis=3).flatten(1, 3)
    narrow = torch.bmm(tiles, across.mT)
    narrow = narrow.view(*images.shape[:3], -1)[..., :width]
    tiles = _reached(narrow, axis=2).mT
    blurred = torch.matmul(down[:, None, None], tiles)
    images.copy_(blurred.flatten(2, 3)[:, :, :height])


def _reached(images: Images, axis: int) -> Float32[Tensor, "batch channels lines tiles reach"]:
    """What the blur of each tile reads, borders reflected; the last tile may end outside."""
    size = images.shape[axis]
    radius, tile = blur_radius(size), _tile(size)
    borders = [radius, radius + -size % tile]
    padded = pad(images, [*borders, 0, 0] if axis == 3 else [0, 0, *borders], mode="reflect")
    return padded.unfold(axis, tile + 2 * radius, tile)


def _gaussian_band(sigma: Factor, size: int) -> Float32[Tensor, "batch tile reach"]:
    """How much each pixel that a tile reaches counts in each of its blurred ones."""
    radius, tile = blur_radius(size), _tile(size)
    offset = torch.arange(-radius, radius + 1, device=sigma.device)
    kernel = torch.softmax(-0.5 * (offset / sigma[:, None]) ** 2, dim=1)
    # Below 1e-38 numbers are denormal, and Intel's cores take 15 times as long to multiply them.
    kernel = kernel.where(kernel > LEAST_WEIGHT, 0)
    reach = tile + 2 * radius
    band = kernel.new_zeros(len(sigma), tile, reach)
    diagonals = band.as_strided((len(sigma), tile, len(offset)), (tile * reach, reach + 1, 1))
    diagonals.copy_(kernel[:, None].expand_as(diagonals))
    return band


def _tile(size: int) -> int:
    """At most _TILE, and such that few pixels of the last tile are outside."""
    return math.ceil(size / math.ceil(size / _TILE))


def blur_radius(size: int) -> int:
    """BLUR_RADIUS, or less where the kernel would exceed the image."""
    return min(BLUR_RADIUS, (size - 1) // 2)


def flip_(images: Images) -> None:
    """Left becomes right."""
    images.copy_(images.flip(-1))


def normalise(
    images: Images, mean: tuple[float, ...], std: tuple[float, ...], out: Images | None = None
) -> Float32[Tensor, "batch channels height width"]:
    """(images - mean) / std, channel by channel; with `out`, which may be images, they are used up.

    So that memory which is not in the cache is written once.
    """
    shift, scale = constant(mean, images.device), constant(std, images.device)
    if out is None:
        return torch.sub(images, shift).div_(scale)
    return torch.div(images.sub_(shift), scale, out=out)


@cache
def constant(values: tuple[float, ...], device: torch.device) -> Float32[Tensor, "channels 1 1"]:
    """A number for each channel, sent to a device once."""
    return send(torch.tensor(values).view(-1, 1, 1), device)


def _per_image(values: Float[Tensor, " batch"]) -> Float[Tensor, "batch 1 1 1"]:
    return values.view(-1, 1, 1, 1)
