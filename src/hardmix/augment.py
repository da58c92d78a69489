"""The two views of an image, exactly as official MoCo-v1 and MoCo-v2 make them.

Parameters are drawn first, for each sample from its own random numbers (`stateless.uniform`); then
whole batches are transformed. A random resized crop comes first, the colours follow, so that a
worker process can crop what it has decoded and the training device does the rest.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float32, Float64, Int64, UInt8
from torch import Tensor
from torchvision.transforms.v2 import functional

from hardmix import image_ops
from hardmix.config import Augmentation, DataConfig
from hardmix.image_ops import CropBoxes, normalise, resized_crops
from hardmix.stateless import uniform

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's red, green and blue, as in official MoCo; used for every data set of colours."""

ATTEMPTS = 10
"""How often torchvision's RandomResizedCrop tries to fit a crop before it takes the centre."""

CROP_DRAWS = 2 * ATTEMPTS + 2
COLOUR_DRAWS = 13
"""Random numbers that a view takes: crop first, then colours."""

CACHED = 1 << 20
"""Numbers worked on at a time on a CPU: what stays in its cache is two to three times as fast."""

ALONE = 1 << 16
"""Numbers in an image from which on a CPU colours one image at a time."""

RATIOS = (3 / 4, 4 / 3)
"""Width over height of a crop, least and most."""


class ColourParameters(NamedTuple):
    """What happens to the colours of each view. On the CPU: choosing rows must not wait for a GPU.

    The fields `brightness` to `hue` hold factors in the sense of torchvision's `adjust_*`.
    """

    order: Int64[Tensor, "batch 4"]
    """The four in the order in which they are applied: 0 brightness, 1 contrast, 2 saturation,
    3 hue."""
    brightness: Float32[Tensor, " batch"]
    contrast: Float32[Tensor, " batch"]
    saturation: Float32[Tensor, " batch"]
    hue: Float32[Tensor, " batch"]
    jitter: Bool[Tensor, " batch"]
    """Whether these four are applied."""
    grey: Bool[Tensor, " batch"]
    sigma: Float32[Tensor, " batch"]
    """Of the blur, in pixels; 0 is none."""
    flip: Bool[Tensor, " batch"]


def draw_crops(
    draws: Float64[Tensor, f"batch {CROP_DRAWS}"],
    heights: Int64[Tensor, " batch"],
    widths: Int64[Tensor, " batch"],
    min_scale: float,
) -> CropBoxes:
    """As RandomResizedCrop(scale=(min_scale, 1)) of torchvision: a share of the area and a shape.

    The first of ten attempts that fits the image is taken, at a random place; if none does, the
    largest crop of an allowed shape from the centre.
    """
    h, w = heights.double(), widths.double()
    area = (h * w)[:, None] * (min_scale + (1 - min_scale) * draws[:, :ATTEMPTS])
    low, high = math.log(RATIOS[0]), math.log(RATIOS[1])
    ratio = torch.exp(low + (high - low) * draws[:, ATTEMPTS : 2 * ATTEMPTS])
    tall, wide = (area / ratio).sqrt_().round_(), (area * ratio).sqrt_().round_()
    fits = (tall > 0) & (tall <= h[:, None]) & (wide > 0) & (wide <= w[:, None])
    found = fits.any(dim=1)
    first = fits.int().argmax(dim=1, keepdim=True)
    height = torch.where(found, tall.gather(1, first)[:, 0], (w / RATIOS[0]).round_().minimum(h))
    width = torch.where(found, wide.gather(1, first)[:, 0], (h * RATIOS[1]).round_().minimum(w))
    spare_rows, spare_columns = h - height, w - width
    top = torch.where(found, (spare_rows + 1) * draws[:, -2], spare_rows / 2)
    left = torch.where(found, (spare_columns + 1) * draws[:, -1], spare_columns / 2)
    return CropBoxes(*(value.floor().long() for value in (top, left, height, width)))


