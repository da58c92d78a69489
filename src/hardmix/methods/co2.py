"""CO2 (Wei et al. 2021): MoCo whose queries and keys must agree on all other images, too.

Q and P are the distributions of query and key over the queue's keys, at a temperature of their
own. The key's is a soft label for the query's, and both directions count:

    L = L_MoCo + alpha / 2 [ KL(P || Q) + KL(Q || P) ],
    Q_i = exp(q.n_i / tau') / sum_j exp(q.n_j / tau'),  P_i likewise with k

The authors' code is not public; lightly's CO2Regularizer was read, and a test compares with it.
Decided: the sums are over the queue's keys alone, as in the paper's Eq. 2 and 3; lightly also has
q.k as the first entry of both. The key's side has no gradient, as in MoCo. Negatives that are
excluded (oracle, same image, unfilled slots) take no part. With `mix.*`, points join MoCo's loss
and not the distributions.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import kl_div

from hardmix.data.batches import Batch
from hardmix.methods.base import TrainingPosition
from hardmix.methods.contrast_measures import ContrastOutcome
from hardmix.methods.moco import Moco
from hardmix.runtime.profile import timed
from hardmix.settings.methods import Co2Options


class Co2(Moco):
    """MoCo with a consistency term."""

    options: Co2Options

    def loss(self, part: Batch, at: TrainingPosition) -> ContrastOutcome:
        """Return MoCo's loss plus the divergence of query and key over the queue."""
        query, key = self.encode(part, at)
        outcome = self.compare(query, key, part, at)
        with timed("loss"), torch.autocast(query.device.type, enabled=False):
            hidden = outcome.exclude
            unfilled = self.memory.unfilled()
            if unfilled is not None and self.memory.start == "empty":
                unfilled = unfilled.expand(len(query), -1)
                hidden = unfilled if hidden is None else hidden | unfilled
            logits = [rows @ self.memory.keys.T / self.options.temperature for rows in (query, key)]
            if hidden is not None:
                logits = [each.masked_fill(hidden, -1e4) for each in logits]  # -inf would be NaN
            term = consistency(*logits)
        outcome.measures["consistency"] = term.detach()
        outcome.loss = outcome.loss + self.options.weight * term
        return outcome


def consistency(
    first: Float[Tensor, "batch K"], second: Float[Tensor, "batch K"]
) -> Float[Tensor, ""]:
    """Return half the symmetric KL divergence of two rows' softmaxes, averaged over the batch."""
    one, other = first.log_softmax(dim=1), second.log_softmax(dim=1)
    both = kl_div(one, other, reduction="batchmean", log_target=True)
    both = both + kl_div(other, one, reduction="batchmean", log_target=True)
    return both / 2
