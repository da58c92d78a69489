"""Batches: what a loader yields, which rows are this process's, and how workers read them."""

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor

from hardmix.data.crops import evaluation_crop
from hardmix.data.image_files import UnreadableImage
from hardmix.data.image_set import ImageSet
from hardmix.data.own_views import Pipeline, make_own_views
from hardmix.data.views import ViewMaker
from hardmix.data.workers import empty_to_send
from hardmix.errors import InputError
from hardmix.runtime.device import send
from hardmix.settings.config import DataConfig


class Batch(NamedTuple):
    """One step's images on the training device, normalised."""

    views: tuple[Float32[Tensor, "batch channels _ _"], ...]
    """The views of every image, as many as the method uses."""
    labels: Int64[Tensor, " batch"]
    """Class of each image, -1 if unknown."""
    ids: Int64[Tensor, " batch"]
    """Number of each image in its data set."""

    @property
    def query(self) -> Float32[Tensor, "batch channels size size"]:
        """The first view."""
        return self.views[0]

    @property
    def key(self) -> Float32[Tensor, "batch channels size size"]:
        """The last view; for methods with two, the second."""
        return self.views[-1]


def batch_of(
    views: Sequence[Float32[Tensor, "batch channels _ _"]],
    labels: Int64[Tensor, " batch"],
    ids: Int64[Tensor, " batch"],
) -> Batch:
    """Return a batch with labels and ids on the device of the views."""
    labels, ids = send(torch.stack([labels, ids]), views[0].device)
    return Batch(tuple(views), labels, ids)


@runtime_checkable
class Loader(Protocol):
    """Yields this process's batches of an epoch, from any step on."""

    steps_per_epoch: int
    unreadable: dict[int, str]
    """Reason by the number of each image that was left out."""

    def prepare(self) -> None:
        """Prepare the loader, once, before the first batch."""

    def reading(self) -> str:
        """Return how images are read, for a line at the start."""

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch, from `first_step` on."""

    def close(self) -> None:
        """End the processes that it has started."""


def parts_of(batch: Batch, number: int) -> list[Batch]:
    """Split a batch into parts, whose gradients are added up."""
    views = zip(*(view.chunk(number) for view in batch.views), strict=True)
    labels, ids = batch.labels.chunk(number), batch.ids.chunk(number)
    return [Batch(*part) for part in zip(views, labels, ids, strict=True)]


def steps_of(num_images: int, batch_size: int) -> int:
    """Return the number of full batches in an epoch; raise InputError if there are none."""
    if batch_size > num_images:
        raise InputError(
            f"train.batch_size={batch_size} exceeds the {num_images} images of the data set:"
            " lower train.batch_size."
        )
    return num_images // batch_size


def rows_of(rank: int, world_size: int, batch_size: int, parts: int) -> Int64[Tensor, " rows"]:
    """Return a rank's rows of the global batch: its share of each part that is encoded at once.

    A part then has the same images, in the same order, on any number of processes.
    """
    if batch_size % (world_size * parts):
        raise InputError(
            f"train.batch_size={batch_size} is not divisible by the {world_size} processes"
            + (f" times train.accumulate={parts}" if parts > 1 else "")
            + ": each takes the same number of images; choose a multiple of"
            f" {world_size * parts}."
        )
    shares = torch.arange(batch_size).view(parts, world_size, -1)
    return shares[:, rank].flatten()


TOGETHER = 1 << 22
"""Bytes of images that a worker reads before it crops them: drawing the boxes of one photograph
takes as long as drawing those of ten."""


class ReadImages(NamedTuple):
    """A list of images as a worker has read them."""

    pixels: UInt8[Tensor, "..."] | Float32[Tensor, "views batch channels size size"]
    """Crops; or finished views, coloured and normalised."""
    ids: Int64[Tensor, " batch"]
    unreadable: dict[int, str]
    """Reason by the number of each image that is left out."""
    seconds: float = 0.0
    """Time that this took."""
    more: Sequence[Tensor] = ()
    """Like `pixels`, for further kinds of views."""


def read_views(
    images: ImageSet,
    config: DataConfig,
    seed: int,
    maker: ViewMaker | tuple[Pipeline, ...],
    whole: bool,
    job: tuple[int, list[int]],
) -> ReadImages:
    """Decode and crop the views, and colour them if `whole` is set: a worker's part of training.

    Your own pipelines, instead of a maker of views, do all of this.
    """
    started = time.perf_counter()
    epoch, wanted = job
    ids: list[Tensor] = []
    crops: list[Sequence[Tensor]] = []
    unreadable: dict[int, str] = {}
    allowed = allowed_unreadable(images, config.max_unreadable)
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
    """Return a worker's result if too many images are unreadable."""
    return ReadImages(torch.empty(0, dtype=torch.uint8), torch.empty(0).long(), unreadable)


def coloured(
    kinds: Sequence[Tensor], ids: Tensor, maker: ViewMaker, epoch: int
) -> list[Float32[Tensor, "..."]]:
    """Return the finished views of crops, in memory that the main process can share."""
    out = [empty_to_send(kind.shape) for kind in kinds]
    maker.colour(kinds, ids, epoch, out)
    return out


def finished_views(
    read: ReadImages, maker: ViewMaker, epoch: int, device: torch.device, coloured_on: torch.device
) -> Sequence[Tensor]:
    """Return a worker's result as views on the training device: the main process's part."""
    finished = read.pixels.dtype != torch.uint8
    kinds = [send(each, device if finished else coloured_on) for each in (read.pixels, *read.more)]
    if finished:
        return [view for pixels in kinds for view in pixels]
    return [send(view, device) for view in maker.colour(kinds, read.ids, epoch)]


def _read_groups(
    images: ImageSet, wanted: list[int], unreadable: dict[int, str], allowed: int
) -> Iterator[tuple[list[int], Sequence[Tensor] | Tensor]]:
    """Yield images to crop together and their numbers; the next one replaces an unreadable one."""
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
    """Return crops of every kind, to be coloured, or finished views from your own pipelines."""
    if isinstance(maker, ViewMaker):
        return maker.crop(images, ids, epoch)
    return [make_own_views(list(images), ids, maker, config, seed, epoch)]


def first_readable(images: ImageSet) -> int:
    """Return the number of the first readable image; `checked` has found that there is one."""
    return next(index for index in range(len(images)) if _read(images, index, {}) is not None)


def read_evaluation(images: ImageSet, size: int, wanted: list[int]) -> ReadImages:
    """Decode and crop images: a worker's part of evaluation."""
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


def allowed_unreadable(images: ImageSet, share: float) -> int:
    """Return how many images may be unreadable: at least one in small sets, unless none may."""
    return max(1, int(share * len(images))) if share else 0


def check_unreadable(unreadable: dict[int, str], images: ImageSet, share: float) -> None:
    """Raise InputError if more than `share` of the images are unreadable."""
    if len(unreadable) > allowed_unreadable(images, share):
        first = "; ".join(list(unreadable.values())[:5])
        raise InputError(
            f"{len(unreadable)} of {len(images)} images cannot be read, more than"
            f" data.max_unreadable={share} allows: {first}. Repair or remove them, or raise"
            " --data.max-unreadable, a fraction of the images."
        )
