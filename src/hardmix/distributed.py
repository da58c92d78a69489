"""What processes say to each other: nothing at all when there is only one.

Every function may be called without torch.distributed; tests and single-device runs then read the
same as `torchrun`. Rank order is the order of rows everywhere.
"""

import torch
import torch.distributed
from jaxtyping import Shaped
from torch import Tensor


def world_size() -> int:
    """How many processes train together."""
    return torch.distributed.get_world_size() if _running() else 1


def rank() -> int:
    """The number of this process among them, from 0."""
    return torch.distributed.get_rank() if _running() else 0


def is_main() -> bool:
    """Whether this process is the one that prints and writes files."""
    return rank() == 0


@torch.no_grad()
def gather(tensor: Shaped[Tensor, "rows ..."]) -> Shaped[Tensor, "all_rows ..."]:
    """Every rank's rows, in rank order, on every rank: official MoCo's `concat_all_gather`.

    Shapes must agree between ranks. No gradient comes back. On one process, the tensor itself.
    """
    if world_size() == 1:
        return tensor
    tensor = tensor.contiguous()
    everyone = tensor.new_empty(world_size() * len(tensor), *tensor.shape[1:])
    torch.distributed.all_gather_into_tensor(everyone, tensor)
    return everyone


@torch.no_grad()
def broadcast(tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    """Rank 0's values, written over this rank's in place; on one process nothing happens."""
    if world_size() > 1:
        values = tensor.contiguous()  # a copy where the memory is not: gloo sends plain blocks
        torch.distributed.broadcast(values, src=0)
        if values is not tensor:
            tensor.copy_(values)
    return tensor


def _running() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
