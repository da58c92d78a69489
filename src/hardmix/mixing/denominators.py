"""What a query's loss is made of its positive and of its negatives: one line each.

A denominator is a function of `Masses` (the logits of the positive and of all negatives together,
one number per query each) that returns the loss of each query. It is ordinary PyTorch: gradients,
also that of a learnt temperature, follow by themselves. Logs throughout, so that no temperature
overflows.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from hardmix.errors import InputError
from hardmix.mixing.checks import check_choice, check_mask
from hardmix.mixing.log_sums import WeightLine
from hardmix.mixing.masses import Masses


def denominator_of(denominator: "str | Denominator") -> "Denominator":
    """Return a denominator by its name."""
    if not isinstance(denominator, str):
        return denominator
    more = ", or pass a callable like hardmix.mixing.denominators.infonce"
    check_choice("denominator", denominator, DENOMINATORS, more)
    return DENOMINATORS[denominator]


@runtime_checkable
class Denominator(Protocol):
    """The signature of a denominator: any such callable may be passed in place of a name."""

    def __call__(self, masses: Masses) -> Float[Tensor, " batch"]:
        """Return the loss of each query."""


def infonce(masses: Masses) -> Float[Tensor, " batch"]:
    """Eq. 1; with several positives SupCon's L_out (Khosla et al. 2020, Eq. 2)."""
    whole = -logsigmoid(masses.key - masses.negatives)
    return whole + (masses.key - masses.positive)


def supcon_in(masses: Masses) -> Float[Tensor, " batch"]:
    """SupCon's L_in (Khosla et al. 2020, Eq. 3): the mean over the positives inside the log."""
    return -logsigmoid(masses.key - masses.negatives) + (masses.key - masses.inside())


def decoupled(masses: Masses) -> Float[Tensor, " batch"]:
    """Yeh et al. 2022, Eq. 6: the positive is not in the denominator. 0 without negatives."""
    difference = masses.negatives - masses.positive
    return torch.where(masses.negatives == -torch.inf, 0.0, difference)


def debiased(tau_plus: float = 0.1) -> Denominator:
    """Chuang et al. 2020, Eq. 8: take the expected false negatives out of the sum.

    tau_plus: the probability that a negative has the positive's class; 0 is Eq. 1. As in the
    authors' code, the sum (sum exp(q.n / tau) - tau_plus N exp(q.k / tau)) / (1 - tau_plus) is kept
    above N exp(-1 / tau). N counts negatives and points.
    """
    _check_tau_plus(tau_plus)
    return infonce if tau_plus == 0 else partial(_debiased, tau_plus=tau_plus)


def hcl(beta: float = 1.0, tau_plus: float = 0.1) -> Denominator:
    """Robinson et al. 2021 as in the authors' code, where gradients flow through the weights too.

    With weights="hcl" and denominator="debiased" the loss is the same, but the weights are
    constants. exp(beta q.n / tau) over its mean as weights makes the sum
    N sum exp((1 + beta) q.n / tau) / sum exp(beta q.n / tau): two sums, with one gradient.
    """
    _check_tau_plus(tau_plus)
    check_not_negative("beta", beta, "the concentration on hard negatives; the paper uses 1")
    return debiased(tau_plus) if beta == 0 else Weighted(debiased(tau_plus), beta)


def dual_temperature(factor: float = 10.0) -> Denominator:
    """Zhang et al. 2022, Eq. 8: weigh queries as at a higher temperature.

    Eq. 1 times the constant (1 - P at factor * tau) / (1 - P at tau), P the positive's
    probability. `factor` is the authors' dt_m; 1 is Eq. 1. Takes one more pass.
    """
    if not (math.isfinite(factor) and factor > 0):
        raise InputError(
            f"factor={factor} must be a finite number above 0: the paper multiplies the temperature"
            " by 10."
        )
    return infonce if factor == 1 else DualTemperature(factor)


@dataclass(frozen=True)
class Weighted:
    """A denominator of masses in which HCL's weights stand, with gradients: `contrast` looks."""

    denominator: Denominator
    beta: float

    def __call__(self, masses: Masses) -> Float[Tensor, " batch"]:
        """Return the loss of each query."""
        return self.denominator(masses)


@dataclass(frozen=True)
class DualTemperature:
    """`dual_temperature`, which needs the sum at a second temperature."""

    also_at: float

    def __call__(self, masses: Masses) -> Float[Tensor, " batch"]:
        """Return the loss of each query."""
        with torch.no_grad():
            also = masses.at(self.also_at) if masses.also is None else masses.also
            above = logsigmoid(also - masses.key / self.also_at)
            ratio = (above - logsigmoid(masses.negatives - masses.key)).exp()
            ratio = torch.where(masses.negatives == -torch.inf, 1.0, ratio)
        return ratio * infonce(masses)


def looks_once(denominator: Denominator) -> bool:
    """Whether a denominator needs the similarities no more than once: one of ours."""
    ours = isinstance(denominator, Weighted | DualTemperature)
    debias = getattr(denominator, "func", None) is _debiased
    return ours or debias or denominator in (infonce, decoupled)


def _debiased(masses: Masses, tau_plus: float) -> Tensor:
    excess = masses.number.log() + math.log(tau_plus) + masses.positive - masses.negatives
    below = excess < 0
    kept = torch.where(below, excess, -1.0)  # no gradient, and no NaN, from what is not kept
    sums = masses.negatives + (-torch.expm1(kept)).log() - math.log1p(-tau_plus)
    floor = masses.number.log() - 1 / masses.temperature
    return infonce(masses._replace(negatives=torch.where(below & (sums >= floor), sums, floor)))


def _check_tau_plus(tau_plus: float) -> None:
    if not 0 <= tau_plus < 1:
        raise InputError(
            f"tau_plus={tau_plus} must be at least 0 and below 1: it is the probability that a"
            " negative has the positive's class, such as 0.1 for ten equal classes."
        )


def check_not_negative(name: str, value: float, what: str) -> None:
    """Refuse a number that is negative or not finite."""
    if not (math.isfinite(value) and value >= 0):
        raise InputError(f"{name}={value} must be a finite number of at least 0: it is {what}.")


SEVERAL_POSITIVES = (infonce, supcon_in)
"""Denominators that are defined for several positives."""


def check_family(
    denominator: Denominator,
    log_weights: Tensor | WeightLine | None,
    positives: Tensor | None,
    batch: int,
    columns: int,
) -> None:
    """Refuse weights and positives of another shape, or that do not go together."""
    check_mask(positives, batch, columns, "positives")
    if positives is not None and denominator not in SEVERAL_POSITIVES:
        raise InputError(
            "positives with another denominator: several positives are defined for"
            ' denominator="infonce" (SupCon\'s L_out) and "supcon-in" (L_in).'
        )
    if isinstance(log_weights, WeightLine):
        log_weights = log_weights.offset
        columns = 1
    if log_weights is None:
        return
    if tuple(log_weights.shape) != (batch, columns) or not log_weights.is_floating_point():
        raise InputError(
            f"the weights have shape {tuple(log_weights.shape)} and dtype {log_weights.dtype}: they"
            f" must be logs of shape ({batch}, {columns}), one for each query and negative."
        )


DENOMINATORS: dict[str, Denominator] = {
    "infonce": infonce,
    "decoupled": decoupled,
    "debiased": debiased(),
    "hcl": hcl(),
    "dual-temperature": dual_temperature(),
    "supcon-in": supcon_in,
}
"""The denominators by name, with their papers' settings, as in `MochiLoss(denominator=...)`."""
