"""The family around Eq. 1: weights, filters and denominators of other papers, a line or two each.

    weights       how much each real negative counts in the sum, as a constant: logits -> logs
    filters       which negatives are taken for false ones and left out:        logits -> mask
    denominators  how the loss follows from its positive and that sum:          masses -> loss

Each is a factory with its paper's settings as defaults, and one line in a table; any callable with
the same signature may be passed in place of a name. All are ordinary PyTorch on logs: gradients,
also that of a learnt temperature, follow by themselves, and no temperature overflows. Axes: batch,
columns (K shared negatives, then M of the query's own).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Protocol, get_args, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from hardmix.errors import InputError
from hardmix.mixing.checks import check_labels, check_mask
from hardmix.mixing.infonce import (
    ONCE,
    LogWeights,
    Powers,
    WeightLine,
    infonce,
    log_mass,
    pulled,
)
from hardmix.mixing.logits import Logits
from hardmix.mixing.plans import NO_POINT
from hardmix.mixing.queue import equal_and_known
from hardmix.mixing.ranking import CACHE_ELEMENTS, in_one_piece, row_chunks
from hardmix.settings.facts import check_choice

# ---- Weights of real negatives. Mixing, too, is a reweighting of them.


@runtime_checkable
class NegativeWeights(Protocol):
    """The signature of weights: any such callable may be passed in place of a name."""

    def __call__(self, logits: Logits, exclude: Bool[Tensor, "batch columns"] | None) -> LogWeights:
        """Return the log of each negative's weight, or a line that it lies on; None for all 0.

        0 leaves a negative as it is, -inf leaves it out. The last `logits.embeddings.num_own`
        columns are negatives of the query's own. No gradient flows through the result.
        """


def hcl_weights(beta: float = 1.0) -> NegativeWeights:
    """Robinson et al. 2021: exp(beta q.n / tau) over its mean. 0: all weigh the same.

    Together with denominator="debiased" this is their loss; its value is that of the authors'
    code. There gradients flow through the weights, too: denominator="hcl".
    """
    _check_not_negative("beta", beta, "the concentration on hard negatives; the paper uses 1")
    return partial(_hcl_weights, beta=beta)


def hardness_weights(alpha: float = 9.0, where: "Where" = "all") -> NegativeWeights:
    """LLaVE (Lan et al. 2025, Eq. 5): logit + alpha * q.n, the latter constant.

    Args:
        alpha: 9 in LLaVE; EmbeddingGemma (Schechter Vera et al. 2025) uses 5 for the negatives of
            the query's own.
        where: "own" for these only, "shared" for the others only.
    """
    _check_not_negative("alpha", alpha, "the strength; LLaVE uses 9, EmbeddingGemma 5")
    check_choice("where", where, get_args(Where))
    return partial(_hardness_weights, alpha=alpha, where=where)


def given_weights(alpha: float = 1.0) -> NegativeWeights:
    """SimCSE (Gao et al. 2021, Sec. 5): logit + alpha for the hard negatives given with a query.

    The paper writes a factor alpha on exp(logit); as in the authors' code, alpha is its log.
    """
    if not math.isfinite(alpha):
        raise InputError(
            f"alpha={alpha} must be a finite number: it is the log of the weight of the negatives"
            " given with a query; 0 weighs them as all others."
        )
    return partial(_given_weights, alpha=alpha)


def logq_weights(log_probability: Float[Tensor, " items"]) -> NegativeWeights:
    """Yi et al. 2019 (logQ): logit - log Q, the probability that the negative was sampled.

    In the batch and in a queue, popular items are negatives more often than others. The correction
    makes the sum of Eq. 1 an estimate of the one over all items. It is applied to the negatives,
    not to the positive, which was not sampled.

    Args:
        log_probability: log Q of every item, by its id: the log of its share of the training data.
            The loss must know the ids: `MemoryQueue.enqueue(ids=...)` and `loss(..., ids=items)`,
            or `negative_ids`. Negatives without an id are not corrected.
    """
    if log_probability.ndim != 1 or not log_probability.is_floating_point():
        raise InputError(
            f"log_probability has shape {tuple(log_probability.shape)} and dtype"
            f" {log_probability.dtype}: it must hold one floating-point number for each item."
        )
    return partial(_logq_weights, log_probability=log_probability)


def ring_weights(low: float = 90.0, high: float = 99.0) -> NegativeWeights:
    """Wu et al. 2021 (ring): only negatives between two percentiles of the query's similarities.

    The defaults are those of the authors' code: of the tenth that is most similar, all but the
    most similar tenth. As there, the numbers of negatives are rounded down, that of the dropped
    ones within the others. Of equally similar ones, the first slots rank higher. The authors begin
    with low = 0 and raise it during training; here the band is constant.
    """
    if not 0 <= low < high <= 100:
        raise InputError(
            f"low={low} and high={high}: they are percentiles and must satisfy"
            " 0 <= low < high <= 100."
        )
    return partial(_ring_weights, outer=(100 - low) / 100, inner=(100 - high) / (100 - low))


Where = Literal["all", "shared", "own"]

WEIGHTS: dict[str, Callable[..., NegativeWeights]] = {
    "hcl": hcl_weights,
    "hardness": hardness_weights,
    "given": given_weights,
    "ring": ring_weights,
}
"""The weights by name, as in `MochiLoss(weights=...)`; the defaults are the papers' settings."""


