"""CMC (Tian et al. 2020): lightness and colours of an image are each other's positive.

Two encoders of half the width see L and ab of one crop; each has a bank, and is contrasted with
the other's:

    L = L(z_L, bank_ab) + L(z_ab, bank_L),   L(q, bank): the softmax of instdis.py

Read in HobbitLong/CMC (train_CMC.py, NCE/NCEAverage.py; NCE or softmax, K 16384, Lab) and in
PyContrast, which uses the softmax. Decided: the trunk turns RGB into Lab itself (models/lab_pair,
`model.backbone` lab-NAME), so that every evaluation and export takes it as it takes any other; its
features are those of both halves. With `cmc.unmix`, images are also mixed with the reversed batch
(unmix.py), in RGB, and both terms are added for the mixed ones. With `mix.*`, points are made
within a bank and so within a modality: a query is of the other one, and points with it are refused
unless they are made with the key (`mix.strategy` mixed-with-key).
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import normalize

from hardmix.data.batches import Batch
from hardmix.errors import InputError
from hardmix.methods.base import Materials, TrainingPosition, check_embeddings
from hardmix.methods.contrast_measures import ContrastOutcome
from hardmix.methods.image_bank import BankMethod, ImageBank
from hardmix.methods.unmix import draw_mixture, mix_images, partners_of
from hardmix.models.encoders import HEADS
from hardmix.models.lab_pair import LabPair
from hardmix.runtime.profile import timed
from hardmix.settings.config import PretrainConfig
from hardmix.settings.methods import CmcOptions, UnmixOptions
from hardmix.settings.named_choices import Head


class LabEncoder(nn.Module):
    """A network from images to two embeddings of unit length, of L and of ab."""

    def __init__(self, trunk: LabPair, width: int, dim: int, head: Head) -> None:
        super().__init__()
        self.trunk = trunk
        self.heads = nn.ModuleList(HEADS[head](width // 2, dim) for _ in range(2))

    def forward(
        self, images: Float[Tensor, "batch 3 y x"]
    ) -> tuple[Float[Tensor, "batch dim"], Float[Tensor, "batch dim"]]:
        """Return both embeddings, in float32."""
        features = self.trunk(images).chunk(2, dim=1)
        light, colours = (
            normalize(head(half).float(), dim=1)
            for head, half in zip(self.heads, features, strict=True)
        )
        return light, colours


class Cmc(BankMethod):
    """Two encoders of half the width, and a bank for each."""

    options: CmcOptions
    views = 1

    def __init__(self, config: PretrainConfig, materials: Materials) -> None:
        super().__init__(config, materials)
        model, encoder = config.model, self.new_encoder()
        if not isinstance(encoder.trunk, LabPair):
            raise InputError(
                f"model.backbone={model.backbone} with method=cmc: it needs two encoders, of L and"
                " of ab; set model.backbone to lab-NAME, such as lab-resnet50 or lab-small."
            )
        self.encoder = LabEncoder(encoder.trunk, encoder.width, model.dim, model.head)
        self.light = ImageBank(config, materials, "bank of L")
        self.memory = ImageBank(config, materials, "bank of ab")

    def loss(self, part: Batch, at: TrainingPosition) -> ContrastOutcome:
        """Return both directions, of the images and, with cmc.unmix, of mixed ones."""
        with timed("query"):
            light, colours = self.network("encoder")(part.query)
        check_embeddings(L=light, ab=colours)
        outcome = self._both_ways(light, colours, part, at, 0)
        outcome.key = torch.cat([light, colours], dim=1).detach()
        if self.options.unmix:
            outcome.loss = outcome.loss + self._mixed(part, at)
        return outcome

    def _both_ways(
        self, light: Tensor, colours: Tensor, part: Batch, at: TrainingPosition, purpose: int
    ) -> ContrastOutcome:
        """Return L's contrast with the bank of ab; its loss is the sum of both directions."""
        outcome = self.contrast(light, self.memory, part, at, purpose)
        other = self.contrast(colours, self.light, part, at, purpose + 1)
        outcome.loss = outcome.loss + other.loss
        return outcome

    def _mixed(self, part: Batch, at: TrainingPosition) -> Tensor:
        """Return the loss of mixed images with their own entries and with their partners'."""
        usual, images = UnmixOptions(), part.query
        size = (images.shape[2], images.shape[3])
        mixture = draw_mixture(self.config.train.seed, at, size, usual.beta, usual.mixup)
        partner = partners_of(part)
        with timed("query"):
            mixed = mix_images(images, partner.query, mixture)
            light, colours = self.network("encoder")(mixed)
        own = self._both_ways(light, colours, part, at, 2).loss
        other = self._both_ways(light, colours, partner, at, 4).loss
        return mixture.share * own + (1 - mixture.share) * other

    def banks(self) -> dict[str, ImageBank]:
        """Return both banks."""
        return {"bank of L": self.light, "bank of ab": self.memory}

    def embed(self, images: Tensor) -> Tensor:
        """Return the embeddings of L, which are contrasted with the bank of ab."""
        light: Tensor = self.encoder(images)[0]
        return light
