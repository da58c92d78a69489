"""Colours of views: how they are drawn, and the operations of MoCo's augmentations on batches.

Axes: batch, channels, height, width. Images are float in [0, 1], each with parameters of its own; a
trailing underscore means that they are changed in place. Each operation equals its namesake in
torchvision.transforms.v2.functional on float images.

A CPU applies one operation after the other, to the samples that have it (views.py). A GPU would
wait for the many launches, so `apply_colours_` does the same, to rounding, in few. A CPU could use
it too, but its views would have other bits, and take longer. `colours_at_once` is a third way, for
torch.compile: every sample takes every operation, with factors that change nothing where it has
none.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Float32, Float64, Int64, UInt8
from torch import Tensor
from torch.nn.functional import pad

from hardmix.runtime.device import send
from hardmix.settings.named_choices import Augmentation

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Statistics of ImageNet's red, green and blue, as in official MoCo, used for all colour images."""

LUMA = (0.2989, 0.587, 0.114)
"""Shares of red, green and blue in grey, as in torchvision and Pillow."""

COLOUR_DRAWS = 13
"""Random numbers of a view's colours; they follow those of its crop."""

JITTERS: dict[Augmentation, tuple[float, float]] = {
    "moco-v2": (0.4, 0.1),
    "simclr": (0.8, 0.2),
    "infomin": (0.8, 0.2),
    "byol": (0.4, 0.1),
    "byol-second": (0.4, 0.1),
}
"""Augmentations that jitter four of five views, make one of five grey and blur some: strength of
brightness, contrast and saturation, and of hue."""

SATURATIONS: dict[Augmentation, float] = {"byol": 0.5, "byol-second": 0.5}
"""Strength of saturation as a share of that of brightness, unless it is 1."""

BLURS: dict[Augmentation, float] = {"byol": 1.0, "byol-second": 0.1}
"""Share of the views that are blurred, unless it is a half."""

SOLARISED, BRIGHT = 0.2, 0.5
"""Share of the views of byol-second that are solarised, and the value from which they are inverted:
the authors' 128 of 255, halfway to 127, where rounding makes no difference."""

USUAL_ORDER: tuple[Augmentation, ...] = ("moco-v2", "simclr", "byol", "byol-second")
"""Augmentations whose order is jitter, grey, blur, solarisation and flip."""

BLUR_RADIUS = 8
"""Radius of a blur in pixels: four of the largest sigma, with 0.99994 of its weight."""

LEAST_WEIGHT = 1e-12
"""Smallest weight of a pixel in a blur; smaller ones cannot be seen in a float32 sum."""

_TILE = 32
"""Most pixels of a line that are blurred by one matrix."""

HUE = 3
"""Number of the hue in `ColourParameters.order`; the three below it are affine."""

TURNS = 3
"""Most affine operations of a sample before its hue, and after it."""

Images = Float32[Tensor, "batch channels height width"]
Factor = Float32[Tensor, " batch"]


