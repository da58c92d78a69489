"""Views of images: random crops with changed colours, as in official MoCo-v1 and MoCo-v2.

Views have official MoCo's distribution, but not its pixels: rounding differs, and Pillow only
approximates a Gaussian blur. Every view has random numbers of its own, so that it depends on
nothing but (seed, epoch, image, view). Numbers are drawn first, then whole batches are transformed:
first the crops, then the colours, so that a worker process can crop the images that it has decoded
and a GPU can do the rest.

Views may be of several kinds: how many, how large, cut from how much of the image. MoCo has two of
one kind, SwAV has small ones beside them, PIRL one that it cuts into tiles. They are numbered
through all kinds, so that another kind leaves the views before it unchanged.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float32, Float64, Int64, UInt8
from torch import Tensor

from hardmix.data.colours import (
    COLOUR_DRAWS,
    ColourParameters,
    DeviceColours,
    adjust_brightness_,
    adjust_contrast_,
    adjust_hue_,
    adjust_saturation_,
    apply_colours_,
    blur_,
    channel_statistics,
    compiled_colours,
    draw_colours,
    flip_,
    graph_parameters,
    normalise,
    plan_colours,
    solarise_,
)
from hardmix.data.crops import CROP_DRAWS, CropBoxes, cut_crops, draw_crops, resized_crops
from hardmix.data.rand_augment import RAND_DRAWS, Operation, rand_stages
from hardmix.errors import InputError
from hardmix.runtime.device import send
from hardmix.runtime.random_numbers import uniform
from hardmix.settings.config import DataConfig
from hardmix.settings.named_choices import Augmentation

CACHED = 1 << 20
"""Numbers that a CPU works on at a time: within its cache it is two to three times as fast."""

ALONE = 1 << 16
"""Numbers in an image from which a CPU works on one image at a time."""

Crops = Sequence[UInt8[Tensor, "_ batch channels _ _"]]
"""Crops of each kind of view, to be coloured."""

Views = tuple[Float32[Tensor, "batch channels _ _"], ...]
"""Views in order, normalised: query and key, or those of all kinds."""


class ViewKind(NamedTuple):
    """Views that are made alike; None means the setting of data.*."""

    number: int = 1
    """Number of these views."""
    size: int | None = None
    """Height and width in pixels, instead of data.image_size."""
    scale: tuple[float, float] | None = None
    """Least and most area of a crop, as fractions of the image; otherwise data.min_scale to 1."""
    augmentation: Augmentation | None = None
    """Operations after the crop, instead of data.augmentation."""


def small_views(number: int, size: int) -> ViewKind:
    """Return the kind of SwAV's small crops, which cover 5 % to 14 % of an image."""
    return ViewKind(number, size, (0.05, 0.14))


class _Recipe(NamedTuple):
    """How the views of a kind are made."""

    config: DataConfig
    views: int
    first: int
    """Number of the kind's first view among all views."""
    max_scale: float


class ViewMaker:
    """Makes the views of all kinds, as a function of (seed, epoch, image, view) alone."""

    def __init__(
        self, kinds: Sequence[ViewKind], config: DataConfig, seed: int, compiled: bool = False
    ) -> None:
        self.config, self.seed, self.compiled = config, seed, compiled
        self.number = sum(kind.number for kind in kinds)
        self._recipes = [
            _recipe(kind, config, sum(before.number for before in kinds[:place]))
            for place, kind in enumerate(kinds)
            if kind.number
        ]

    def coloured_on(self, device: torch.device) -> torch.device:
        """Return where colours are changed if this device trains: RandAugment runs on CPUs only."""
        return torch.device("cpu") if self.config.augmentation == "infomin" else device

    def batch_bytes(self, images: int, device: torch.device) -> int:
        """Return the bytes of a batch that a worker sends for training on this device."""
        pixels = sum(each.views * each.config.image_size**2 for each in self._recipes)
        item = 4 if self.coloured_on(device).type == "cpu" else 1
        return images * self.config.channels * pixels * item

    def make(
        self,
        images: UInt8[Tensor, "batch channels height width"],
        ids: Int64[Tensor, " batch"],
        epoch: int,
        sizes: Sequence[Int64[Tensor, " batch"]] | None = None,
    ) -> Views:
        """Return the views of images, on their device.

        `sizes` are heights and widths of images that are smaller than the tensor.
        """
        kinds = (
            make_views(
                images,
                ids,
                each.config,
                self.seed,
                epoch,
                *each[1:],
                compiled=self.compiled,
                sizes=sizes,
            )
            for each in self._recipes
        )
        return tuple(view for views in kinds for view in views)

    def crop(
        self,
        images: Sequence[Tensor] | UInt8[Tensor, "batch channels height width"],
        ids: Int64[Tensor, " batch"],
        epoch: int,
    ) -> Crops:
        """Do the first half of `make` for images of any size: a worker's part."""
        return [
            crop_views(images, ids, each.config, self.seed, epoch, *each[1:])
            for each in self._recipes
        ]

    def colour(
        self,
        crops: Crops,
        ids: Int64[Tensor, " batch"],
        epoch: int,
        out: Sequence[Float32[Tensor, "_ batch channels _ _"] | None] | None = None,
    ) -> Views:
        """Do the second half, for the result of `crop`, and write the views to `out` if given."""
        places = out or [None] * len(crops)
        kinds = (
            colour_views(
                crop,
                ids,
                each.config,
                self.seed,
                epoch,
                place,
                first=each.first,
                compiled=self.compiled,
            )
            for crop, each, place in zip(crops, self._recipes, places, strict=True)
        )
        return tuple(view for views in kinds for view in views)


