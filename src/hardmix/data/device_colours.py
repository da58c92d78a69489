"""The colours of a batch on a GPU: few launches for all samples, parameters in one copy.

The same views as augment.py makes on a CPU, to rounding. Brightness, contrast and saturation are
affine in a pixel's channels: whichever of them a sample's turn has, one matrix product does. A
sample goes through at most three before its hue is turned and the others after it, so samples are
sorted by how many come before: each launch then works on a slice of the batch.
"""

from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from hardmix.data import image_ops
from hardmix.data.image_ops import Images, constant
from hardmix.data.view_parameters import ColourParameters
from hardmix.runtime.device import send
from hardmix.settings.named_choices import Augmentation

HUE = 3
"""Its number in `ColourParameters.order`; the three below it are affine."""
TURNS = 3
"""Affine operations of a sample before its hue, at most, and after it."""


class DeviceColours(NamedTuple):
    """What happens to each sample, in sorted order, on the device."""

    source: Int64[Tensor, " batch"]
    """Where a sorted sample stood."""
    place: Int64[Tensor, " batch"]
    """Where each sample stands now."""
    blurred: Int64[Tensor, " blurred"]
    sigma: Float32[Tensor, " blurred"]
    affine: Float32[Tensor, "3 {2*TURNS} batch"]
    """Of each turn: the factor, the share of the pixel's grey, the share of the image's grey."""
    hue: Float32[Tensor, " batch"]
    """A turn more than the factor: positive."""
    grey: Float32[Tensor, " batch"]
    """1 makes it grey, 0 does not."""
    flip: Float32[Tensor, " batch"]
    more: Float32[Tensor, "batch columns"]
    """What the caller sends along, sorted."""
    before: list[int]
    """How many samples, from the first on, have a first, second, third turn before their hue."""
    jittered: int
    """How many are jittered at all: the first ones."""
    after: list[int]
    """From which of these on there is a first, second, third turn after it."""


def plan_colours(
    p: ColourParameters, channels: int, device: torch.device, more: Float32[Tensor, "batch columns"]
) -> DeviceColours:
    """Sort the samples, and send all that is known of them in one copy that does not wait."""
    first = p.order.argsort(dim=1)[:, HUE] if channels == 3 else torch.zeros_like(p.order[:, 0])
    first = torch.where(p.jitter, first, -1)
    source = first.argsort(dim=0, descending=True, stable=True)
    p, first = ColourParameters(*(each[source] for each in p)), first[source]
    blurred = (p.sigma > 0).nonzero()[:, 0]
    numbers = torch.cat([source, source.argsort(), blurred])
    floats = [_affine(p, first, channels), 1 + p.hue, p.grey.float(), p.flip.float()]
    parts = [numbers.view(torch.float32), p.sigma[blurred], *floats, more[source]]
    sent = send(torch.cat([part.flatten() for part in parts]), device)
    n, size = len(source), 2 * numbers.numel()
    source, place, blurred = sent[:size].view(torch.int64).split([n, n, len(blurred)])
    rest = sent[size:].split([len(blurred), 6 * TURNS * n, n, n, n, more.numel()])
    jittered = int((first >= 0).sum())
    after = [int((first >= TURNS - turn).sum()) for turn in range(TURNS)]
    sigma, affine, hue, grey, flip, along = rest
    return DeviceColours(
        source=source,
        place=place,
        blurred=blurred,
        sigma=sigma,
        affine=affine.view(3, 2 * TURNS, n),
        hue=hue,
        grey=grey,
        flip=flip,
        more=along.view(n, more.shape[1]),
        before=[int((first > turn).sum()) for turn in range(TURNS)],
        jittered=jittered,
        after=after if channels == 3 else [0, 0, jittered],
    )


def _affine(p: ColourParameters, first: Tensor, channels: int) -> Tensor:
    """Factors and shares of grey of each turn: those before the hue, then those after it."""
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
    """Identity, and a matrix that gives every channel the pixel's grey."""
    luma = image_ops.LUMA if channels == 3 else (1 / channels,) * channels
    grey = torch.tensor(luma).expand(channels, channels)
    return send(torch.eye(channels), device), send(grey.contiguous(), device)


def apply_colours_(images: Images, plan: DeviceColours, augmentation: Augmentation) -> Images:
    """Official MoCo's order after the crop, as in `augment.colour_stages`; images are sorted."""
    if augmentation == "moco-v1":
        _grey_(images, plan)
    if augmentation != "plain":
        _jitter_(images, plan)
    if augmentation in ("moco-v2", "simclr"):
        _grey_(images, plan)
        _blur_(images, plan)
    flip = plan.flip.view(-1, 1, 1, 1) > 0
    return torch.where(flip, images.flip(-1), images)


def _jitter_(images: Images, plan: DeviceColours) -> None:
    identity, grey = _shares(images.shape[1], images.device)
    factor, pixel, whole = plan.affine[..., None, None]
    matrices = torch.addcmul(factor * identity, pixel, grey)
    to_mean = whole * grey[:1]
    for turn in range(TURNS):
        rows = slice(0, plan.before[turn])
        _turn_(images[rows], matrices[turn, rows], to_mean[turn, rows])
    if images.shape[1] == 3:
        _turn_hue_(images[: plan.jittered], plan.hue[: plan.jittered])
    for turn in range(TURNS):
        rows = slice(plan.after[turn], plan.jittered)
        _turn_(images[rows], matrices[TURNS + turn, rows], to_mean[TURNS + turn, rows])


def _turn_(images: Images, matrices: Tensor, to_mean: Tensor) -> None:
    """Brightness, contrast or saturation of each image, all in one product."""
    if len(images):
        pixels = images.flatten(2)
        shift = torch.bmm(to_mean, pixels.mean(dim=2, keepdim=True))
        torch.clamp(torch.baddbmm(shift, matrices, pixels), 0, 1, out=pixels)


def _turn_hue_(images: Images, hue: Float32[Tensor, " batch"]) -> None:
    """As `image_ops.adjust_hue_`, for all three channels at once."""
    if len(images) == 0:
        return
    opposite, sixths, base = (
        constant(values, images.device)
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


def _grey_(images: Images, plan: DeviceColours) -> None:
    if images.shape[1] == 3:
        red, green, blue = images.unbind(dim=1)
        share = image_ops.LUMA
        grey = red.mul(share[0]).add_(green, alpha=share[1]).add_(blue, alpha=share[2])
        images.lerp_(grey.unsqueeze_(1), plan.grey.view(-1, 1, 1, 1))


def _blur_(images: Images, plan: DeviceColours) -> None:
    if len(plan.blurred):
        some = images.index_select(0, plan.blurred)
        image_ops.blur_(some, plan.sigma)
        images.index_copy_(0, plan.blurred, some)