class ColourParameters(NamedTuple):
    """Changes to the colours of each view; on the CPU, as choosing rows must not wait.

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
    """Width of the blur in pixels; 0 for none."""
    flip: Bool[Tensor, " batch"]
    solarise: Bool[Tensor, " batch"]


def draw_colours(
    draws: Float64[Tensor, f"batch {COLOUR_DRAWS}"],
    augmentation: Augmentation,
    blur: bool,
    strength: float = 1.0,
) -> ColourParameters:
    """Draw official MoCo's colours; "plain" has only the flip, as in evaluations that train.

    v1: grey 0.2; ColorJitter(0.4, 0.4, 0.4, 0.4) always; flip 0.5.
    v2: ColorJitter(0.4, 0.4, 0.4, 0.1) 0.8; grey 0.2; blur of sigma U(0.1, 2) 0.5; flip 0.5.
    simclr and infomin: as v2, with ColorJitter(0.8, 0.8, 0.8, 0.2).
    byol: as v2, with ColorJitter(0.4, 0.4, 0.2, 0.1) and blur 1.0; byol-second: with blur 0.1 and
    solarisation 0.2.
    `strength` multiplies the ranges of the jitter and the probabilities of grey and solarisation.
    """
    second, plain = augmentation in JITTERS, augmentation == "plain"
    width, turn = (strength * reach for reach in JITTERS.get(augmentation, (0.4, 0.4)))
    reaches = width, width, width * SATURATIONS.get(augmentation, 1.0)
    brightness, contrast, saturation = (
        (1 - reach + 2 * reach * draw).float()
        for reach, draw in zip(reaches, draws[:, 4:7].T, strict=True)
    )
    hue = turn * (2 * draws[:, 7] - 1)
    share = BLURS.get(augmentation, 0.5)
    chances = draws.new_tensor([0.8, 0.2 * strength, share, 0.5])
    jitter, grey, blurred, flip = (draws[:, 8:12] < chances).T
    # Within either side of the decision on the blur, its random number is uniform: it serves again.
    rest = torch.where(blurred, draws[:, 10] / share, (draws[:, 10] - share) / (1 - share + 1e-12))
    solarise = (rest < SOLARISED * strength) & (augmentation == "byol-second")
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
        solarise=solarise,
    )


def adjust_brightness_(images: Images, factor: Factor) -> None:
    """Multiply by `factor`."""
    images.mul_(_per_image(factor)).clamp_(0, 1)


def adjust_contrast_(images: Images, factor: Factor) -> None:
    """Move away from the mean of the grey image, or of all channels if they are not three."""
    # Rows first: one sum over both axes would depend on the threads when the batch is one image.
    means = images.mean(dim=3).mean(dim=2)
    shares = means.new_tensor(LUMA) if images.shape[1] == 3 else 1 / images.shape[1]
    grey = (means * shares).sum(dim=1)
    images.mul_(_per_image(factor)).add_(_per_image(grey * (1 - factor))).clamp_(0, 1)


def adjust_saturation_(images: Images, factor: Factor) -> None:
    """Move every pixel away from its grey; a factor of 0 makes it grey."""
    images.lerp_(_grey_of(images), _per_image(1 - factor)).clamp_(0, 1)


def adjust_hue_(images: Images, factor: Factor) -> None:
    """Turn the colour circle by `factor` of a whole turn, without a branch for each sixth of it.

    In sixths, a colour is 1 + (green + blue - red - least) / range away from red, towards green or
    blue, whichever is more; and each primary fades over one sixth, two sixths away from itself.
    This is written with as few passes over the pixels as possible, because they take the time.
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
    """Blur by a Gaussian with reflected borders; the kernel reaches `blur_radius` pixels.

    This is a true Gaussian, which official MoCo's Pillow approximates by boxes, repeating the
    border. As in `resized_crops`, one matrix serves the rows and one the columns. They would be
    zero far from the diagonal, so lines are blurred in tiles, and a small matrix serves all tiles.
    """
    height, width = images.shape[2:]
    across = _gaussian_band(sigma, width)
    down = across if height == width else _gaussian_band(sigma, height)
    tiles = _padded_tiles(images, axis=3).flatten(1, 3)
    narrow = torch.bmm(tiles, across.mT)
    narrow = narrow.view(*images.shape[:3], -1)[..., :width]
    tiles = _padded_tiles(narrow, axis=2).mT
    blurred = torch.matmul(down[:, None, None], tiles)
    images.copy_(blurred.flatten(2, 3)[:, :, :height])


def _padded_tiles(images: Images, axis: int) -> Float32[Tensor, "batch channels lines tiles reach"]:
    """Return the pixels that each tile's blur reads; the last tile may end outside the image."""
    size = images.shape[axis]
    radius, tile = blur_radius(size), _tile(size)
    borders = [radius, radius + -size % tile]
    padded = pad(images, [*borders, 0, 0] if axis == 3 else [0, 0, *borders], mode="reflect")
    return padded.unfold(axis, tile + 2 * radius, tile)


def _gaussian_band(sigma: Factor, size: int) -> Float32[Tensor, "batch tile reach"]:
    """Return the weight of each pixel that a tile reads in each of its blurred pixels."""
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
    """Return the size of a tile, at most _TILE, that leaves few pixels outside the image."""
    return math.ceil(size / math.ceil(size / _TILE))