def _hcl_weights(logits: Logits, exclude: Tensor | None, beta: float) -> WeightLine | None:
    if beta == 0:
        return None
    with torch.no_grad():
        total = log_mass(_without_points(logits), exclude, powers=((beta, 1.0),)).unsqueeze(1)
        count = _count(logits.real, exclude).clamp(min=1).to(total.dtype)
        offset = count.log() - total
    return WeightLine(beta, offset.masked_fill(offset == torch.inf, 0.0))  # without any negative


def _hardness_weights(
    logits: Logits, exclude: Tensor | None, alpha: float, where: Where
) -> LogWeights:
    if alpha == 0:
        return None
    slope = alpha * _constant(logits.temperature)
    if where == "all":
        return WeightLine(slope)
    added, shared = logits.real.detach() * slope, len(logits.embeddings.negatives)
    if where == "shared":
        added[:, shared:] = 0
    else:
        _check_has_own(logits, 'where="own"')
        added[:, :shared] = 0
    return added


def _given_weights(logits: Logits, exclude: Tensor | None, alpha: float) -> Tensor | None:
    _check_has_own(logits, 'weights="given"')
    if alpha == 0:
        return None
    added = logits.real.new_zeros(logits.real.shape[1])
    added[len(logits.embeddings.negatives) :] = alpha
    return added.expand_as(logits.real)


def _logq_weights(
    logits: Logits, exclude: Tensor | None, log_probability: Tensor
) -> Float[Tensor, "batch columns"]:
    ids = logits.ids
    if ids is None:
        raise InputError(
            "logq_weights needs the ids of the negatives: pass a MemoryQueue that stores them, or"
            " negative_ids; in_batch takes them from ids."
        )
    table = log_probability.to(logits.real)
    added = logits.real.new_zeros(logits.real.shape[1])
    added[: len(ids)] = torch.where(ids >= 0, -table[ids.clamp(min=0)], 0.0)
    return added.expand_as(logits.real)


def _ring_weights(
    logits: Logits, exclude: Tensor | None, outer: float, inner: float
) -> Tensor | None:
    if (outer, inner) == (1.0, 0.0):
        return None
    real = logits.real.detach()
    count = _count(real, exclude)
    within = _rounded_down(count, outer)
    dropped = _rounded_down(within, inner)
    if exclude is None and not in_one_piece(real) and len(real) > 0:
        return _ring_of_all(real, int(within[0]), int(dropped[0]))
    if exclude is not None:
        real = real.masked_fill(exclude, -torch.inf)
    order = real.argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=real.device).expand_as(order)
    )
    outside = (rank < dropped) | (rank >= within)
    return torch.zeros_like(real).masked_fill_(outside, -torch.inf)


