"""Weights of real negatives: the family's primitive. Mixing too is a reweighting of them.

A weight is given by its log, which is added to the negative's logit q.n / tau: 0 leaves it as it
is, -inf leaves it out. Weights are constants: no gradient flows through them. Those of HCL and
hardness weighting are lines of q.n (`WeightLine`): they change the logit's factor, and take no
tensor of their own. The ring selects by rank.
"""

import math
from functools import partial
from typing import Literal, Protocol, get_args, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hardmix.errors import InputError
from hardmix.mixing.checks import check_choice
from hardmix.mixing.denominators import check_not_negative
from hardmix.mixing.log_sums import WeightLine, log_sum
from hardmix.mixing.ranking import CACHE_ELEMENTS, in_one_piece, row_chunks

Where = Literal["all", "shared", "own"]


@runtime_checkable
class NegativeWeights(Protocol):
    """The signature of weights: any such callable may be passed in place of a name."""

    def __call__(
        self,
        similarity: Float[Tensor, "batch columns"],
        *,
        positive: Float[Tensor, " batch"],
        temperature: float | Float[Tensor, "..."],
        exclude: Bool[Tensor, "batch columns"] | None,
        num_own: int,
    ) -> Float[Tensor, "batch columns"] | WeightLine | None:
        """Return the log of each negative's weight, or a line that it lies on; None for all 0.

        `similarity` is q.n before the temperature, `positive` q.k, both detached. The last
        `num_own` columns are negatives of the query's own.
        """


def hcl_weights(beta: float = 1.0) -> NegativeWeights:
    """Robinson et al. 2021: exp(beta q.n / tau) over its mean. 0: all weigh the same.

    Together with denominator="debiased" this is their loss; its value is that of the authors'
    code. There gradients flow through the weights, too: denominator="hcl".
    """
    check_not_negative("beta", beta, "the concentration on hard negatives; the paper uses 1")
    return partial(_hcl, beta=beta)


def hardness_weights(alpha: float = 9.0, where: Where = "all") -> NegativeWeights:
    """LLaVE (Lan et al. 2025, Eq. 5): logit + alpha * q.n, the latter constant.

    alpha: 9 in LLaVE; EmbeddingGemma (Schechter Vera et al. 2025) uses 5 for the negatives of the
    query's own. where: "own" for these only, "shared" for the others only.
    """
    check_not_negative("alpha", alpha, "the strength; LLaVE uses 9, EmbeddingGemma 5")
    check_choice("where", where, get_args(Where))
    return partial(_hardness, alpha=alpha, where=where)


def given_weights(alpha: float = 1.0) -> NegativeWeights:
    """SimCSE (Gao et al. 2021, Sec. 5): logit + alpha for the hard negatives given with a query.

    The paper writes a factor alpha on exp(logit); as in the authors' code, alpha is its log.
    """
    if not math.isfinite(alpha):
        raise InputError(
            f"alpha={alpha} must be a finite number: it is the log of the weight of the negatives"
            " given with a query; 0 weighs them as all others."
        )
    return partial(_given, alpha=alpha)


def ring_weights(low: float = 90.0, high: float = 99.0) -> NegativeWeights:
    """Wu et al. 2021 (ring): only negatives between two percentiles of the query's similarities.

    The defaults are those of the authors' code: of the tenth that is most similar, all but the
    most similar tenth. As there, the numbers of negatives are rounded down, that of the dropped
    ones within the others. The authors begin with low = 0 and raise it during training; here the
    band is constant.
    """
    if not 0 <= low < high <= 100:
        raise InputError(
            f"low={low} and high={high}: they are percentiles and must satisfy"
            " 0 <= low < high <= 100."
        )
    return partial(_ring, outer=(100 - low) / 100, inner=(100 - high) / (100 - low))