def blur_radius(size: int) -> int:
    """Return BLUR_RADIUS, or less if the kernel would exceed the image."""
    return min(BLUR_RADIUS, (size - 1) // 2)


def flip_(images: Images) -> None:
    """Exchange left and right."""
    images.copy_(images.flip(-1))


def solarise_(images: Images) -> None:
    """Invert the bright values."""
    torch.where(images >= BRIGHT, 1 - images, images, out=images)


def normalise(
    images: Images, mean: tuple[float, ...], std: tuple[float, ...], out: Images | None = None
) -> Float32[Tensor, "batch channels height width"]:
    """Return (images - mean) / std, channel by channel.

    With `out`, which may be `images`, the images are overwritten, so that memory which is not in
    the cache is written only once.
    """
    shift, scale = _constant(mean, images.device), _constant(std, images.device)
    if out is None:
        return torch.sub(images, shift).div_(scale)
    return torch.div(images.sub_(shift), scale, out=out)


def channel_statistics(channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and deviation of `normalise`: ImageNet's, or 0.5 and 0.25 without colours."""
    if channels == 3:
        return IMAGENET_MEAN, IMAGENET_STD
    return (0.5,) * channels, (0.25,) * channels


@cache
def _constant(values: tuple[float, ...], device: torch.device) -> Float32[Tensor, "channels 1 1"]:
    """Return a number for each channel, which is sent to a device only once."""
    return send(torch.tensor(values).view(-1, 1, 1), device)


def _per_image(values: Float[Tensor, " batch"]) -> Float[Tensor, "batch 1 1 1"]:
    return values.view(-1, 1, 1, 1)


def _grey_of(images: Images) -> Float32[Tensor, "batch 1 height width"]:
    red, green, blue = images.unbind(dim=1)
    return red.mul(LUMA[0]).add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2]).unsqueeze(1)


class DeviceColours(NamedTuple):
    """The colours of a batch on a GPU, sorted and sent in one copy.

    Brightness, contrast and saturation are affine in a pixel's channels, so one matrix product does
    whichever of them a sample has at its turn. A sample has at most three before its hue is turned
    and the others after it. Samples are sorted by how many come before, so that each launch works
    on a slice of the batch.
    """

    source: Int64[Tensor, " batch"]
    """Original place of each sorted sample."""
    place: Int64[Tensor, " batch"]
    """Sorted place of each original sample."""
    blurred: Int64[Tensor, " blurred"]
    sigma: Float32[Tensor, " blurred"]
    affine: Float32[Tensor, "3 {2*TURNS} batch"]
    """For each turn, the factor, the share of the pixel's grey, and that of the image's grey."""
    hue: Float32[Tensor, " batch"]
    """The factor plus one turn, so that it is positive."""
    grey: Float32[Tensor, " batch"]
    """1 for samples that become grey, otherwise 0."""
    flip: Float32[Tensor, " batch"]
    solarise: Float32[Tensor, " batch"]
    more: Float32[Tensor, "batch columns"]
    """Further columns of the caller, sorted."""
    before: list[int]
    """Numbers of samples, from the first on, with a first, second, third turn before their hue."""
    jittered: int
    """Number of samples that are jittered at all: the first ones."""
    after: list[int]
    """First samples that have a first, second, third turn after their hue."""