def _ring_of_all(real: Tensor, within: int, dropped: int) -> Tensor:
    """Return the same where all queries have as many negatives, by selection in the cache."""
    logs = torch.full_like(real, -torch.inf)
    if within == dropped:
        return logs
    for rows in row_chunks(len(real), real.shape[1], elements=CACHE_ELEMENTS):
        values = real[rows].numpy()
        highest = np.partition(values, -within, axis=1)[:, -within:]
        low = highest[:, :1].copy()
        high = np.partition(highest, -1 - dropped, axis=1)[:, -1 - dropped, None]
        kept = (values >= low) & (values <= high)
        for row in np.flatnonzero(kept.sum(axis=1) != within - dropped):  # ties
            order = np.argsort(-values[row], kind="stable")
            kept[row] = False
            kept[row, order[dropped:within]] = True
        logs[rows].masked_fill_(torch.from_numpy(kept), 0.0)
    return logs


# ---- Filters against false negatives, without labels.


@runtime_checkable
class NegativeFilter(Protocol):
    """The signature of a filter: any such callable may be passed in place of a name."""

    def __call__(self, logits: Logits) -> Bool[Tensor, "batch columns"]:
        """Return the mask of negatives to leave out: they are neither contrasted nor mixed."""


def above_positive(margin: float = 0.0) -> NegativeFilter:
    """GISTEmbed (Solatorio 2024): drop q.n > q.k - margin."""
    if not math.isfinite(margin):
        raise InputError(f"margin={margin} must be a finite number, such as 0.1.")
    return partial(_above_positive, margin=margin)


def share_of_positive(share: float = 0.95) -> NegativeFilter:
    """NV-Retriever (Moreira et al. 2024): drop q.n above a share of q.k.

    Where q.k is negative, its distance below 0 grows by the rest: q.k - (1 - share) |q.k|, as in
    sentence-transformers.
    """
    if not (math.isfinite(share) and share > 0):
        raise InputError(
            f"share={share} must be a finite number above 0: negatives above this share of the"
            " positive's similarity are dropped; NV-Retriever uses 0.95."
        )
    return partial(_above_share, share=share)


def same_labels(
    labels: Int[Tensor, " batch"], of_negatives: Int[Tensor, " K"]
) -> Bool[Tensor, "batch K"]:
    """Return where a negative has the query's label; a negative label is unknown, and matches none.

    Labels may be classes, the numbers of clusters (IFND, Chen et al. 2021: `enqueue(labels=...)`
    with those of the last epoch), or images. Pass the mask as `exclude`, or as `positives`.
    """
    check_labels("labels", labels)
    check_labels("of_negatives", of_negatives, of="negatives")
    return equal_and_known(labels, of_negatives)


FILTERS: dict[str, Callable[..., NegativeFilter]] = {
    "above-positive": above_positive,
    "share-of-positive": share_of_positive,
}
"""The filters by name, as in `MochiLoss(filter_negatives=...)`."""


def _above_positive(logits: Logits, margin: float) -> Tensor:
    limit = logits.positive.detach() - margin / _constant(logits.temperature)
    return logits.real.detach() > limit.unsqueeze(1)


def _above_share(logits: Logits, share: float) -> Tensor:
    positive = logits.positive.detach()
    return logits.real.detach() > (positive - (1 - share) * positive.abs()).unsqueeze(1)


# ---- Denominators.


