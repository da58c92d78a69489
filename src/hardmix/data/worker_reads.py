"""What a loader's process does with a batch: reads its images and crops them; and the rest."""

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor

from hardmix.data.augment import evaluation_crop
from hardmix.data.image_files import UnreadableImage
from hardmix.data.image_set import ImageSet
from hardmix.data.own_views import Pipeline, make_own_views
from hardmix.data.view_kinds import ViewMaker
from hardmix.data.workers import empty_to_send
from hardmix.errors import InputError
from hardmix.runtime.device import send
from hardmix.settings.config import DataConfig

TOGETHER = 1 << 22
"""Bytes of images that a worker holds before it crops them: to draw the boxes of one photograph
takes as long as those of ten."""


class ReadImages(NamedTuple):
    """What a worker makes of a list of images."""

    pixels: UInt8[Tensor, "..."] | Float32[Tensor, "views batch channels size size"]
    """Crops; or views that are coloured and normalised."""
    ids: Int64[Tensor, " batch"]
    unreadable: dict[int, str]
    """Number of each image that is left out, and why."""
    seconds: float = 0.0
    """How long it took."""
    more: Sequence[Tensor] = ()
    """As `pixels`, of further kinds of views."""


def read_views(
    images: ImageSet,
    config: DataConfig,
    seed: int,
    maker: ViewMaker | tuple[Pipeline, ...],
    whole: bool,
    job: tuple[int, list[int]],
) -> ReadImages:
    """Decode and crop the views, if `whole` colour them too: a worker's part of training.

    Your own pipelines, given instead of the maker of views, do all of it.
    """
    started = time.perf_counter()
    epoch, wanted = job
    ids: list[Tensor] = []
    crops: list[Sequence[Tensor]] = []
    unreadable: dict[int, str] = {}
    allowed = _allowed(images, config.max_unreadable)
    for group_ids, group in _read_groups(images, wanted, unreadable, allowed):
        ids.append(torch.tensor(group_ids))
        crops.append(make_crops(group, ids[-1], maker, config, seed, epoch))
    if len(unreadable) > allowed:
        return nothing_read(unreadable)
    kinds, numbers = [torch.cat(kind, dim=1) for kind in zip(*crops, strict=True)], torch.cat(ids)
    if whole and isinstance(maker, ViewMaker):
        kinds = coloured(kinds, numbers, maker, epoch)
    seconds = time.perf_counter() - started
    return ReadImages(kinds[0], numbers, unreadable, seconds, kinds[1:])


def nothing_read(unreadable: dict[int, str]) -> ReadImages:
    """Return what a worker gives if too many images are unreadable."""
    return ReadImages(torch.empty(0, dtype=torch.uint8), torch.empty(0).long(), unreadable)


def coloured(
    kinds: Sequence[Tensor], ids: Tensor, maker: ViewMaker, epoch: int
) -> list[Float32[Tensor, "..."]]:
    """Return the finished views of crops, where the main process can see them."""
    out = [empty_to_send(kind.shape) for kind in kinds]
    maker.colour(kinds, ids, epoch, out)
    return out


def finished_views(
    read: ReadImages, maker: ViewMaker, epoch: int, device: torch.device, coloured_on: torch.device
) -> Sequence[Tensor]:
    """Return what a worker made as views on the training device: the main process's part."""
    finished = read.pixels.dtype != torch.uint8
    kinds = [send(each, device if finished else coloured_on) for each in (read.pixels, *read.more)]
    if finished:
        return [view for pixels in kinds for view in pixels]
    return [send(view, device) for view in maker.colour(kinds, read.ids, epoch)]


def _read_groups(
    images: ImageSet, wanted: list[int], unreadable: dict[int, str], allowed: int
) -> Iterator[tuple[list[int], Sequence[Tensor] | Tensor]]:
    """Images that are cropped together, and their numbers: for an unreadable one, the next."""
    kept = images.together(wanted)
    if kept is not None:
        yield wanted, kept
        return
    ids: list[int] = []
    group: list[Tensor] = []
    held = 0
    for index in wanted:
        while (image := _read(images, index, unreadable)) is None:
            if len(unreadable) > allowed:
                return
            index = (index + 1) % len(images)
        ids.append(index)
        group.append(image)
        held += image.numel()
        if held > TOGETHER:
            yield ids, group
            ids, group, held = [], [], 0
    if group:
        yield ids, group


def make_crops(
    images: Sequence[Tensor] | Tensor,
    ids: Tensor,
    maker: ViewMaker | tuple[Pipeline, ...],
    config: DataConfig,
    seed: int,
    epoch: int,
) -> Sequence[Tensor]:
    """Crops of every kind, to be coloured; or finished views from your own pipeline."""
    if isinstance(maker, ViewMaker):
        return maker.crop(images, ids, epoch)
    return [make_own_views(list(images), ids, maker, config, seed, epoch)]


def first_readable(images: ImageSet) -> int:
    """`checked` has found one among the first."""
    return next(index for index in range(len(images)) if _read(images, index, {}) is not None)


def read_evaluation(images: ImageSet, size: int, wanted: list[int]) -> ReadImages:
    """Decode and crop: a worker's part of evaluation."""
    if images.tensor is not None:
        ids = torch.tensor(wanted)
        return ReadImages(evaluation_crop(images.tensor[ids], size), ids, {})
    unreadable: dict[int, str] = {}
    pixels = [_read(images, index, unreadable) for index in wanted]
    crops = [evaluation_crop(image, size) for image in pixels if image is not None]
    ids = torch.tensor([index for index in wanted if index not in unreadable], dtype=torch.int64)
    return ReadImages(
        torch.stack(crops) if crops else torch.empty(0, dtype=torch.uint8), ids, unreadable
    )


def _read(images: ImageSet, index: int, unreadable: dict[int, str]) -> Tensor | None:
    try:
        return images.image(index)
    except UnreadableImage as error:
        unreadable[index] = str(error)
        return None


def _allowed(images: ImageSet, share: float) -> int:
    """How many images may be unreadable: one in any case, so that small sets are not stopped."""
    return max(1, int(share * len(images)))


def check_unreadable(unreadable: dict[int, str], images: ImageSet, share: float) -> None:
    """Raise InputError if more than `share` of the images are unreadable."""
    if len(unreadable) > _allowed(images, share):
        first = "; ".join(list(unreadable.values())[:5])
        raise InputError(
            f"{len(unreadable)} of {len(images)} images cannot be read, more than"
            f" data.max_unreadable={share} allows: {first}. Repair or remove them, or raise the"
            " limit."
        )