def plan_colours(
    p: ColourParameters, channels: int, device: torch.device, more: Float32[Tensor, "batch columns"]
) -> DeviceColours:
    """Sort the samples, and send everything about them in one copy that does not wait."""
    first = p.order.argsort(dim=1)[:, HUE] if channels == 3 else torch.zeros_like(p.order[:, 0])
    first = torch.where(p.jitter, first, -1)
    source = first.argsort(dim=0, descending=True, stable=True)
    p, first = ColourParameters(*(each[source] for each in p)), first[source]
    blurred = (p.sigma > 0).nonzero()[:, 0]
    numbers = torch.cat([source, source.argsort(), blurred])
    floats = [_affine(p, first, channels), 1 + p.hue]
    floats += [each.float() for each in (p.grey, p.flip, p.solarise)]
    parts = [numbers.view(torch.float32), p.sigma[blurred], *floats, more[source]]
    sent = send(torch.cat([part.flatten() for part in parts]), device)
    n, size = len(source), 2 * numbers.numel()
    source, place, blurred = sent[:size].view(torch.int64).split([n, n, len(blurred)])
    rest = sent[size:].split([len(blurred), 6 * TURNS * n, n, n, n, n, more.numel()])
    jittered = int((first >= 0).sum())
    after = [int((first >= TURNS - turn).sum()) for turn in range(TURNS)]
    sigma, affine, hue, grey, flip, solarise, along = rest
    return DeviceColours(
        source=source,
        place=place,
        blurred=blurred,
        sigma=sigma,
        affine=affine.view(3, 2 * TURNS, n),
        hue=hue,
        grey=grey,
        flip=flip,
        solarise=solarise,
        more=along.view(n, more.shape[1]),
        before=[int((first > turn).sum()) for turn in range(TURNS)],
        jittered=jittered,
        after=after if channels == 3 else [0, 0, jittered],
    )


def _affine(p: ColourParameters, first: Tensor, channels: int) -> Tensor:
    """Return the factors and shares of grey of each turn: those before the hue, then after it."""
    order = p.order
    if channels != 3:  # brightness and contrast alone, in their order
        order = order[order < 2].view(-1, 2)
        first = torch.full_like(first, -1)
    none = torch.zeros_like(p.contrast)
    factor = torch.stack([p.brightness, p.contrast, p.saturation, none + 1], dim=1)
    pixel = torch.stack([none, none, 1 - p.saturation, none], dim=1)
    whole = torch.stack([none, 1 - p.contrast, none, none], dim=1)
    turn = torch.arange(TURNS)
    places = torch.cat([turn.expand(len(order), -1), first[:, None] + 1 + turn], dim=1)
    operations = order.gather(1, places.clamp(max=order.shape[1] - 1))
    return torch.stack([each.gather(1, operations).T for each in (factor, pixel, whole)])