@dataclass(frozen=True)
class Masses:
    """The masses that a denominator is made of: one log for each query."""

    key: Float[Tensor, " batch"]
    """q.k / tau."""
    positive: Float[Tensor, " batch"]
    """The same, or the mean over several positives."""
    negatives: Float[Tensor, " batch"]
    """log of the sum of weight * exp(q.n / tau) over all negatives and points, or of the
    denominator's `powers` of such sums; -inf without any."""
    logits: Logits
    """The logits behind them; the real ones may have been overwritten."""
    exclude: Bool[Tensor, "batch columns"] | None = None
    """Negatives that were left out."""
    also: Float[Tensor, " batch"] | None = None
    """`negatives` at the denominator's `also_at` times the logits, a constant."""
    inside: Float[Tensor, " batch"] | None = None
    """log of the mean of exp(q.p / tau) over the positives, if the denominator asks for it."""

    @property
    def temperature(self) -> float | Float[Tensor, "..."]:
        """The temperature tau."""
        return self.logits.temperature

    @property
    def number(self) -> Float[Tensor, " batch"]:
        """The number of negatives and points of each query."""
        number = _count(self.logits.real, self.exclude).squeeze(1)
        if self.logits.plan is not None:
            number = number + (self.logits.plan.base != NO_POINT).sum(dim=1)
        return number.to(self.key.dtype)


Formula = Callable[[Masses], Float[Tensor, " batch"]]
"""Returns the loss of each query."""


@dataclass(frozen=True)
class Denominator:
    """A formula, and what it needs to look at. A function of `Masses` alone will do, too."""

    formula: Formula
    """Returns the loss of each query."""
    powers: Powers = ONCE
    """The sums in `Masses.negatives` (see `log_mass`)."""
    also_at: float | None = None
    """A further scale of the logits, for `Masses.also`."""
    several_positives: bool = False
    """Whether it is defined for several positives."""
    looks_inside: bool = False
    """Whether it needs `Masses.inside`."""


def plain() -> Denominator:
    """Eq. 1; with several positives SupCon's L_out (Khosla et al. 2020, Eq. 2)."""
    return Denominator(_plain, several_positives=True)


def supcon_in() -> Denominator:
    """SupCon's L_in (Khosla et al. 2020, Eq. 3): the mean over the positives inside the log."""
    return Denominator(_supcon_in, several_positives=True, looks_inside=True)


def decoupled() -> Denominator:
    """DCL (Yeh et al. 2022, Eq. 6): the positive is not in the denominator."""
    return Denominator(_decoupled)


def decoupled_weighted(sigma: float = 0.5) -> Denominator:
    """DCLW (Yeh et al. 2022, Eq. 7): DCL with von Mises-Fisher weights of the positives.

    The weight 2 - exp(q.k / sigma) over its mean in the batch is a constant, as in lightly's code.
    """
    if not (math.isfinite(sigma) and sigma > 0):
        raise InputError(f"sigma={sigma} must be a finite number above 0; the paper uses 0.5.")
    return Denominator(partial(_decoupled_weighted, sigma=sigma))


def debiased(tau_plus: float = 0.1) -> Denominator:
    """Chuang et al. 2020, Eq. 8: take the expected false negatives out of the sum.

    tau_plus: the probability that a negative has the positive's class; 0 is Eq. 1. As in the
    authors' code, the sum (sum exp(q.n / tau) - tau_plus N exp(q.k / tau)) / (1 - tau_plus) is kept
    above N exp(-1 / tau). N counts negatives and points.
    """
    _check_tau_plus(tau_plus)
    return plain() if tau_plus == 0 else Denominator(partial(_debiased, tau_plus=tau_plus))


def hcl(beta: float = 1.0, tau_plus: float = 0.1) -> Denominator:
    """Robinson et al. 2021 as its authors train it: gradients flow through HCL's weights, too.

    Two masses: sum exp((1 + beta) q.n / tau) over the mean of exp(beta q.n / tau). The points are
    weighted like the negatives. beta = 0 is `debiased`.
    """
    _check_not_negative("beta", beta, "the concentration on hard negatives; the paper uses 1")
    _check_tau_plus(tau_plus)
    if beta == 0:
        return debiased(tau_plus)
    powers = ((1 + beta, 1.0), (beta, -1.0))
    return Denominator(partial(_hcl, tau_plus=tau_plus), powers=powers)


