"""Lightning: MoCo for a LightningModule, with mixed hard negatives if wanted.

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
from hardmix.integrations.mixing_options import MixingOptions, replacement_loss
from hardmix.mixing.checks import check_whole
from hardmix.mixing.loss import Temperature
from hardmix.mixing.queue import MemoryQueue
from hardmix.runtime.distributed import gather
from hardmix.settings.named_choices import QueueStart, SameLabel


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
        key_groups: int = 1,
        start: QueueStart = "empty",
        **mixing: Unpack[MixingOptions],
    ) -> None:
        """Create encoders, loss and queue.

        Args:
            encoder: maps a batch of views to embeddings (batch, dim) of any length.
            dim: the number of dimensions of an embedding.
            queue_size: K, the number of keys in the queue.
            momentum: m of MoCo's Eq. 2.
            temperature: tau of Eq. 1.
            key_groups: keys are encoded in this many groups of samples, drawn anew at every step.
                The statistics of batch normalisation then do not tell which key is a query's (MoCo,
                Sec. 3.3, on one device). 1 is for encoders without batch normalisation.
            start: "random" for a queue that begins with random vectors, as official MoCo's does.
            mixing: arguments of `MochiLoss`, such as num_pairs=512.
        """
        super().__init__()
        if not 0 <= momentum <= 1:
            raise InputError(
                f"momentum={momentum} must be from 0 to 1: it is the share of the key encoder that"
                " is kept at every step; MoCo uses 0.999."
            )
        check_whole(key_groups=key_groups)
        if key_groups < 1:
            raise InputError(
                f"key_groups={key_groups} is below 1: it is the number of groups in which keys are"
                " encoded; 1 encodes all at once."
            )
        self.encoder = encoder
        self.key_encoder = copy.deepcopy(encoder).requires_grad_(False)
        self.momentum = momentum
        self.key_groups = key_groups
        self.mochi = replacement_loss(temperature, mixing, queue_size)
        self.memory = MemoryQueue(queue_size, dim, start=start)
        self._updated_at = -1

    def contrast(
        self,
        query_views: Any,
        key_views: Any,
        *,
        labels: Tensor | None = None,
        ids: Tensor | None = None,
        same_label: SameLabel = "exclude",
        mix: bool = True,
    ) -> Float[Tensor, ""]:
        """Return the loss of two views of each image; in training, then write the keys.

        The key encoder moves once per step of the optimizer, however many batches are accumulated.

        Args:
            query_views: one view of each image, for the encoder.
            key_views: another, for the key encoder.
            labels: classes; negatives of the query's class are left out, as by the oracle (Sec.
                3.3), or are further positives (see `same_label`).
            ids: of the images; older keys of the query's own image are left out.
            same_label: "exclude" or "positives".
            mix: False for no points, as in the first epochs (see `hardmix.mixing_started`).
        """
        if self.training:
            self._follow()
        key = self._keys(key_views)
        value: Tensor = self.mochi(
            self.encoder(query_views),
            key,
            self.memory,
            labels=labels,
            ids=ids,
            same_label=same_label,
            mix=mix,
        )
        if self.training:
            self.memory.enqueue(
                gather(key),
                labels=None if labels is None else gather(labels),
                ids=None if ids is None else gather(ids),
            )
        return value

    @torch.no_grad()
    def _keys(self, views: Any) -> Tensor:
        """Return the keys; in training, encoded in groups of samples that are drawn anew."""
        if self.key_groups == 1 or not self.training:
            keys: Tensor = self.key_encoder(views)
            return keys
        order = torch.randperm(len(views), device=views.device)
        groups = views[order].tensor_split(self.key_groups)
        encoded = torch.cat([self.key_encoder(group) for group in groups if len(group)])
        return torch.empty_like(encoded).index_copy_(0, order, encoded)

    @torch.no_grad()
    def _follow(self) -> None:
        """MoCo's Eq. 2: key = m * key + (1 - m) * query, for parameters only."""
        step = getattr(self, "global_step", None)  # Lightning's; in another loop every call is one
        if step is not None and step == self._updated_at:
            return
        self._updated_at = -1 if step is None else step
        keys, queries = self.key_encoder.parameters(), self.encoder.parameters()
        torch._foreach_lerp_(list(keys), list(queries), 1 - self.momentum)