def _recipe(kind: ViewKind, config: DataConfig, first: int) -> _Recipe:
    min_scale, max_scale = kind.scale or (config.min_scale, 1.0)
    own = replace(
        config,
        image_size=kind.size or config.image_size,
        min_scale=min_scale,
        augmentation=kind.augmentation or config.augmentation,
    )
    return _Recipe(own, kind.number, first, max_scale)


def usual_views(number: int, augmentation: Augmentation | None = None) -> tuple[ViewKind, ...]:
    """Return the kinds of a method whose views all follow data.*.

    With BYOL's augmentation, the second of two views is made in another way than the first.
    """
    if number == 2 and augmentation == "byol":
        return ViewKind(), ViewKind(augmentation="byol-second")
    return (ViewKind(number),)


def check_own_pipelines(kinds: Sequence[ViewKind]) -> None:
    """Raise InputError if views of these kinds cannot come from data.views."""
    if any(kind != ViewKind(kind.number) for kind in kinds):
        sizes = ", ".join(f"{kind.number} of {kind.size or 'data.image_size'} px" for kind in kinds)
        raise InputError(
            f"data.views makes views of one size, but this method needs {sizes}: leave data.views"
            " unset, or choose another method."
        )


def make_views(
    images: UInt8[Tensor, "batch channels height width"],
    ids: Int64[Tensor, " batch"],
    config: DataConfig,
    seed: int,
    epoch: int,
    views: int = 2,
    first: int = 0,
    max_scale: float = 1.0,
    compiled: bool = False,
    sizes: Sequence[Int64[Tensor, " batch"]] | None = None,
) -> Views:
    """Return views of images, on their device.

    Args:
        images: the images.
        ids: their numbers.
        config: settings of crops and colours.
        seed: seed of the views.
        epoch: the epoch.
        views: number of views.
        first: number of the first view.
        max_scale: most area of a crop, as a fraction of the image.
        compiled: whether a GPU's colours are compiled.
        sizes: heights and widths of images that are smaller than the tensor; None if none is.
    """
    sides = sizes or [torch.full((len(ids),), side) for side in images.shape[2:]]
    height, width = (side.repeat(views) for side in sides)
    draws = draw_views(ids, seed, epoch, CROP_DRAWS, views, first)
    boxes = draw_crops(draws, height, width, config.min_scale, max_scale)
    draws = _colour_draws(ids, config, seed, epoch, views, first)
    if compiled and _compiles(config, images.device):
        columns = torch.cat([torch.stack(boxes, dim=1).float(), _for_graph(draws, config)], dim=1)
        sent, sources = send(columns, images.device), images.repeat(views, 1, 1, 1)
        crops = resized_crops(sources, CropBoxes(*sent[:, :4].unbind(dim=1)), config.image_size)
        return compiled_colours()(crops, sent[:, 4:], config.augmentation).chunk(views)
    if images.device.type != "cpu":
        plan = _plan(draws, config, images.device, torch.stack(boxes, dim=1))
        sources = images.index_select(0, plan.source.remainder(len(ids)))
        crops = resized_crops(sources, CropBoxes(*plan.more.unbind(dim=1)), config.image_size)
        return _coloured_on_device(crops, plan, config, views)

    def crop(rows: slice) -> Tensor:
        sources = images.index_select(0, torch.arange(views * len(ids))[rows] % len(ids))
        return resized_crops(sources, CropBoxes(*(side[rows] for side in boxes)), config.image_size)

    return _coloured_on_cpu(crop, draws, config, views)


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
    """Do the first half of `make_views` for images of any size: a worker's part."""
    sides = [images.shape[2:]] if isinstance(images, Tensor) else [i.shape[1:] for i in images]
    heights, widths = torch.tensor(sides).expand(len(images), 2).T
    draws = draw_views(ids, seed, epoch, CROP_DRAWS, views, first)
    sides_of_all = heights.repeat(views), widths.repeat(views)
    boxes = draw_crops(draws, *sides_of_all, config.min_scale, max_scale)
    return cut_crops(images, boxes, config.image_size)