def dual_temperature(factor: float = 10.0) -> Denominator:
    """Zhang et al. 2022: Eq. 1, each query weighted as at a second, higher temperature.

    The weight is the constant (1 - P at factor * tau) / (1 - P at tau), P the positive's
    probability. `factor` is the authors' dt_m; 1 is Eq. 1. It takes one more pass.
    """
    if not (math.isfinite(factor) and factor > 0):
        raise InputError(
            f"factor={factor} must be a finite number above 0: the paper multiplies the temperature"
            " by 10."
        )
    if factor == 1:
        return plain()
    return Denominator(partial(_dual_temperature, scale=1 / factor), also_at=1 / factor)


DENOMINATORS: dict[str, Callable[..., Denominator]] = {
    "infonce": plain,
    "decoupled": decoupled,
    "decoupled-weighted": decoupled_weighted,
    "debiased": debiased,
    "hcl": hcl,
    "dual-temperature": dual_temperature,
    "supcon-in": supcon_in,
}
"""The denominators by name, as in `MochiLoss(denominator=...)`; defaults as in their papers."""


def loss_of_queries(
    denominator: Denominator,
    logits: Logits,
    exclude: Bool[Tensor, "batch columns"] | None = None,
    log_weights: LogWeights = None,
    positives: Bool[Tensor, "batch columns"] | None = None,
    *,
    overwrite: bool = False,
) -> Float[Tensor, " batch"]:
    """Return the loss of each query.

    Args:
        denominator: how the loss follows from the masses.
        logits: logits of the batch.
        exclude: negatives to leave out.
        log_weights: the log of each real negative's weight.
        positives: negatives that are positives too (SupCon), besides the key.
        overwrite: whether nothing reads the logits afterwards.
    """
    check_family(denominator, log_weights, positives, logits.real)
    key, also, powers = logits.positive, None, denominator.powers
    positive, inside = _over_positives(denominator, logits, exclude, positives)
    if denominator.also_at is not None:
        with torch.no_grad():  # before the logits are overwritten
            also = log_mass(logits, exclude, log_weights, powers=((denominator.also_at, 1.0),))
    negatives = log_mass(logits, exclude, log_weights, powers=powers, overwrite=overwrite)
    masses = Masses(key, positive, negatives, logits, exclude, also, inside)
    per_query = denominator.formula(masses)
    if not isinstance(per_query, Tensor) or per_query.shape != key.shape:
        shape = (
            tuple(per_query.shape) if isinstance(per_query, Tensor) else type(per_query).__name__
        )
        raise InputError(
            f"the denominator returned {shape}: it must return the loss of each query, a tensor of"
            f" shape ({len(key)},)."
        )
    return per_query


def check_family(
    denominator: Denominator,
    log_weights: LogWeights,
    positives: Tensor | None,
    real: Tensor,
) -> None:
    """Refuse weights and positives of another shape, or that do not go together."""
    if positives is not None:
        check_mask(positives, len(real), real.shape[1], "positives")
        if not denominator.several_positives:
            raise InputError(
                "several positives, of labels or a mask, with another denominator: they are defined"
                ' for denominator="infonce" (SupCon\'s L_out) and "supcon-in" (L_in); labels go'
                ' with the others if same_label="exclude".'
            )
    expected = tuple(real.shape)
    if isinstance(log_weights, WeightLine):
        log_weights, expected = log_weights.offset, (len(real), 1)
    if log_weights is None:
        return
    if not isinstance(log_weights, Tensor) or not log_weights.is_floating_point():
        what = getattr(log_weights, "dtype", type(log_weights).__name__)
        raise InputError(f"the weights are {what}: they must be logs, a floating-point tensor.")
    if tuple(log_weights.shape) != expected:
        raise InputError(
            f"the weights have shape {tuple(log_weights.shape)} and dtype {log_weights.dtype}: they"
            f" must be logs of shape {expected}, one for each query and negative."
        )


def _plain(masses: Masses) -> Tensor:
    loss = infonce(masses.key, masses.negatives)
    return loss if masses.positive is masses.key else loss + (masses.key - masses.positive)


def _supcon_in(masses: Masses) -> Tensor:
    inside = masses.key if masses.inside is None else masses.inside
    return infonce(masses.key, masses.negatives) + (masses.key - inside)


