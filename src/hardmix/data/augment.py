"""The two views of an image, distributed as those of official MoCo-v1 and MoCo-v2.

Pixels are not the same ones: rounding differs, and Pillow only approximates a Gaussian blur.
Parameters are drawn first (`view_parameters`), then whole batches are transformed. A random resized
crop comes first, the colours follow, so that a worker process can crop what it has decoded and a
GPU does the rest (`device_colours`: the same in few launches).
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Float32, Float64, Int64, UInt8
from torch import Tensor
from torch.nn.functional import interpolate
from torchvision.transforms.v2 import functional

from hardmix.data import image_ops
from hardmix.data.device_colours import DeviceColours, apply_colours_, plan_colours
from hardmix.data.image_ops import CropBoxes, normalise, resized_crops
from hardmix.data.rand_augment import RAND_DRAWS, Operation, rand_stages
from hardmix.data.small_crops import crop_equals
from hardmix.data.view_parameters import (
    COLOUR_DRAWS,
    CROP_DRAWS,
    ColourParameters,
    draw_colours,
    draw_crops,
    draw_views,
)
from hardmix.settings.config import DataConfig
from hardmix.settings.named_choices import Augmentation

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's red, green and blue, as in official MoCo; used for every data set of colours."""

CACHED = 1 << 20
"""Numbers worked on at a time on a CPU: what stays in its cache is two to three times as fast."""

ALONE = 1 << 16
"""Numbers in an image from which on a CPU colours one image at a time."""


class Stage(NamedTuple):
    """A step of the recipe: each sample goes through one of these operations or through none."""

    choice: Int64[Tensor, " batch"]
    """Number of the sample's operation; none where there is no such."""
    operations: list[Operation]


def colour_stages(
    parameters: ColourParameters,
    augmentation: Augmentation,
    channels: int,
    rand: Float64[Tensor, "batch draws"] | None = None,
) -> list[Stage]:
    """Official MoCo's order after the crop. v1: grey, jitter, flip; v2: jitter, grey, blur, flip.

    Images without three channels have no saturation, hue or grey; brightness and contrast stay.
    `rand` are the random numbers of InfoMin's two operations of RandAugment.
    """

    def adjust(operation: Callable[[Tensor, Tensor], None], factor: Tensor) -> Operation:
        return lambda images, rows: operation(images, factor[rows])

    p = parameters
    adjustments = [
        adjust(image_ops.adjust_brightness_, p.brightness),
        adjust(image_ops.adjust_contrast_, p.contrast),
        adjust(image_ops.adjust_saturation_, p.saturation),
        adjust(image_ops.adjust_hue_, p.hue),
    ][: 4 if channels == 3 else 2]
    jitter = [Stage(torch.where(p.jitter, turn, 4), adjustments) for turn in p.order.T]
    unsaturate = adjust(image_ops.adjust_saturation_, torch.zeros_like(p.saturation))
    grey = [Stage((~p.grey).long(), [unsaturate])] if channels == 3 else []
    blur = Stage((p.sigma == 0).long(), [adjust(image_ops.blur_, p.sigma)])
    flip = Stage((~p.flip).long(), [lambda images, _: image_ops.flip_(images)])
    orders = {
        "moco-v1": [*grey, *jitter, flip],
        "moco-v2": [*jitter, *grey, blur, flip],
        "simclr": [*jitter, *grey, blur, flip],
        "plain": [flip],
    }
    if augmentation == "infomin":
        assert rand is not None
        return [*jitter, blur, *(Stage(*each) for each in rand_stages(rand)), *grey, flip]
    return orders[augmentation]


def _apply_(stages: list[Stage], images: Tensor, first: int) -> Tensor:
    """Colour samples from row `first` of the stages on; what was given is used up."""
    way = _one_by_one if _alone(images.shape[1:]) else _in_groups
    return way(stages, images, first)


def _alone(shape: Sequence[int]) -> bool:
    """Whether images are worked on one at a time: small ones would take longer to call for."""
    return math.prod(shape) >= ALONE


