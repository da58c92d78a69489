"""lightly: in place of its NTXentLoss, with filters, weights or mixed hard negatives if wanted.

criterion = NTXentLoss(temperature=0.2, memory_bank_size=(4096, 128), num_pairs=256)
loss = criterion(query, key)                # reads the memory bank, then writes the keys to it
"""

from collections.abc import Sequence
from typing import Unpack

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from hardmix.errors import InputError
from hardmix.integrations.mixing_options import MixingOptions, replacement_loss
from hardmix.mixing.queue import MemoryQueue
from hardmix.runtime.distributed import gather, rank
from hardmix.settings.named_choices import QueueStart


class NTXentLoss(nn.Module):
    """lightly's NTXentLoss: MoCo with a memory bank, SimCLR without.

    Value and gradients are lightly's until an option changes them. As in lightly, the loss writes
    the bank if the queries ask for gradients. Unlike there, the bank begins without keys, wraps
    where a batch does not fit its rest, and is part of the state_dict. Called in both directions of
    a step, (query, key) and (query', key'), the second call leaves out the keys that the first has
    written, which are views of the same images (lightly issue 564).
    """

    def __init__(
        self,
        temperature: float = 0.5,
        memory_bank_size: int | Sequence[int] = 0,
        gather_distributed: bool = False,
        *,
        start: QueueStart = "empty",
        **mixing: Unpack[MixingOptions],
    ) -> None:
        """Create the loss.

        Args:
            temperature: as in lightly.
            memory_bank_size: as in lightly: (size, dim) for a bank, 0 for none.
            gather_distributed: as in lightly: whether keys of all processes are written to the
                bank, or are negatives without one.
            start: "random" for a bank that begins with random vectors, as lightly's does.
            mixing: arguments of `MochiLoss`, such as num_pairs=256.
        """
        super().__init__()
        shape = (memory_bank_size,) if isinstance(memory_bank_size, int) else memory_bank_size
        size, dim = (*shape, 0, 0)[:2]
        if len(shape) > 2 or min(shape, default=-1) < 0 or (size and not dim):
            raise InputError(
                f"memory_bank_size={memory_bank_size} must be (size, dim), such as (4096, 128), or"
                " 0 for no memory bank."
            )
        self.gather_distributed = gather_distributed
        self.memory_bank = MemoryQueue(size, dim, start=start) if size else None
        self.mochi = replacement_loss(temperature, mixing, size or None)
        self._written = 0
        """Keys that were written since the last backward pass: those of this step."""

    def forward(
        self,
        out0: Float[Tensor, "batch dim"],
        out1: Float[Tensor, "batch dim"],
        ids: Int[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, ""]:
        """Return the loss of two views' projections: queries and keys, if there is a bank.

        Args:
            out0: projections of one view.
            out1: those of the other, from the momentum encoder if there is a bank.
            ids: of the images; keys of the same image are then never negatives.
        """
        if self.memory_bank is None:
            return (self._one_way(out0, out1, ids) + self._one_way(out1, out0, ids)) / 2
        value: Tensor = self.mochi(out0, out1, self.memory_bank, self._of_this_step(out0), ids=ids)
        if out0.requires_grad:
            arrays = (out1.detach(), ids)
            if self.gather_distributed:
                arrays = gather(out1.detach()), None if ids is None else gather(ids)
            self.memory_bank.enqueue(arrays[0], ids=arrays[1])
            self._written += len(arrays[0])
            out0.register_hook(self._forget)
        return value

    def _forget(self, gradient: Tensor) -> None:
        """Count the next call to another step: the backward pass has reached this one's queries."""
        del gradient
        self._written = 0

    def _of_this_step(self, query: Tensor) -> Bool[Tensor, "batch size"] | None:
        """Return the mask of the keys that were written since the last backward pass."""
        bank = self.memory_bank
        if bank is None or not (self._written and query.requires_grad):
            return None
        age = (bank.position - 1 - torch.arange(len(bank), device=query.device)) % len(bank)
        return (age < self._written).expand(len(query), -1)

    def _one_way(self, query: Tensor, key: Tensor, ids: Tensor | None) -> Tensor:
        """SimCLR's loss of one view: its negatives are all other views of the batch, of both."""
        keys, views, everyone, first_row = key, query, ids, 0
        if self.gather_distributed:
            keys, views = (gather(each, with_gradient=True) for each in (key, query))
            everyone = None if ids is None else gather(ids)
            first_row = rank() * len(query)
        place = torch.arange(len(query), device=query.device).unsqueeze(1) + first_row
        itself = place + len(keys) == torch.arange(2 * len(keys), device=query.device)
        return self.mochi.in_batch(
            query,
            key,
            itself,
            gathered=torch.cat([keys, views]),
            first_row=first_row,
            ids=ids,
            negative_ids=None if everyone is None else everyone.repeat(2),
        )
