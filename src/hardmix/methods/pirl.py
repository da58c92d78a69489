"""PIRL (Misra and van der Maaten 2020): an image and its jigsaw share their entry in the bank.

    L = (1 - lambda) L(f(I), v_I) + lambda L(g(tiles of I), v_I)

L is InstDis's loss with the image's entry v_I. The jigsaw is another crop, cut into 3 x 3 cells; a
tile is cut from each cell at a random place, and the nine tiles' embeddings, in random order, are
concatenated and projected. Read in PyContrast (build_backbone.py, util.py), whose 61.7 is the
paper's: a jigsaw of 255 pixels from a crop of 0.6 to 1 with a flip and no colour change, tiles of
64, a separate head for tiles, softmax instead of NCE, the same negatives for both terms, and only
the image's embedding written into the bank. Decided: tiles are shuffled before the encoder instead
of after it, which is the same. With `mix.*`, points join both terms.
"""

from typing import cast

import torch
from torch import Tensor

from hardmix.data.batches import Batch
from hardmix.data.views import ViewKind
from hardmix.methods.base import Materials, TrainingPosition, check_embeddings
from hardmix.methods.contrast_measures import ContrastOutcome
from hardmix.methods.image_bank import BankMethod, ImageBank
from hardmix.methods.jigsaw import TILES, JigsawEncoder, draw_tiles, jigsaw_view
from hardmix.runtime.profile import timed
from hardmix.settings.config import PretrainConfig
from hardmix.settings.methods import PirlOptions


class Pirl(BankMethod):
    """One encoder, a bank, and jigsaws."""

    options: PirlOptions

    def __init__(self, config: PretrainConfig, materials: Materials) -> None:
        super().__init__(config, materials)
        self.encoder = JigsawEncoder(self.new_encoder(), config.model.dim, config.model.head)
        self.memory = ImageBank(config, materials)

    @classmethod
    def view_kinds(cls, config: PretrainConfig) -> tuple[ViewKind, ...]:
        """Return a view as data.* says, and one to be cut into tiles."""
        options = cast("PirlOptions", config.options)
        return ViewKind(), jigsaw_view(options.jigsaw_size)

    def example(self, name: str) -> tuple[Tensor, ...]:
        """Return two black images, and their tiles."""
        (images,) = super().example(name)
        size = self.options.tile_size
        return images, images.new_zeros(2, TILES, images.shape[1], size, size)

    def loss(self, part: Batch, at: TrainingPosition) -> ContrastOutcome:
        """Return both terms, with the same entries of the bank as negatives."""
        tiles = draw_tiles(part.key, self.options.tile_size, self.config.train.seed, at)
        with timed("query"):
            query, jigsaw = self.network("encoder")(part.query, tiles)
        check_embeddings(query=query, jigsaw=jigsaw)
        outcome = self.contrast(query, self.memory, part, at)
        term = self.contrast(jigsaw, self.memory, part, at, purpose=1).loss
        outcome.measures["jigsaw_loss"] = term.detach()
        outcome.loss = torch.lerp(outcome.loss, term, self.options.weight)
        return outcome