def colour_views(
    crops: UInt8[Tensor, "views batch channels size size"],
    ids: Int64[Tensor, " batch"],
    config: DataConfig,
    seed: int,
    epoch: int,
    out: Float32[Tensor, "views batch channels size size"] | None = None,
    first: int = 0,
    compiled: bool = False,
) -> Views:
    """Do the second half, for the result of `crop_views`, and write it to `out` if given."""
    flat = crops.flatten(0, 1)
    draws = _colour_draws(ids, config, seed, epoch, len(crops), first)
    if compiled and _compiles(config, crops.device):
        parameters = send(_for_graph(draws, config), crops.device)
        return compiled_colours()(flat, parameters, config.augmentation).chunk(len(crops))
    if crops.device.type != "cpu":
        plan = _plan(draws, config, crops.device, torch.empty(len(draws), 0))
        pixels = flat.index_select(0, plan.source).float().div_(255)
        return _coloured_on_device(pixels, plan, config, len(crops))

    # The same memory is used for every piece, so that it stays in the processor's cache.
    floats = torch.empty(min(len(flat), _piece(flat.shape[1:])), *flat.shape[1:])

    def crop(rows: slice) -> Tensor:
        pixels = flat[rows]
        return floats[: len(pixels)].copy_(pixels).div_(255)

    return _coloured_on_cpu(crop, draws, config, len(crops), out)


def draw_views(
    ids: Int64[Tensor, " batch"],
    seed: int,
    epoch: int,
    number: int,
    views: int = 2,
    first: int = 0,
    column: int = 0,
) -> Float64[Tensor, "{views}*batch number"]:
    """Draw `number` random numbers, from `column` on, for all queries and then for all keys.

    `views` and `first` are the number of views, and the number of the first view.
    """
    numbers = range(first, first + views)
    return torch.cat([uniform(seed, epoch, ids, view, number, column) for view in numbers])


def _colour_draws(
    ids: Tensor, config: DataConfig, seed: int, epoch: int, views: int, first: int
) -> Float64[Tensor, "rows draws"]:
    """Draw the random numbers of colours, which follow those of crops."""
    number = COLOUR_DRAWS + (RAND_DRAWS if config.augmentation == "infomin" else 0)
    return draw_views(ids, seed, epoch, number, views, first, column=CROP_DRAWS)


def _parameters(draws: Tensor, config: DataConfig) -> ColourParameters:
    colours = draws[:, :COLOUR_DRAWS]
    return draw_colours(colours, config.augmentation, config.blur, config.colour_strength)


def _plan(draws: Tensor, config: DataConfig, device: torch.device, more: Tensor) -> DeviceColours:
    return plan_colours(_parameters(draws, config), config.channels, device, more.float())


def _compiles(config: DataConfig, device: torch.device) -> bool:
    """Return whether colours can be compiled: on a GPU, for three channels."""
    return device.type != "cpu" and config.channels == 3


def _for_graph(draws: Tensor, config: DataConfig) -> Tensor:
    """Return the parameters of `colours_at_once`."""
    return graph_parameters(_parameters(draws, config))


