"""What a loader gives to a step, and which images of the global batch are this process's."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from hardmix.errors import InputError


class Batch(NamedTuple):
    """One step's images on the training device, normalised."""

    query: Float32[Tensor, "batch channels size size"]
    key: Float32[Tensor, "batch channels size size"]
    labels: Int64[Tensor, " batch"]
    """-1 where unknown."""
    ids: Int64[Tensor, " batch"]
    """Number of each image in its data set."""


def on_device(
    views: Sequence[Float32[Tensor, "batch channels size size"]],
    labels: Int64[Tensor, " batch"],
    ids: Int64[Tensor, " batch"],
) -> Batch:
    """First and last view as query and key, the rest where they are."""
    query, key = views[0], views[-1]
    return Batch(query, key, labels.to(query.device), ids.to(query.device))


def steps_of(num_images: int, batch_size: int) -> int:
    """Full batches in an epoch: at least one, or InputError."""
    if batch_size > num_images:
        raise InputError(
            f"train.batch_size={batch_size} exceeds the {num_images} images of the data set: not"
            " one batch can be filled; lower train.batch_size."
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
