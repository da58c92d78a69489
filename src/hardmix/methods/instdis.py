"""Instance discrimination (Wu et al. 2018): one view, and a bank of all images' embeddings.

    L = -log exp(q.v_i / tau) / ( exp(q.v_i / tau) + sum_j exp(q.v_j / tau) )

v_i is the entry of the query's own image, and j are K others (image_bank.py). Read in
zhirongw/lemniscate.pytorch, which uses NCE with a constant for the denominator, and in PyContrast,
which replaces NCE by the softmax above and crops from 0.08. The paper's 59.5 is PyContrast's, and
this is its method. With `mix.*`, points are made from the K entries.
"""

from hardmix.data.batches import Batch
from hardmix.methods.base import Materials, TrainingPosition, check_embeddings
from hardmix.methods.contrast_measures import ContrastOutcome
from hardmix.methods.image_bank import BankMethod, ImageBank
from hardmix.runtime.profile import timed
from hardmix.settings.config import PretrainConfig
from hardmix.settings.methods import InstDisOptions


class InstDis(BankMethod):
    """One encoder and a bank."""

    options: InstDisOptions
    views = 1

    def __init__(self, config: PretrainConfig, materials: Materials) -> None:
        super().__init__(config, materials)
        self.encoder = self.new_encoder()
        self.memory = ImageBank(config, materials)

    def loss(self, part: Batch, at: TrainingPosition) -> ContrastOutcome:
        """Return Eq. 1 with the image's own entry as its key."""
        with timed("query"):
            query = self.network("encoder")(part.query)
        check_embeddings(query=query)
        return self.contrast(query, self.memory, part, at)