def _coloured_on_device(
    crops: Tensor, plan: DeviceColours, config: DataConfig, views: int
) -> Views:
    """Colour crops in the order of the plan, and return them in their own order."""
    coloured = apply_colours_(crops, plan, config.augmentation)
    normalised = normalise(coloured, *channel_statistics(config.channels), out=coloured)
    return normalised.index_select(0, plan.place).chunk(views)


def _coloured_on_cpu(
    crop: Callable[[slice], Tensor],
    draws: Tensor,
    config: DataConfig,
    views: int,
    out: Tensor | None = None,
) -> Views:
    """Colour all views, piece by piece; `crop` returns the crops in these rows."""
    rand = draws[:, COLOUR_DRAWS:]
    stages = colour_stages(_parameters(draws, config), config.augmentation, config.channels, rand)
    mean, std = channel_statistics(config.channels)
    shape = config.channels, config.image_size, config.image_size
    piece = _piece(shape)
    coloured = torch.empty(len(draws), *shape) if out is None else out.flatten(0, 1)
    for start in range(0, len(draws), piece):
        rows = slice(start, start + piece)
        crops = crop(rows)
        apply_stages_(stages, crops, start)
        normalise(crops, mean, std, out=coloured[rows])
    return coloured.chunk(views)


def _piece(shape: Sequence[int]) -> int:
    """Return the number of images of this shape that are worked on at a time on a CPU."""
    numbers = math.prod(shape)
    return 1 if numbers >= ALONE else max(1, CACHED // numbers)


class Stage(NamedTuple):
    """A step of the colours: each sample goes through one of these operations, or through none."""

    choice: Int64[Tensor, " batch"]
    """Index of the sample's operation; none if there is no such operation."""
    operations: list[Operation]


def colour_stages(
    parameters: ColourParameters,
    augmentation: Augmentation,
    channels: int,
    rand: Float64[Tensor, "batch draws"] | None = None,
) -> list[Stage]:
    """Return official MoCo's operations after the crop, in their order, for a CPU.

    v1: grey, jitter, flip; v2: jitter, grey, blur, flip, and BYOL's second views are solarised
    before the flip. Images without three channels have no
    saturation, hue or grey, but brightness and contrast. `rand` has the random numbers of InfoMin's
    two operations of RandAugment.
    """

    def adjust(operation: Callable[[Tensor, Tensor], None], factor: Tensor) -> Operation:
        return lambda images, rows: operation(images, factor[rows])

    p = parameters
    adjustments = [
        adjust(adjust_brightness_, p.brightness),
        adjust(adjust_contrast_, p.contrast),
        adjust(adjust_saturation_, p.saturation),
        adjust(adjust_hue_, p.hue),
    ][: 4 if channels == 3 else 2]
    jitter = [Stage(torch.where(p.jitter, turn, 4), adjustments) for turn in p.order.T]
    unsaturate = adjust(adjust_saturation_, torch.zeros_like(p.saturation))
    grey = [Stage((~p.grey).long(), [unsaturate])] if channels == 3 else []
    blur = Stage((p.sigma == 0).long(), [adjust(blur_, p.sigma)])
    flip = Stage((~p.flip).long(), [lambda images, _: flip_(images)])
    solarise = Stage((~p.solarise).long(), [lambda images, _: solarise_(images)])
    orders = {
        "moco-v1": [*grey, *jitter, flip],
        "moco-v2": [*jitter, *grey, blur, flip],
        "simclr": [*jitter, *grey, blur, flip],
        "byol": [*jitter, *grey, blur, flip],
        "byol-second": [*jitter, *grey, blur, solarise, flip],
        "plain": [flip],
    }
    if augmentation == "infomin":
        assert rand is not None
        return [*jitter, blur, *(Stage(*stage) for stage in rand_stages(rand)), *grey, flip]
    return orders[augmentation]


def apply_stages_(
    stages: list[Stage], images: Float32[Tensor, "piece channels size size"], first: int
) -> None:
    """Colour the samples from row `first` of the stages on, in place."""
    whole = slice(first, first + len(images))
    for choices, operations in stages:
        choice = choices[whole]
        numbers = set(choice.tolist())
        for number in numbers & set(range(len(operations))):
            if len(numbers) == 1:
                operations[number](images, whole)
                continue
            rows = (choice == number).nonzero()[:, 0]
            samples = images.index_select(0, rows)
            operations[number](samples, rows + first)
            images.index_copy_(0, rows, samples)
