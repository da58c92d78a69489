"""Lightning: what a LightningModule needs for MoCo with mixed hard negatives.

class Mochi(MomentumContrast, lightning.LightningModule):
    def training_step(self, batch, _):
        return self.contrast(*batch)        # two views of each image

    def configure_optimizers(self):
        return torch.optim.AdamW(self.encoder.parameters())
"""

import copy
from typing import Any, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hardmix.errors import InputError
from hardmix.integrations.mixing_options import MixingOptions, loss_for_queue
from hardmix.mixing.loss import Temperature
from hardmix.mixing.queue import MemoryQueue
from hardmix.runtime.distributed import gather


class MomentumContrast(nn.Module):
    """Sec. 3.1: an encoder, the key encoder that follows it, and the queue of keys.

    Name it before LightningModule among a class's bases. All three are in the module's checkpoints.
    It works without Lightning, too: as a module in any loop that calls `contrast` once a step.
    """

    def __init__(
        self,
        encoder: nn.Module,
        *,
        dim: int,
        queue_size: int,
        momentum: float = 0.999,
        temperature: Temperature = 0.2,
        **mixing: Unpack[MixingOptions],
    ) -> None:
        """Create encoders, loss and queue.

        encoder: maps a batch of views to embeddings (batch, dim) of any length. From statistics of
        batch normalisation it could tell which key is a query's (MoCo, Sec. 3.3): use other
        normalisation, or encoders of `hardmix pretrain`, which shuffles.
        queue_size: K, the number of keys in the queue.
        momentum: m of MoCo's Eq. 2.
        mixing: arguments of `MochiLoss`, such as num_hardest=512. The counts are the paper's.
        """
        super().__init__()
        if not 0 <= momentum <= 1:
            raise InputError(
                f"momentum={momentum} must be from 0 to 1: it is the share of the key encoder that"
                " is kept at every step; MoCo uses 0.999."
            )
        self.encoder = encoder
        self.key_encoder = copy.deepcopy(encoder).requires_grad_(False)
        self.momentum = momentum
        self.mochi = loss_for_queue(temperature, queue_size, mixing)
        self.memory = MemoryQueue(queue_size, dim)
        self._updated_at = -1

    def contrast(
        self,
        query_views: Any,
        key_views: Any,
        *,
        labels: Tensor | None = None,
        ids: Tensor | None = None,
        mix: bool = True,
    ) -> Float[Tensor, ""]:
        """Return the loss of two views of each image; in training, then write the keys.

        The key encoder moves once per step of the optimizer, however many batches are accumulated.
        labels: classes, for the oracle (Sec. 3.3): negatives of the query's own are left out.
        ids: of the images; older keys of the query's own image are left out.
        mix: False for no points, as in the first epochs (see `hardmix.mixing_started`).
        """
        if self.training:
            self._follow()
        with torch.no_grad():
            key: Tensor = self.key_encoder(key_views)
        exclude = None if labels is None else self.memory.same_class(labels)
        if ids is not None:
            same = self.memory.same_image(ids)
            exclude = same if exclude is None else exclude | same
        value: Tensor = self.mochi(self.encoder(query_views), key, self.memory, exclude, mix=mix)
        if self.training:
            everyone = [None if each is None else gather(each) for each in (labels, ids)]
            self.memory.enqueue(gather(key), *everyone)
        return value

    @torch.no_grad()
    def _follow(self) -> None:
        """MoCo's Eq. 2: key = m * key + (1 - m) * query, for parameters only."""
        step = getattr(self, "global_step", None)  # Lightning's; in another loop every call is one
        if step is not None and step == self._updated_at:
            return
        self._updated_at = -1 if step is None else step
        keys, queries = self.key_encoder.parameters(), self.encoder.parameters()
        torch._foreach_lerp_(list(keys), list(queries), 1 - self.momentum)