def _piece(shape: Sequence[int]) -> int:
    """Images of this shape that are worked on at a time."""
    return 1 if _alone(shape) else max(1, CACHED // math.prod(shape))


def _one_by_one(stages: list[Stage], images: Tensor, first: int) -> Tensor:
    """Each sample goes its way in place."""
    for image, row in zip(images.split(1), range(first, first + len(images)), strict=True):
        for choice, operations in stages:
            number = int(choice[row])
            if number < len(operations):
                operations[number](image, slice(row, row + 1))
    return images


def _in_groups(stages: list[Stage], images: Tensor, first: int) -> Tensor:
    """At each stage samples are sorted by their operation: it then works in place on a slice."""
    place = torch.arange(len(images))
    for choices, operations in stages:
        choice = choices[first : first + len(images)]
        rows = choice.argsort()
        images = images.index_select(0, place[rows])
        place[rows] = torch.arange(len(rows))
        counts = torch.bincount(choice, minlength=len(operations)).tolist()
        start = 0
        for operation, count in zip(operations, counts, strict=False):
            part = slice(start, start + count)
            if count:
                operation(images[part], rows[part] + first)
            start += count
    return images.index_select(0, place)


Views = tuple[Float32[Tensor, "batch channels size size"], ...]
"""Query and key, normalised; or a single view."""


def make_views(
    images: UInt8[Tensor, "batch channels height width"],
    ids: Int64[Tensor, " batch"],
    config: DataConfig,
    seed: int,
    epoch: int,
    views: int = 2,
    first: int = 0,
    max_scale: float = 1.0,
) -> Views:
    """The views of images of one size, on their device; by (seed, epoch, id, view) alone."""
    height, width = (torch.full((views * len(ids),), side) for side in images.shape[2:])
    draws = draw_views(ids, seed, epoch, _draws(config), views, first)
    boxes = draw_crops(draws[:, :CROP_DRAWS], height, width, config.min_scale, max_scale)
    if images.device.type != "cpu":
        plan = _plan(draws, config, images.device, torch.stack(boxes, dim=1))
        some = images.index_select(0, plan.source.remainder(len(ids)))
        crops = resized_crops(some, CropBoxes(*plan.more.unbind(dim=1)), config.image_size)
        return _on_device(crops, plan, config, views)

    def crop(rows: slice) -> Tensor:
        some = images.index_select(0, torch.arange(views * len(ids))[rows] % len(ids))
        return resized_crops(some, CropBoxes(*(side[rows] for side in boxes)), config.image_size)

    return _coloured(crop, draws, config, views)


def crop_views(
    images: Sequence[UInt8[Tensor, "channels _ _"]] | UInt8[Tensor, "batch channels height width"],
    ids: Int64[Tensor, " batch"],
    config: DataConfig,
    seed: int,
    epoch: int,
    views: int = 2,
    first: int = 0,
    max_scale: float = 1.0,
) -> UInt8[Tensor, "{views} batch channels size size"]:
    """The first half of `make_views` for images of any size: a worker's part."""
    sides = [images.shape[2:]] if isinstance(images, Tensor) else [i.shape[1:] for i in images]
    heights, widths = torch.tensor(sides).expand(len(images), 2).T
    draws = draw_views(ids, seed, epoch, CROP_DRAWS, views, first)
    sides_of_all = heights.repeat(views), widths.repeat(views)
    boxes = draw_crops(draws, *sides_of_all, config.min_scale, max_scale)
    together = crop_equals(images, boxes, config.image_size) if _resizes_bytes() else None
    if together is not None:
        return together
    places = torch.stack(boxes, dim=1).unflatten(0, (views, -1)).transpose(0, 1).tolist()
    size = [config.image_size, config.image_size]
    crops = torch.empty(views, len(images), config.channels, *size, dtype=torch.uint8)
    for row, (image, own) in enumerate(zip(images, places, strict=True)):
        for view, (top, left, height, width) in enumerate(own):
            part = image[:, top : top + height, left : left + width]
            crops[view, row] = _resized(part, size)
    return crops


def _resized(
    image: UInt8[Tensor, "channels _ _"], size: list[int]
) -> UInt8[Tensor, "channels size size"]:
    """As torchvision's `resize`, which takes half as long again to find out what to do."""
    if _resizes_bytes():
        return interpolate(image[None], size, mode="bilinear", antialias=True)[0]
    resized: Tensor = functional.resize(image, size)
    return resized


@cache
def _resizes_bytes() -> bool:
    """Whether torchvision resizes uint8 on this CPU as it is; elsewhere it goes through floats."""
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def colour_views(
    crops: UInt8[Tensor, "views batch channels size size"],
    ids: Int64[Tensor, " batch"],
    config: DataConfig,
    seed: int,
    epoch: int,
    out: Float32[Tensor, "views batch channels size size"] | None = None,
    first: int = 0,
) -> Views:
    """The second half, for a batch of what `crop_views` gave; into `out`, if there is one."""
    flat = crops.flatten(0, 1)
    draws = draw_views(ids, seed, epoch, _draws(config), len(crops), first)
    if crops.device.type != "cpu":
        plan = _plan(draws, config, crops.device, torch.empty(len(draws), 0))
        some = flat.index_select(0, plan.source).float().div_(255)
        return _on_device(some, plan, config, len(crops))

    # The same memory for every piece: it stays in the processor's cache.
    floats = torch.empty(min(len(flat), _piece(flat.shape[1:])), *flat.shape[1:])

    def crop(rows: slice) -> Tensor:
        some = flat[rows]
        return floats[: len(some)].copy_(some).div_(255)

    return _coloured(crop, draws, config, len(crops), out)


def _draw_colours(draws: Tensor, config: DataConfig) -> ColourParameters:
    """The numbers after those of the crop, as the settings have it."""
    colours = draws[:, CROP_DRAWS : CROP_DRAWS + COLOUR_DRAWS]
    return draw_colours(colours, config.augmentation, config.blur, config.colour_strength)


def _draws(config: DataConfig) -> int:
    """How many random numbers a view takes."""
    return CROP_DRAWS + COLOUR_DRAWS + (RAND_DRAWS if config.augmentation == "infomin" else 0)


def _plan(draws: Tensor, config: DataConfig, device: torch.device, more: Tensor) -> DeviceColours:
    parameters = _draw_colours(draws, config)
    return plan_colours(parameters, config.channels, device, more.float())


def _on_device(crops: Tensor, plan: DeviceColours, config: DataConfig, views: int) -> Views:
    """Colours of the plan's samples, which come back into their own order."""
    coloured = apply_colours_(crops, plan, config.augmentation)
    normalised = normalise(coloured, *channel_statistics(config.channels), out=coloured)
    return normalised.index_select(0, plan.place).chunk(views)


def _coloured(
    crop: Callable[[slice], Tensor],
    draws: Tensor,
    config: DataConfig,
    views: int,
    out: Tensor | None = None,
) -> Views:
    """Colours for all views at once, on a CPU; `crop` gives the views in these rows."""
    parameters, rest = _draw_colours(draws, config), draws[:, CROP_DRAWS + COLOUR_DRAWS :]
    stages = colour_stages(parameters, config.augmentation, config.channels, rest)
    mean, std = channel_statistics(config.channels)
    shape = config.channels, config.image_size, config.image_size
    piece = _piece(shape)
    done = torch.empty(len(draws), *shape) if out is None else out.flatten(0, 1)
    for start in range(0, len(draws), piece):
        rows = slice(start, start + piece)
        normalise(_apply_(stages, crop(rows), start), mean, std, out=done[rows])
    return done.chunk(views)


def channel_statistics(channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation to normalise with: ImageNet's, or 0.5 and 0.25 without colours."""
    if channels == 3:
        return IMAGENET_MEAN, IMAGENET_STD
    return (0.5,) * channels, (0.25,) * channels


def evaluation_crop(
    image: UInt8[Tensor, "*batch channels height width"], size: int
) -> UInt8[Tensor, "*batch channels {size} {size}"]:
    """Official MoCo's evaluation: short side to size * 256 / 224, then the centre.

    Images that already have this size are taken whole, as CIFAR's are everywhere. Of photographs
    that were scaled to 224 pixels before, official MoCo would enlarge and cut out the centre too.
    """
    height, width = image.shape[-2:]
    if height == width == size:
        return image
    longest = 4 * min(height, width)  # else a strip of 1 x 20000 pixels would fill the memory
    image = functional.center_crop(image, [min(height, longest), min(width, longest)])
    image = functional.resize(image, [round(size * 256 / 224)], antialias=True)
    cropped: Tensor = functional.center_crop(image, [size, size])
    return cropped
