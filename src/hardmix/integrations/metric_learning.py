"""pytorch-metric-learning: loss(embeddings, labels), in place of SupConLoss and CrossBatchMemory.

criterion = SupConLoss(temperature=0.1, queue_size=4096, dim=128)
loss = criterion(embeddings, labels)        # reads the queue, then writes the embeddings to it
"""

from typing import Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hardmix.errors import InputError
from hardmix.integrations.mixing_options import MixingOptions, replacement_loss
from hardmix.mixing.checks import check_whole
from hardmix.mixing.loss import Temperature
from hardmix.mixing.queue import MemoryQueue
from hardmix.runtime.distributed import gather, rank


class SupConLoss(nn.Module):
    """SupCon (Khosla et al. 2020) of embeddings and their labels, with a queue if wanted.

    Every sample is contrasted with all others of the batch, and with the embeddings of earlier
    batches if there is a queue. Those with its label are its positives; it is never its own.
    Without options the value is that of pytorch-metric-learning's SupConLoss. The queue takes the
    place of CrossBatchMemory, and is part of the state_dict with its labels and its position; a
    sample of the batch gets gradients as an anchor and as the positive or negative of others.
    """

    def __init__(
        self,
        temperature: Temperature = 0.1,
        *,
        queue_size: int = 0,
        dim: int | None = None,
        gather_distributed: bool = False,
        **mixing: Unpack[MixingOptions],
    ) -> None:
        """Create the loss.

        Args:
            temperature: tau of Eq. 1; 0.1 in SupCon.
            queue_size: number of embeddings of earlier batches to contrast with; 0 for none.
            dim: the number of dimensions of an embedding, if there is a queue.
            gather_distributed: whether samples of all processes are contrasted with each other.
            mixing: arguments of `MochiLoss`, such as denominator="supcon-in" or num_pairs=64.
        """
        super().__init__()
        check_whole(queue_size=queue_size)
        if queue_size < 0 or (queue_size and not dim):
            raise InputError(
                f"queue_size={queue_size} with dim={dim}: pass 0 for no queue, or both, such as"
                " queue_size=4096, dim=128."
            )
        self.gather_distributed = gather_distributed
        self.memory = MemoryQueue(queue_size, dim, start="empty") if queue_size and dim else None
        self.mochi = replacement_loss(temperature, mixing)

    def forward(
        self,
        embeddings: Float[Tensor, "batch dim"],
        labels: Int[Tensor, " batch"],
        ids: Int[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, ""]:
        """Return the mean loss over the samples that have a positive; in training, write the queue.

        Args:
            embeddings: of any length but 0.
            labels: the class of each sample, or -1 if it is unknown.
            ids: of the samples; one that comes again while its older embedding is in the queue is
                neither its own positive nor its own negative.
        """
        everyone = [_of_all(values, self.gather_distributed) for values in (labels, ids)]
        rows = gather(embeddings, with_gradient=True) if self.gather_distributed else embeddings
        candidates, stored = [rows], [everyone[0], everyone[1]]
        memory = self.memory
        if memory is not None and memory.filled:
            candidates.append(memory.keys[: memory.filled].to(rows.dtype))
            stored = [
                None if values is None else torch.cat([values, old[: memory.filled]])
                for values, old in zip(everyone, (memory.labels, memory.ids), strict=True)
            ]
        value = self.mochi.in_batch(
            embeddings,
            gathered=torch.cat(candidates),
            first_row=rank() * len(embeddings) if self.gather_distributed else 0,
            labels=labels,
            negative_labels=stored[0],
            ids=ids,
            negative_ids=stored[1],
        )
        if self.training and memory is not None:
            memory.enqueue(rows.detach(), labels=everyone[0], ids=everyone[1])
        return value


def _of_all(values: Tensor | None, gathered: bool) -> Tensor | None:
    return gather(values) if gathered and values is not None else values
