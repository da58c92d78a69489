"""lightly: in place of its NTXentLoss, with mixed hard negatives.

criterion = NTXentLoss(temperature=0.2, memory_bank_size=(4096, 128))
loss = criterion(query, key)                # reads the memory bank, then writes the keys to it
"""

from collections.abc import Sequence
from typing import Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hardmix.errors import InputError
from hardmix.integrations.mixing_options import MixingOptions, loss_for_batches, loss_for_queue
from hardmix.mixing.queue import MemoryQueue
from hardmix.runtime.distributed import gather, rank


class NTXentLoss(nn.Module):
    """lightly's NTXentLoss with mixed hard negatives: MoCo with a memory bank, SimCLR without.

    With num_pairs=0 and num_with_query=0 its value and gradients are lightly's. As in lightly, the
    bank begins with random vectors and is written by the loss, if the queries ask for gradients.
    Where lightly drops the end of a batch that does not fit the rest of the bank, this one wraps,
    and it is part of the state_dict.
    """

    def __init__(
        self,
        temperature: float = 0.5,
        memory_bank_size: int | Sequence[int] = 0,
        gather_distributed: bool = False,
        **mixing: Unpack[MixingOptions],
    ) -> None:
        """Create the loss.

        temperature, memory_bank_size, gather_distributed: as in lightly: (size, dim) for a bank, 0
        for none; whether keys of all processes are written to it, or are negatives without it.
        mixing: arguments of `MochiLoss`, such as num_hardest=512. The counts are the paper's with a
        bank, and smaller without.
        """
        super().__init__()
        given = (memory_bank_size,) if isinstance(memory_bank_size, int) else memory_bank_size
        size, dim = (*given, 0, 0)[:2]
        if len(given) > 2 or min(given, default=-1) < 0 or (size and not dim):
            raise InputError(
                f"memory_bank_size={memory_bank_size} must be (size, dim), such as (4096, 128), or"
                " 0 for no memory bank."
            )
        self.gather_distributed = gather_distributed
        self.memory_bank = MemoryQueue(size, dim) if size else None
        if size:
            self.mochi = loss_for_queue(temperature, size, mixing)
        else:
            self.mochi = loss_for_batches(temperature, mixing)

    def forward(
        self, out0: Float[Tensor, "batch dim"], out1: Float[Tensor, "batch dim"]
    ) -> Float[Tensor, ""]:
        """Return the loss of two views' projections: queries and keys, if there is a bank."""
        if self.memory_bank is None:
            return (self._one_way(out0, out1) + self._one_way(out1, out0)) / 2
        value: Tensor = self.mochi(out0, out1, self.memory_bank)
        if out0.requires_grad:
            keys = out1.detach()
            self.memory_bank.enqueue(gather(keys) if self.gather_distributed else keys)
        return value

    def _one_way(self, query: Tensor, key: Tensor) -> Tensor:
        """SimCLR's loss of one view: its negatives are all other views of the batch, of both."""
        keys, views, first_row = key, query, 0
        if self.gather_distributed:
            keys, views = (gather(each, with_gradient=True) for each in (key, query))
            first_row = rank() * len(query)
        place = torch.arange(len(query), device=query.device).unsqueeze(1) + first_row
        itself = place + len(keys) == torch.arange(2 * len(keys), device=query.device)
        return self.mochi.in_batch(
            query, key, itself, gathered=torch.cat([keys, views]), first_row=first_row
        )
