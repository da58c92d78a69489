"""Cross-entropy on the same trunk and data: the paper's upper bound (Table 1)."""

from torch import nn
from torch.nn.functional import cross_entropy

from hardmix.data.batches import Batch
from hardmix.methods.base import Materials, Method, StepOutcome, TrainingPosition
from hardmix.runtime.profile import timed
from hardmix.settings.config import PretrainConfig


class Supervised(Method):
    """A classifier on the trunk, trained on the first view and its label."""

    views = 1
    needs_labels = True

    def __init__(self, config: PretrainConfig, materials: Materials) -> None:
        super().__init__(config, materials)
        encoder = self.new_encoder()
        self.trunk = encoder.trunk
        self.classifier = nn.Linear(encoder.width, materials.num_classes)
        self._whole = (nn.Sequential(self.trunk, self.classifier),)  # not saved twice

    def networks(self) -> dict[str, nn.Module]:
        """Return trunk and classifier as one network."""
        return {"classifier": self._whole[0]}

    def loss(self, part: Batch, at: TrainingPosition) -> StepOutcome:  # noqa: ARG002
        """Return the cross-entropy of the first view, and its accuracy."""
        with timed("query"):
            logits = self.network("classifier")(part.query).float()
        with timed("loss"):
            loss = cross_entropy(logits, part.labels)
        right = (logits.argmax(dim=1) == part.labels).float().mean()
        return StepOutcome(loss, measures={"train_accuracy": right})