def _decoupled(masses: Masses) -> Tensor:
    return _without_negatives_zero(masses, masses.negatives - masses.positive)


def _decoupled_weighted(masses: Masses, sigma: float) -> Tensor:
    similarity = masses.key.detach() * _constant(masses.temperature)
    weight = 2 - len(similarity) * (similarity / sigma).softmax(dim=0)
    return _without_negatives_zero(masses, masses.negatives - weight * masses.positive)


def _hcl(masses: Masses, tau_plus: float) -> Tensor:
    number = masses.number
    mean = torch.where(number > 0, masses.negatives + number.log(), -torch.inf)
    masses = replace(masses, negatives=mean)
    return _plain(masses) if tau_plus == 0 else _debiased(masses, tau_plus)


def _debiased(masses: Masses, tau_plus: float) -> Tensor:
    number = masses.number.log()
    excess = number + math.log(tau_plus) + masses.positive - masses.negatives
    below = excess < 0
    kept = torch.where(below, excess, -1.0)  # no gradient, and no NaN, from what is not kept
    sums = masses.negatives + (-torch.expm1(kept)).log() - math.log1p(-tau_plus)
    floor = number - 1 / masses.temperature
    return _plain(replace(masses, negatives=torch.where(below & (sums >= floor), sums, floor)))


def _dual_temperature(masses: Masses, scale: float) -> Tensor:
    assert masses.also is not None
    with torch.no_grad():
        above = logsigmoid(masses.also - masses.key * scale)
        ratio = (above - logsigmoid(masses.negatives - masses.key)).exp()
        ratio = torch.where(masses.negatives == -torch.inf, 1.0, ratio)
    return ratio * _plain(masses)


def _without_negatives_zero(masses: Masses, loss: Tensor) -> Tensor:
    return torch.where(masses.negatives == -torch.inf, 0.0, loss)


def _over_positives(
    denominator: Denominator, logits: Logits, exclude: Tensor | None, positives: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the mean logit of the positives and, if asked for, the log of their mean term."""
    key = logits.positive
    if positives is None:
        return key, key if denominator.looks_inside else None
    if exclude is not None:
        positives = positives & ~exclude
    several = (1 + positives.sum(dim=1)).to(key.dtype)
    vectors = logits.embeddings
    members = pulled(positives.to(key.dtype), vectors.negatives, vectors.own) + vectors.key
    positive = (logits.scaled * members).sum(dim=1) / several
    if not denominator.looks_inside:
        return positive, None
    others = log_mass(_without_points(logits), ~positives)
    return positive, key - logsigmoid(key - others) - several.log()


def _without_points(logits: Logits) -> Logits:
    return logits._replace(synthetic=logits.real[:, :0], plan=None, points=None)


def _constant(temperature: float | Tensor) -> float | Tensor:
    return temperature.detach() if isinstance(temperature, Tensor) else temperature


def _count(real: Tensor, exclude: Tensor | None) -> Int[Tensor, "batch 1"]:
    """Return how many negatives each query has."""
    if exclude is None:
        return torch.full((len(real), 1), real.shape[1], device=real.device)
    return (~exclude).sum(dim=1, keepdim=True)


def _rounded_down(count: Tensor, share: float) -> Tensor:
    """Return a share of a number; 0.1 of 20 is 2, whatever the last bit says."""
    return (count.double() * share + 1e-9).floor().long()


def _check_tau_plus(tau_plus: float) -> None:
    if not 0 <= tau_plus < 1:
        raise InputError(
            f"tau_plus={tau_plus} must be at least 0 and below 1: it is the probability that a"
            " negative has the positive's class, such as 0.1 for ten equal classes."
        )


def _check_not_negative(name: str, value: float, what: str) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise InputError(f"{name}={value} must be a finite number of at least 0: it is {what}.")


def _check_has_own(logits: Logits, what: str) -> None:
    if logits.embeddings.num_own == 0:
        raise InputError(
            f"{what} weighs the negatives of each query's own, and there are none: pass"
            " own_negatives of shape (batch, M, dim)."
        )
