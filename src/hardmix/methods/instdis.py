"""Instance discrimination (Wu et al. 2018): one view, and a bank of all images' embeddings.

    L = -log exp(q.v_i / tau) / ( exp(q.v_i / tau) + sum_j exp(q.v_j / tau) )

v_i is the entry of the query's own image, and j are K others (image_bank.py). Read in
zhirongw/lemniscate.pytorch, which uses NCE with a constant for the denominator, and in PyContrast,
which replaces NCE by the softmax above and crops from 0.08; the paper's 59.5 is PyContrast's, and
so is this. With `mix.*`, points are made from the K entries.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from hardmix.data.batches import Batch
from hardmix.methods.base import Materials, StepOutcome, TrainingPosition, check_embeddings
from hardmix.methods.contrast_measures import ContrastOutcome
from hardmix.methods.image_bank import BankMethod, ImageBank
from hardmix.models.encoders import build_encoder
from hardmix.runtime.profile import timed
from hardmix.settings.config import PretrainConfig
from hardmix.settings.method_options import InstDisOptions


class InstDis(BankMethod):
    """One encoder and a bank."""

    Options = InstDisOptions
    views = 1

    def __init__(self, config: PretrainConfig, materials: Materials) -> None:
        super().__init__(config, materials)
        data = config.data
        self.encoder = build_encoder(
            config.model, data.channels, materials.trunk, image_size=data.image_size
        )
        self.memory = ImageBank(config, materials)

    @property
    def trunk(self) -> nn.Module:  # type: ignore[override]
        """The encoder without its head."""
        return self.encoder.trunk

    def networks(self) -> dict[str, nn.Module]:
        """The encoder."""
        return {"encoder": self.encoder}

    def loss(self, part: Batch, at: TrainingPosition) -> ContrastOutcome:
        """Eq. 1 with the image's own entry as its key."""
        with timed("query"):
            query = self.network("encoder")(part.query)
        if query.device.type == "cpu":
            check_embeddings(query=query)
        return self.contrast(query, self.memory, part, at)

    def after_step(self, batch: Batch, outcomes: Sequence[StepOutcome]) -> None:
        """Write this step's embeddings into the bank."""
        keys = torch.cat([each.key for each in cast("Sequence[ContrastOutcome]", outcomes)])
        options = cast("InstDisOptions", self.config.options)
        self.remember(self.memory, batch, keys, options.bank_momentum)

    def embed(self, images: Tensor) -> Tensor:
        """Return the encoder's embeddings."""
        embeddings: Tensor = self.encoder(images)
        return embeddings
