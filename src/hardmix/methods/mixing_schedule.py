"""When and how a run mixes: its loss at any epoch, and the random numbers of a step.

For every method that has negatives.
"""

from functools import partial
from typing import Literal, NamedTuple

from hardmix.errors import InputError
from hardmix.methods.base import TrainingPosition
from hardmix.methods.row_generators import RowDraws, RowsGenerator
from hardmix.mixing.denominators import (
    Denominator,
    debiased,
    decoupled,
    dual_temperature,
    hcl,
    infonce,
)
from hardmix.mixing.filters import NegativeFilter, above_positive, share_of_positive
from hardmix.mixing.loss import MochiLoss
from hardmix.mixing.negative_weights import (
    NegativeWeights,
    hardness_weights,
    hcl_weights,
    ring_weights,
)
from hardmix.mixing.plans import Strategy
from hardmix.mixing.synco import plan_synco
from hardmix.mixing.transformations import FeatureTransformation
from hardmix.mixing.variants import STRATEGIES, plan_fixed_percentage, plan_softmax_sampled
from hardmix.runtime.distributed import rank
from hardmix.runtime.random_numbers import seed_of
from hardmix.settings.config import PretrainConfig
from hardmix.settings.loss_options import LossConfig, MixConfig
from hardmix.settings.schedules import decreasing, mixing_started


class MixingSchedule:
    """MoCHi's part of a run: strategy, warm-up, draws."""

    def __init__(self, config: PretrainConfig, own: Strategy | None = None) -> None:
        self.config, self._own = config, own
        self.wanted = config.uses("mix.num_pairs")
        """Whether the method mixes at all."""
        choose_strategy(config.mix, 0, config.train.epochs, own)  # said before any work

    def loss(self, epoch: int) -> MochiLoss:
        """Return the loss with the run's settings at this epoch."""
        mix, train = self.config.mix, self.config.train
        family = choose_family(self.config.loss)
        return MochiLoss(
            mix.num_hardest,
            mix.num_pairs,
            mix.num_with_query,
            train.temperature,
            strategy=choose_strategy(mix, epoch, train.epochs, self._own),
            real_negatives=mix.real_negatives,
            through_query=mix.through_query,
            weights=family.weights,
            denominator=family.denominator,
            filter_negatives=family.filter_negatives,
        )

    def started(self, at: TrainingPosition) -> bool:
        """Return whether mixing has started: not during the warm-up (Sec. 5)."""
        mix = self.config.mix
        if mix.warm_up_steps is not None:
            return self.wanted and mixing_started(at.step, mix.warm_up_steps)
        return self.wanted and mixing_started(at.epoch, mix.warm_up_epochs)

    def generator(self, at: TrainingPosition, purpose: int = 0) -> RowsGenerator | RowDraws:
        """Return what draws a step's numbers: they do not depend on the number of processes.

        A generator for an own strategy, which may ask PyTorch for numbers with it, and for one
        that draws for the whole batch. `purpose` distinguishes the draws of several losses of one
        step.
        """
        seed = seed_of("mixing", self.config.train.seed, at.step, at.part, purpose)
        chosen = STRATEGIES.get(self.config.mix.strategy)
        if self._own is None and not isinstance(chosen, FeatureTransformation):
            return RowDraws(seed, rank())
        generator = RowsGenerator()
        generator.manual_seed(seed)
        generator.part = rank()
        return generator


class Family(NamedTuple):
    """The choices around MoCHi's points."""

    weights: NegativeWeights | Literal["none"]
    denominator: Denominator
    filter_negatives: NegativeFilter | Literal["none"]


def choose_family(loss: LossConfig) -> Family:
    """Return weights, denominator and filter by name, with their settings."""
    weights: dict[str, NegativeWeights | Literal["none"]] = {
        "none": "none",
        "hcl": hcl_weights(loss.beta),
        "hardness": hardness_weights(loss.alpha),
        "ring": ring_weights(loss.ring_low, loss.ring_high),
    }
    denominators: dict[str, Denominator] = {
        "infonce": infonce,
        "decoupled": decoupled,
        "debiased": debiased(loss.tau_plus),
        "hcl": hcl(loss.beta, loss.tau_plus),
        "dual-temperature": dual_temperature(loss.factor),
    }
    filters: dict[str, NegativeFilter | Literal["none"]] = {
        "none": "none",
        "above-positive": above_positive(loss.margin),
        "share-of-positive": share_of_positive(loss.share),
        "same-cluster": "none",  # the method's mask: the loss knows no images
    }
    return Family(weights[loss.weights], denominators[loss.denominator], filters[loss.filter])


def choose_strategy(
    mix: MixConfig, epoch: float, epochs: float, own: Strategy | None = None
) -> Strategy:
    """Return the strategy by name, with its options at this epoch."""
    if mix.strategy == "own":
        if own is None:
            raise InputError(
                "mix.strategy=own is a function that is not saved with the run: pass it again, as"
                " pretrain(..., strategy=...), or choose a strategy by name."
            )
        return own
    if mix.strategy == "softmax-sampled":
        return partial(plan_softmax_sampled, sampling_temperature=mix.sampling_temperature)
    if mix.strategy == "fixed-percentage":
        end = mix.percentage if mix.percentage_end is None else mix.percentage_end
        percentage = decreasing(epoch, epochs, mix.percentage, end)
        return partial(plan_fixed_percentage, percentage=percentage)
    if mix.strategy == "synco":
        return partial(
            plan_synco,
            num_extrapolated=mix.num_extrapolated,
            num_noisy=mix.num_noisy,
            num_perturbed=mix.num_perturbed,
            num_adversarial=mix.num_adversarial,
        )
    return STRATEGIES[mix.strategy]
