"""What a supervised run minimises; it has the verbs of objectives.py."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hardmix.data.batches import Batch
from hardmix.methods.moco import Moment, black_images, parts_of, share_state
from hardmix.models.encoders import build_encoder
from hardmix.runtime.device import Compute
from hardmix.runtime.distributed import averaged, mean_over_ranks, unaveraged
from hardmix.runtime.profile import timed
from hardmix.settings.config import PretrainConfig


class Supervised(nn.Module):
    """Cross-entropy on the same trunk and data: the paper's upper bound (Table 1)."""

    def __init__(
        self,
        config: PretrainConfig,
        compute: Compute,
        channels: int,
        trunk: nn.Module | None,
        num_classes: int,
    ) -> None:
        super().__init__()
        self.config, self.compute, self.accumulate = config, compute, config.train.accumulate
        encoder = build_encoder(config.model, channels, trunk, image_size=config.data.image_size)
        self.trunk = encoder.trunk
        self.classifier = nn.Linear(encoder.width, num_classes)
        self.accuracy = 0.0
        self._network: tuple[nn.Module] = (nn.Sequential(self.trunk, self.classifier),)

    def spread(self) -> None:
        """Begin on all processes: rank 0's weights everywhere, gradients averaged from now on."""
        share_state(self)
        self._network = (averaged(self._network[0], black_images(self.config, self.compute)),)

    def normalised(self) -> nn.Module:
        """What has running statistics."""
        return self.trunk

    def trained(self) -> list[nn.Parameter]:
        """Everything."""
        return list(self.parameters())

    def backward(self, batch: Batch, moment: Moment) -> Tensor:  # noqa: ARG002
        """One step's gradients on the first view; returns this rank's loss."""
        losses, right = [], []
        for number, part in enumerate(parts_of(batch, self.accumulate), start=1):
            with unaveraged(self._network[0], number < self.accumulate):
                with timed("query"), self.compute.autocast():
                    logits = self._network[0](part.query).float()
                with timed("loss"):
                    loss = cross_entropy(logits, part.labels)
                with timed("backward"):
                    (loss / self.accumulate).backward()
            losses.append(loss.detach())
            right.append((logits.argmax(dim=1) == part.labels).float().mean())
        self.accuracy = float(torch.stack(right).mean())
        return torch.stack(losses).mean()

    def remember(self, batch: Batch) -> None:
        """Nothing: there is no queue."""

    def describe(self) -> dict[str, float]:
        """Accuracy on the last batch."""
        return mean_over_ranks({"train_accuracy": self.accuracy})

    def hardness(self) -> None:
        """Nothing: there are no negatives."""