@cache
def _shares(channels: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the identity, and a matrix that gives every channel the pixel's grey."""
    luma = LUMA if channels == 3 else (1 / channels,) * channels
    grey = torch.tensor(luma).expand(channels, channels)
    return send(torch.eye(channels), device), send(grey.contiguous(), device)


def apply_colours_(images: Images, plan: DeviceColours, augmentation: Augmentation) -> Images:
    """Colour sorted images in official MoCo's order, as `views.colour_stages` does on a CPU."""
    if augmentation == "moco-v1":
        _make_grey_(images, plan)
    if augmentation != "plain":
        _jitter_(images, plan)
    if augmentation in USUAL_ORDER:
        _make_grey_(images, plan)
        _blur_some_(images, plan)
    if augmentation == "byol-second":
        inverted = (plan.solarise.view(-1, 1, 1, 1) > 0) & (images >= BRIGHT)
        images = torch.where(inverted, 1 - images, images)
    flip = plan.flip.view(-1, 1, 1, 1) > 0
    return torch.where(flip, images.flip(-1), images)


def _jitter_(images: Images, plan: DeviceColours) -> None:
    identity, grey = _shares(images.shape[1], images.device)
    factor, pixel, whole = plan.affine[..., None, None]
    matrices = torch.addcmul(factor * identity, pixel, grey)
    to_mean = whole * grey[:1]
    for turn in range(TURNS):
        rows = slice(0, plan.before[turn])
        _apply_affine_(images[rows], matrices[turn, rows], to_mean[turn, rows])
    if images.shape[1] == 3:
        _turn_hue_(images[: plan.jittered], plan.hue[: plan.jittered])
    for turn in range(TURNS):
        rows = slice(plan.after[turn], plan.jittered)
        _apply_affine_(images[rows], matrices[TURNS + turn, rows], to_mean[TURNS + turn, rows])


def _apply_affine_(images: Images, matrices: Tensor, to_mean: Tensor) -> None:
    """Change brightness, contrast or saturation of each image, all in one product."""
    if len(images):
        pixels = images.flatten(2)
        shift = torch.bmm(to_mean, pixels.mean(dim=2, keepdim=True))
        torch.clamp(torch.baddbmm(shift, matrices, pixels), 0, 1, out=pixels)


def _turn_hue_(images: Images, hue: Float32[Tensor, " batch"]) -> None:
    """Turn the hue as `adjust_hue_` does, for all three channels at once."""
    if len(images) == 0:
        return
    opposite, sixths, base = (
        _constant(values, images.device)
        for values in ((3 / 6, 2 / 6, 4 / 6), (6.0, -6.0, -6.0), (-1.0, 2.0, 2.0))
    )
    red, green, blue = images.unbind(dim=1)
    least, most = images.aminmax(dim=1)
    spread = most.sub_(least)
    angle = (green + blue).sub_(red).sub_(least).div_(spread.mul(6).add_(1e-12)).add_(1 / 6)
    angle.copysign_(green - blue).add_(hue.view(-1, 1, 1)).frac_()
    fade = (angle.unsqueeze(1) - opposite).abs_().clamp_(1 / 6, 2 / 6)
    fade = torch.addcmul(base, sixths, fade)
    torch.addcmul(least.unsqueeze(1), spread.unsqueeze(1), fade, out=images)


def _make_grey_(images: Images, plan: DeviceColours) -> None:
    if images.shape[1] == 3:
        images.lerp_(_grey_of(images), plan.grey.view(-1, 1, 1, 1))


def _blur_some_(images: Images, plan: DeviceColours) -> None:
    if len(plan.blurred):
        samples = images.index_select(0, plan.blurred)
        blur_(samples, plan.sigma)
        images.index_copy_(0, plan.blurred, samples)


# -- as one graph


Planes = tuple[Tensor, Tensor, Tensor]
"""Red, green and blue, each (batch, height, width): a hue reads all three."""

GRAPH_TURNS = 3
"""Operations of a sample before its contrast, and after it, at most."""

CONTRAST = 1
"""Number of the contrast in `ColourParameters.order`: the only operation that reads a whole
image."""


def graph_parameters(
    p: ColourParameters,
) -> Float32[Tensor, f"batch {3 * 2 * GRAPH_TURNS + 5}"]:
    """Return what `colours_at_once` needs of each sample, to be sent in one copy.

    Three turns before the contrast and three after it, each with factors of brightness, saturation
    and hue; then contrast, grey, sigma, flip and solarisation.
    """
    turn = torch.arange(4)
    place = (p.order == CONTRAST).long().argmax(dim=1, keepdim=True)
    columns: list[Tensor] = []
    for now in (p.jitter[:, None] & (turn < place), p.jitter[:, None] & (turn > place)):
        places = turn[:GRAPH_TURNS] if not columns else turn[1:]
        for factor, number, nothing in (
            (p.brightness, 0, 1.0),
            (p.saturation, 2, 1.0),
            (p.hue, HUE, 0.0),
        ):
            chosen = now[:, places] & (p.order[:, places] == number)
            columns.append(torch.where(chosen, factor[:, None], nothing))
    contrast = torch.where(p.jitter, p.contrast, 1.0)
    rest = [contrast, p.grey.float(), p.sigma, p.flip.float(), p.solarise.float()]
    return torch.cat([*columns, torch.stack(rest, dim=1)], dim=1)


def colours_at_once(
    images: UInt8[Tensor, "batch 3 size size"] | Images,
    parameters: Float32[Tensor, "batch columns"],
    augmentation: Augmentation,
) -> Images:
    """Return images coloured and normalised, in few passes over the pixels once it is compiled.

    The order is that of `apply_colours_`, but a flip may come first, and a blur last.
    """
    turns, rest = parameters[:, :-5].view(len(parameters), 2, 3, GRAPH_TURNS), parameters[:, -5:]
    contrast, grey, sigma, flip, solarise = (column.view(-1, 1, 1) for column in rest.unbind(dim=1))
    pixels = images if images.is_floating_point() else images.float() / 255
    pixels = torch.where(flip[:, None] > 0, pixels.flip(-1), pixels)
    red, green, blue = pixels.unbind(dim=1)
    planes = red, green, blue
    if augmentation == "moco-v1":
        planes = _saturated(planes, 1 - grey)
    if augmentation != "plain":
        planes = _turned(planes, turns[:, 0])
        whole = _luma(planes).mean(dim=(1, 2), keepdim=True)
        planes = _each(planes, lambda plane: contrast * plane + (1 - contrast) * whole)
        planes = _turned(planes, turns[:, 1])
    if augmentation in USUAL_ORDER:
        planes = _saturated(planes, 1 - grey)
    if augmentation == "byol-second":  # the blur comes before what is not linear
        red, green, blue = _blurred(torch.stack(planes, dim=1), sigma.view(-1, 1)).unbind(dim=1)
        planes = _solarised((red, green, blue), solarise)
    statistics = zip(planes, IMAGENET_MEAN, IMAGENET_STD, strict=True)
    coloured = torch.stack([(plane - mean) / std for plane, mean, std in statistics], dim=1)
    if augmentation in USUAL_ORDER and augmentation != "byol-second":  # its weights add up to 1
        coloured = _blurred(coloured, sigma.view(-1, 1))
    return coloured


def _turned(planes: Planes, turns: Float32[Tensor, "batch 3 turns"]) -> Planes:
    """Change brightness, saturation and hue, turn by turn; in a turn, at most one is changed."""
    for turn in range(GRAPH_TURNS):
        brightness, saturation, hue = (
            column.view(-1, 1, 1) for column in turns[..., turn].unbind(dim=1)
        )
        planes = _each(planes, partial(torch.mul, brightness))
        planes = _with_hue(_saturated(planes, saturation), hue)
    return planes


def _each(planes: Planes, change: Callable[[Tensor], Tensor]) -> Planes:
    red, green, blue = (change(plane).clamp(0, 1) for plane in planes)
    return red, green, blue


def _luma(planes: Planes) -> Tensor:
    red, green, blue = planes
    return LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue


def _saturated(planes: Planes, factor: Tensor) -> Planes:
    grey = _luma(planes)
    return _each(planes, lambda plane: grey + factor * (plane - grey))


def _solarised(planes: Planes, chosen: Tensor) -> Planes:
    return _each(
        planes, lambda plane: torch.where((chosen > 0) & (plane >= BRIGHT), 1 - plane, plane)
    )


def _with_hue(planes: Planes, factor: Tensor) -> Planes:
    """Turn the colour circle as `adjust_hue_` does."""
    red, green, blue = planes
    least = torch.minimum(torch.minimum(red, green), blue)
    spread = torch.maximum(torch.maximum(red, green), blue) - least
    angle = (green + blue - red - least) / (6 * spread + 1e-12) + 1 / 6
    angle = torch.where(green >= blue, angle, -angle) + factor + 1
    angle = angle - angle.floor()

    def faded(opposite: int, sign: int, base: Tensor) -> Tensor:
        return base + sign * 6 * spread * (angle - opposite / 6).abs().clamp(1 / 6, 2 / 6)

    high = least + 2 * spread
    return faded(3, 1, least - spread), faded(2, -1, high), faded(4, -1, high)


def _blurred(images: Images, sigma: Float32[Tensor, "batch 1"]) -> Images:
    """Blur as `blur_` does, by sums over shifted images, which a compiler makes one pass each."""
    radius = blur_radius(images.shape[-1])
    offset = torch.arange(-radius, radius + 1, device=images.device)
    kernel = torch.softmax(-0.5 * (offset / sigma.clamp(min=1e-3)) ** 2, dim=1)
    weights = kernel.view(len(images), 1, 1, 1, -1)
    for borders, axis in (([radius, radius, 0, 0], 3), ([0, 0, radius, radius], 2)):
        padded, size = pad(images, borders, mode="reflect"), images.shape[axis]
        shifted = (padded.narrow(axis, start, size) for start in range(2 * radius + 1))
        images = sum(
            (weights[..., place] * each for place, each in enumerate(shifted)),
            start=torch.zeros_like(images),
        )
    return images


@cache
def compiled_colours() -> Callable[[Tensor, Tensor, Augmentation], Tensor]:
    """Return `colours_at_once`, compiled for each shape and augmentation that it meets."""
    return cast(
        "Callable[[Tensor, Tensor, Augmentation], Tensor]",
        torch.compile(colours_at_once, fullgraph=True, dynamic=False),
    )