def draw_colours(
    draws: Float64[Tensor, f"batch {COLOUR_DRAWS}"], augmentation: Augmentation, blur: bool
) -> ColourParameters:
    """Official MoCo's colours, or "plain": none but the flip, as in evaluations that train.

    v1: grey 0.2; ColorJitter(0.4, 0.4, 0.4, 0.4) always; flip 0.5.
    v2: ColorJitter(0.4, 0.4, 0.4, 0.1) 0.8; grey 0.2; blur of sigma U(0.1, 2) 0.5; flip 0.5.
    """
    second, plain = augmentation == "moco-v2", augmentation == "plain"
    brightness, contrast, saturation = (0.6 + 0.8 * draws[:, 4:7].T).float()
    hue = (0.1 if second else 0.4) * (2 * draws[:, 7] - 1)
    jitter, grey, blurred, flip = (draws[:, 8:12] < draws.new_tensor([0.8, 0.2, 0.5, 0.5])).T
    return ColourParameters(
        order=draws[:, :4].argsort(dim=1),
        brightness=brightness,
        contrast=contrast,
        saturation=saturation,
        hue=hue.float(),
        jitter=jitter if second else torch.full_like(jitter, not plain),
        grey=grey & (not plain),
        sigma=((0.1 + 1.9 * draws[:, 12]) * (blurred & (second and blur))).float(),
        flip=flip,
    )


Operation = Callable[[Tensor, Tensor | slice], None]
"""Changes images in place, told which rows of the parameters are theirs."""


class Stage(NamedTuple):
    """A step of the recipe: each sample goes through one of these operations or through none."""

    choice: Int64[Tensor, " batch"]
    """Number of the sample's operation; none where there is no such."""
    operations: list[Operation]


def colour_stages(
    parameters: ColourParameters, augmentation: Augmentation, channels: int
) -> list[Stage]:
    """Official MoCo's order after the crop. v1: grey, jitter, flip; v2: jitter, grey, blur, flip.

    Images without three channels have no saturation, hue or grey; brightness and contrast stay.
    """

    def adjust(operation: Callable[[Tensor, Tensor], None], factor: Tensor) -> Operation:
        return lambda images, rows: operation(images, factor[rows].to(images.device))

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
        "plain": [flip],
    }
    return orders[augmentation]


def apply_colours(
    images: Float32[Tensor, "batch channels size size"],
    parameters: ColourParameters,
    augmentation: Augmentation,
) -> Float32[Tensor, "batch channels size size"]:
    """All that official MoCo does between crop and normalisation, to each sample its own."""
    stages = colour_stages(parameters, augmentation, images.shape[1])
    if images.device.type == "cpu" and images.shape[1:].numel() >= ALONE:
        return _one_by_one(images.clone(), stages)
    return _in_groups(images, stages)


def _one_by_one(images: Tensor, stages: list[Stage]) -> Tensor:
    """Each sample goes its way in place. Small images would take longer to call than to colour."""
    choices = torch.stack([stage.choice for stage in stages], dim=1).tolist()
    for row, chosen in enumerate(choices):
        part = slice(row, row + 1)
        for number, stage in zip(chosen, stages, strict=True):
            if number < len(stage.operations):
                stage.operations[number](images[part], part)
    return images


def _in_groups(images: Tensor, stages: list[Stage]) -> Tensor:
    """At each stage samples are sorted by their operation: it then works in place on a slice."""
    place = torch.arange(len(images))
    for choice, operations in stages:
        rows = choice.argsort()
        images = images.index_select(0, place[rows].to(images.device))
        place[rows] = torch.arange(len(rows))
        counts = torch.bincount(choice, minlength=len(operations)).tolist()
        start = 0
        for operation, count in zip(operations, counts, strict=False):
            part = slice(start, start + count)
            if count:
                operation(images[part], rows[part])
            start += count
    return images.index_select(0, place.to(images.device))


Views = tuple[Float32[Tensor, "batch channels size size"], ...]
"""Query and key, normalised; or a single view."""


