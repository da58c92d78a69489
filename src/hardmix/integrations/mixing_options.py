"""What every integration passes on to `MochiLoss`."""

from typing import TypedDict

from hardmix.mixing.checks import check_num_hardest
from hardmix.mixing.family import Denominator, Formula, NegativeFilter, NegativeWeights
from hardmix.mixing.loss import MochiLoss, Temperature
from hardmix.mixing.strategies import Strategy
from hardmix.settings.named_choices import (
    DenominatorName,
    FilterName,
    RealNegatives,
    StrategyName,
    WeightsName,
)


class MixingOptions(TypedDict, total=False):
    """Keyword arguments of every loss here: those of `MochiLoss`, except its temperature.

    num_pairs=0 and num_with_query=0 turn mixing off: the loss is then the other library's own.
    """

    num_hardest: int
    """N: hardest negatives of a query that may be mixed; at most all."""
    num_pairs: int
    """s: points that mix two of them."""
    num_with_query: int
    """s': points that mix one of them with the query."""
    strategy: StrategyName | Strategy
    """How points are made: a name in STRATEGIES, or a callable."""
    real_negatives: RealNegatives
    """Whether real negatives stay in the loss next to points."""
    through_query: bool
    """Whether gradients flow through the query inside a point."""
    weights: WeightsName | NegativeWeights
    """Weights of real negatives: a name in WEIGHTS, or a callable."""
    denominator: DenominatorName | Denominator | Formula
    """What the loss is made of: a name in DENOMINATORS, or a function of `Masses`."""
    filter_negatives: FilterName | NegativeFilter
    """Which negatives are taken for false: a name in FILTERS, or a callable."""


FOR_BATCHES: MixingOptions = {"num_hardest": 64, "num_pairs": 64, "num_with_query": 8}
"""Ours: the counts for negatives of a batch, in the proportions of the paper's for a queue."""


def loss_for_batches(temperature: Temperature, mixing: MixingOptions) -> MochiLoss:
    """Return the loss for negatives of a batch, with fewer points unless these options say."""
    options: MixingOptions = {**FOR_BATCHES, **mixing}
    return MochiLoss(temperature=temperature, **options)


def loss_for_queue(temperature: Temperature, size: int, mixing: MixingOptions) -> MochiLoss:
    """Return the loss for a queue of this size, with the paper's counts unless options say."""
    hardest: MixingOptions = {"num_hardest": min(1024, size)}
    options: MixingOptions = {**hardest, **mixing}
    check_num_hardest(options["num_hardest"], size)
    return MochiLoss(temperature=temperature, **options)