def _hcl(
    similarity: Tensor,
    *,
    temperature: float | Tensor,
    exclude: Tensor | None,
    beta: float,
    **_: object,
) -> WeightLine | None:
    if beta == 0:
        return None
    slope = beta / temperature
    count = _number(similarity, exclude).clamp(min=1).to(similarity.dtype)
    return WeightLine(slope, _offset(count.log() - log_sum(similarity, slope, exclude)))


def _offset(difference: Tensor) -> Tensor:
    """0 for a query without negatives, whose sum is 0."""
    return difference.masked_fill(difference == torch.inf, 0.0)


def _hardness(
    similarity: Tensor, *, num_own: int, alpha: float, where: Where, **_: object
) -> Tensor | WeightLine | None:
    if alpha == 0:
        return None
    if where == "all":
        return WeightLine(alpha)
    added = alpha * similarity
    shared = similarity.shape[1] - num_own
    if where == "shared":
        added[:, shared:] = 0
    else:
        _check_own(num_own, 'where="own"')
        added[:, :shared] = 0
    return added


def _given(similarity: Tensor, *, num_own: int, alpha: float, **_: object) -> Tensor | None:
    _check_own(num_own, 'weights="given"')
    if alpha == 0:
        return None
    added = similarity.new_zeros(similarity.shape[1])
    added[similarity.shape[1] - num_own :] = alpha
    return added.expand_as(similarity)


def _ring(
    similarity: Tensor, *, exclude: Tensor | None, outer: float, inner: float, **_: object
) -> Tensor | None:
    if (outer, inner) == (1.0, 0.0):
        return None
    count = _number(similarity, exclude)
    within = _rounded_down(count, outer)
    dropped = _rounded_down(within, inner)
    if exclude is None and not in_one_piece(similarity) and len(similarity) > 0:
        return _ring_of_all(similarity, int(within[0]), int(dropped[0]))
    if exclude is not None:
        similarity = similarity.masked_fill(exclude, -torch.inf)
    ranked, width = similarity.sort(dim=1).values, similarity.shape[1]
    low = ranked.gather(1, (width - within).clamp(max=width - 1))
    high = ranked.gather(1, width - 1 - dropped)
    outside = (similarity < low) | (similarity > high) | (within == 0)
    return torch.zeros_like(similarity).masked_fill_(outside, -torch.inf)


def _ring_of_all(similarity: Tensor, within: int, dropped: int) -> Tensor:
    """The same where all queries have as many negatives: by selection, in cache-sized parts."""
    logs = torch.full_like(similarity, -torch.inf)
    if within == 0:
        return logs
    for rows in row_chunks(len(similarity), similarity.shape[1], elements=CACHE_ELEMENTS):
        values = similarity[rows].numpy()
        highest = np.partition(values, -within, axis=1)[:, -within:]
        low = highest[:, :1].copy()
        high = np.partition(highest, -1 - dropped, axis=1)[:, -1 - dropped, None]
        logs[rows].masked_fill_(torch.from_numpy((values >= low) & (values <= high)), 0.0)
    return logs


def _number(similarity: Tensor, exclude: Tensor | None) -> Tensor:
    """How many negatives each query has."""
    if exclude is None:
        batch, width = similarity.shape
        return torch.full((batch, 1), width, device=similarity.device)
    return (~exclude).sum(dim=1, keepdim=True)


def _rounded_down(count: Tensor, share: float) -> Tensor:
    """A share of a number; 0.1 of 20 is 2, whatever the last bit says."""
    return (count.double() * share + 1e-9).floor().long()


def _check_own(num_own: int, what: str) -> None:
    if num_own == 0:
        raise InputError(
            f"{what} weighs the negatives of each query's own, and there are none: pass"
            " own_negatives of shape (batch, M, dim)."
        )


WEIGHTS: dict[str, NegativeWeights] = {
    "hcl": hcl_weights(),
    "hardness": hardness_weights(),
    "given": given_weights(),
    "ring": ring_weights(),
}
"""The weights by name, with their papers' settings, as in `MochiLoss(weights=...)`."""
