"""Rows sent straight to the process that needs them: shuffled batch norm's way there and back."""

import torch
import torch.distributed
from jaxtyping import Int64, Shaped
from torch import Tensor

from hardmix.runtime.device import send
from hardmix.runtime.distributed import group_for, rank, world_size


class Exchange:
    """Rows of all ranks on their way into another order, of which each rank gets its part.

    A rank sends every row once, to the rank that needs it: with n ranks, n times fewer bytes than
    if all rows were gathered, and the same ones arrive.
    """

    def __init__(
        self, rows: Shaped[Tensor, "batch ..."], permutation: Int64[Tensor, " all"]
    ) -> None:
        batch, number = len(rows), world_size()
        self._work = None
        if number == 1:
            self._rows, self._place = rows, send(permutation, rows.device)
            return
        wanted = permutation.cpu().view(number, batch)
        owner = wanted // batch
        leaving = wanted[owner == rank()] - rank() * batch
        place = owner[rank()].argsort(stable=True).argsort()
        leaving, self._place = send(torch.stack([leaving, place]), rows.device)
        self._sent = rows.detach().contiguous().index_select(0, leaving)
        self._rows = torch.empty_like(self._sent)
        self._work = torch.distributed.all_to_all_single(
            self._rows,
            self._sent,
            owner[rank()].bincount(minlength=number).tolist(),
            (owner == rank()).sum(dim=1).tolist(),
            group=group_for(rows.device),
            async_op=True,
        )

    def arrived(self) -> Shaped[Tensor, "batch ..."]:
        """The part of this rank, when it is there; without gradient where there are many ranks."""
        if self._work is not None:
            self._work.wait()
        return self._rows.index_select(0, self._place)
