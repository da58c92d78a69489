"""The options that every integration passes on to `MochiLoss`."""

from typing import Literal, TypedDict

from hardmix.errors import InputError
from hardmix.mixing.checks import check_num_hardest
from hardmix.mixing.family import Denominator, Formula, NegativeFilter, NegativeWeights
from hardmix.mixing.loss import MochiLoss, Temperature
from hardmix.mixing.strategies import Strategy
from hardmix.settings.facts import check_choice
from hardmix.settings.named_choices import (
    DenominatorName,
    FilterName,
    RealNegatives,
    StrategyName,
    WeightsName,
)


class MixingOptions(TypedDict, total=False):
    """Keyword arguments of every loss here: those of `MochiLoss`, except its temperature.

    Without any of them the loss is the one that it replaces. Nothing is mixed unless `num_pairs` or
    `num_with_query` asks for it.
    """

    num_hardest: int | Literal["sixteenth"]
    """N: hardest negatives of a query that may be mixed; a sixteenth of all unless given."""
    num_pairs: int
    """s: points that mix two of them; 0 unless given."""
    num_with_query: int
    """s': points that mix one of them with the query; 0 unless given."""
    strategy: StrategyName | Strategy
    """How points are made: a name in STRATEGIES, or a callable."""
    real_negatives: RealNegatives
    """Whether real negatives stay in the loss next to points."""
    through_query: bool
    """Whether gradients flow through the query inside a point."""
    weights: WeightsName | NegativeWeights
    """Weights of real negatives: a name in WEIGHTS, or a callable."""
    denominator: DenominatorName | Denominator | Formula
    """The formula of the loss: a name in DENOMINATORS, or a function of `Masses`."""
    filter_negatives: FilterName | NegativeFilter
    """The rule by which negatives count as false: a name in FILTERS, or a callable."""


UNMIXED: MixingOptions = {"num_hardest": "sixteenth", "num_pairs": 0, "num_with_query": 0}


def replacement_loss(
    temperature: Temperature, mixing: MixingOptions, queue_size: int | None = None
) -> MochiLoss:
    """Return the loss with these options, which mixes nothing unless they say so."""
    for name in mixing:
        check_choice("option", name, MixingOptions.__annotations__)
    options: MixingOptions = {**UNMIXED, **mixing}
    points = options["num_pairs"] or options["num_with_query"] or "strategy" in mixing
    if "num_hardest" in mixing and not points:
        raise InputError(
            f"num_hardest={mixing['num_hardest']} without points mixes nothing: pass num_pairs or"
            " num_with_query as well, such as num_pairs=64."
        )
    number = options["num_hardest"]
    if queue_size is not None and number != "sixteenth":
        check_num_hardest(number, queue_size)
    return MochiLoss(temperature=temperature, **options)
