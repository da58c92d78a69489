"""MoCo + Image Mixture (Shen et al. 2020, Un-Mix; the paper's iMix): mixed images have two keys.

A query is also mixed with the query of another image of the batch, by lambda in (0, 1), and then
contrasted with both keys:

    L = L(q, k) + lambda L(q_mixed, k) + (1 - lambda) L(q_mixed, k_partner)

Read in szq0214/Un-Mix (main_moco_unmix.py, moco/builder.py): partners are the reversed batch, keys
are those of unmixed images, mixed queries pass the encoder in a batch of their own, all terms use
one queue and temperature. The authors reverse the embeddings of the mixed queries instead of the
keys: the mean is the same, and keys need no gradient. Decided: the batch of all processes is
reversed, not each one's own, so that results do not depend on their number. With `mix.*`, points
join all three terms.
"""

from typing import cast

from hardmix.data.batches import Batch
from hardmix.methods.base import TrainingPosition
from hardmix.methods.contrast_measures import ContrastOutcome
from hardmix.methods.image_mixture import draw_mixture, mix_images, partners_of, reversed_order
from hardmix.methods.moco import Moco
from hardmix.models.encoders import shuffle_across
from hardmix.runtime.profile import timed
from hardmix.settings.method_options import UnmixOptions


class Unmix(Moco):
    """MoCo, with queries that are also mixed as images."""

    Options = UnmixOptions

    def loss(self, part: Batch, at: TrainingPosition) -> ContrastOutcome:
        """MoCo's loss of the queries, and of mixed ones with both keys."""
        options, images = cast("UnmixOptions", self.config.options), part.query
        query, key = self.encode(part, at)
        outcome = self.compare(query, key, part, at)
        size = (images.shape[2], images.shape[3])
        mixture = draw_mixture(self.config.train.seed, at, size, options.beta, options.mixup)
        partner, order = partners_of(part), reversed_order(len(key))
        with timed("query"):
            query = self.network("query")(mix_images(images, partner.query, mixture))
        own = self.compare(query, key, part, at, purpose=1).loss
        other = self.compare(query, shuffle_across(key, order), partner, at, purpose=2).loss
        outcome.loss = outcome.loss + mixture.share * own + (1 - mixture.share) * other
        return outcome
