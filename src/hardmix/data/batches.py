"""What a loader gives to a step, and which images of the global batch are this process's."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from hardmix.errors import InputError
from hardmix.runtime.device import send


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
        """The last view: of methods with two, the second."""
        return self.views[-1]


def batch_of(
    views: Sequence[Float32[Tensor, "batch channels _ _"]],
    labels: Int64[Tensor, " batch"],
    ids: Int64[Tensor, " batch"],
) -> Batch:
    """The views as they are, labels and ids where the views are."""
    labels, ids = send(torch.stack([labels, ids]), views[0].device)
    return Batch(tuple(views), labels, ids)


@runtime_checkable
class Loader(Protocol):
    """Batches of an epoch, from any step on, on this process."""

    steps_per_epoch: int
    unreadable: dict[int, str]
    """Number of each image that was left out, and why."""

    def prepare(self) -> None:
        """Prepare the loader, once, before the first batch."""

    def reading(self) -> str:
        """How images are read, for a line at the start."""

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Batches of an epoch, from `first_step` on."""

    def close(self) -> None:
        """End what was started for it."""


def parts_of(batch: Batch, number: int) -> list[Batch]:
    """A batch in as many parts, whose gradients are added up."""
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
    """A rank's rows of the global batch: its share of each of the parts that are encoded at once.

    So a part is made of the same images, in the same order, on any number of processes.
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
