"""Weights of real negatives: the family's primitive. Mixing too is a reweighting of them.

A weight is given by its log, which is added to the negative's logit q.n / tau: 0 leaves it as it
is, -inf leaves it out. Weights are constants: no gradient flows through them. Each is one
elementwise pass over the (batch, K) similarities, except the ring, which ranks them.
"""

import math
from functools import partial
from typing import Literal, Protocol, get_args, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hardmix.errors import InputError
from hardmix.mixing.checks import check_choice
from hardmix.mixing.denominators import check_not_negative

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
    ) -> Float[Tensor, "batch columns"] | None:
        """Return the log of each negative's weight; None for all 0.

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


def ring_weights(low: float = 0.0, high: float = 90.0) -> NegativeWeights:
    """Wu et al. 2021 (ring): only negatives between two percentiles of the query's similarities.

    The paper gives no single band; the defaults drop the 10 % that are most similar.
    """
    if not 0 <= low < high <= 100:
        raise InputError(
            f"low={low} and high={high}: they are percentiles and must satisfy"
            " 0 <= low < high <= 100."
        )
    return partial(_ring, low=low / 100, high=high / 100)


def _hcl(
    similarity: Tensor,
    *,
    temperature: float | Tensor,
    exclude: Tensor | None,
    beta: float,
    **_: object,
) -> Tensor | None:
    if beta == 0:
        return None
    logits = similarity * (beta / temperature)
    if exclude is None:
        return logits.log_softmax(dim=1).add_(math.log(similarity.shape[1]))
    count = (~exclude).sum(dim=1, keepdim=True).to(similarity.dtype)
    shares = logits.masked_fill_(exclude, -torch.inf).log_softmax(dim=1)
    return torch.where(exclude, 0.0, shares + count.log())


def _hardness(
    similarity: Tensor, *, num_own: int, alpha: float, where: Where, **_: object
) -> Tensor | None:
    if alpha == 0:
        return None
    added = alpha * similarity
    shared = similarity.shape[1] - num_own
    if where == "shared":
        added[:, shared:] = 0
    elif where == "own":
        _check_own(num_own, 'where="own"')
        added[:, :shared] = 0
    return added


def _given(similarity: Tensor, *, num_own: int, alpha: float, **_: object) -> Tensor | None:
    _check_own(num_own, 'weights="given"')
    if alpha == 0:
        return None
    added = torch.zeros_like(similarity)
    added[:, similarity.shape[1] - num_own :] = alpha
    return added


def _ring(
    similarity: Tensor, *, exclude: Tensor | None, low: float, high: float, **_: object
) -> Tensor | None:
    if (low, high) == (0.0, 1.0):
        return None
    width = similarity.shape[1]
    if exclude is None:
        count = torch.full((len(similarity), 1), width, device=similarity.device)
    else:
        count = (~exclude).sum(dim=1, keepdim=True)
        similarity = similarity.masked_fill(exclude, -torch.inf)
    ranked = similarity.sort(dim=1).values
    bounds = [_percentile(ranked, count, share) for share in (low, high)]
    outside = (similarity < bounds[0]) | (similarity > bounds[1])
    return torch.zeros_like(similarity).masked_fill_(outside, -torch.inf)


def _percentile(ranked: Tensor, count: Tensor, share: float) -> Tensor:
    """NumPy's percentile, of the last `count` values of each ascending row."""
    width = ranked.shape[1]
    place = share * (count - 1).clamp(min=0).to(ranked.dtype)
    lower = place.floor().long()
    first = (width - count).clamp(max=width - 1)
    below = ranked.gather(1, (first + lower).clamp(max=width - 1))
    above = ranked.gather(1, (first + lower + 1).clamp(max=width - 1))
    return torch.where(place > lower, torch.lerp(below, above, place - lower), below)


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