def make_views(
    images: UInt8[Tensor, "batch channels height width"],
    ids: Int64[Tensor, " batch"],
    config: DataConfig,
    seed: int,
    epoch: int,
    views: int = 2,
) -> Views:
    """The views of images of one size, on their device; by (seed, epoch, id, view) alone."""
    height, width = (torch.full((views * len(ids),), side) for side in images.shape[2:])
    draws = draw_views(ids, seed, epoch, CROP_DRAWS, views)
    boxes = draw_crops(draws, height, width, config.min_scale)

    def crop(rows: slice) -> Tensor:
        numbers = torch.arange(views * len(ids))[rows] % len(ids)
        some = images.index_select(0, numbers.to(images.device))
        return resized_crops(some, CropBoxes(*(side[rows] for side in boxes)), config.image_size)

    return _coloured(crop, images.device, ids, config, seed, epoch, views)


def crop_views(
    images: Sequence[UInt8[Tensor, "channels _ _"]],
    ids: Int64[Tensor, " batch"],
    config: DataConfig,
    seed: int,
    epoch: int,
    views: int = 2,
) -> UInt8[Tensor, "{views} batch channels size size"]:
    """The first half of `make_views` for images of any size: a worker's part."""
    heights, widths = (torch.tensor([image.shape[side] for image in images]) for side in (1, 2))
    draws = draw_views(ids, seed, epoch, CROP_DRAWS, views)
    boxes = draw_crops(draws, heights.repeat(views), widths.repeat(views), config.min_scale)
    places = torch.stack(boxes, dim=1).unflatten(0, (views, -1)).transpose(0, 1).tolist()
    size = [config.image_size, config.image_size]
    crops = torch.empty(views, len(images), config.channels, *size, dtype=torch.uint8)
    for row, (image, own) in enumerate(zip(images, places, strict=True)):
        for view, (top, left, height, width) in enumerate(own):
            part = image[:, top : top + height, left : left + width]
            crops[view, row] = functional.resize(part, size)
    return crops


def colour_views(
    crops: UInt8[Tensor, "views batch channels size size"],
    ids: Int64[Tensor, " batch"],
    config: DataConfig,
    seed: int,
    epoch: int,
) -> Views:
    """The second half, for a batch of what `crop_views` gave."""
    flat = crops.flatten(0, 1)

    def crop(rows: slice) -> Tensor:
        return flat[rows].float().div_(255)

    return _coloured(crop, crops.device, ids, config, seed, epoch, len(crops))


def draw_views(
    ids: Int64[Tensor, " batch"], seed: int, epoch: int, number: int, views: int = 2
) -> Float64[Tensor, "{views}*batch number"]:
    """Random numbers of all query views, then of all key views."""
    return torch.cat([uniform(seed, epoch, ids, view, number) for view in range(views)])


def _coloured(
    crop: Callable[[slice], Tensor],
    device: torch.device,
    ids: Tensor,
    config: DataConfig,
    seed: int,
    epoch: int,
    views: int,
) -> Views:
    """Colours for all views at once; `crop` gives the views in these rows."""
    draws = draw_views(ids, seed, epoch, CROP_DRAWS + COLOUR_DRAWS, views)[:, CROP_DRAWS:]
    parameters = draw_colours(draws, config.augmentation, config.blur)
    mean, std = channel_statistics(config.channels)
    shape = config.channels, config.image_size, config.image_size
    piece = max(1, CACHED // math.prod(shape)) if device.type == "cpu" else len(draws)
    done = torch.empty(len(draws), *shape, device=device)
    for start in range(0, len(draws), piece):
        rows = slice(start, start + piece)
        some = ColourParameters(*(value[rows] for value in parameters))
        images = apply_colours(crop(rows), some, config.augmentation)
        done[rows] = normalise(images, mean, std)
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

    Images that already have this size stay as they are, as CIFAR's do.
    """
    height, width = image.shape[-2:]
    if height == width == size:
        return image
    longest = 4 * min(height, width)  # else a strip of 1 x 20000 pixels would fill the memory
    image = functional.center_crop(image, [min(height, longest), min(width, longest)])
    image = functional.resize(image, [round(size * 256 / 224)], antialias=True)
    cropped: Tensor = functional.center_crop(image, [size, size])
    return cropped
