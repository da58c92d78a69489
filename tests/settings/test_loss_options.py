"""The family around MoCHi in the settings of a run."""

from typing import get_args

import pytest

from hardmix import InputError
from hardmix.config import LossConfig, MixConfig
from hardmix.losses import DENOMINATORS, FILTERS, WEIGHTS
from hardmix.methods.base import OwnMixing
from hardmix.methods.mixing_schedule import MixingSchedule, choose_family
from hardmix.mixing.strategies import plan_synco
from hardmix.settings.config import PretrainConfig
from hardmix.settings.methods import method_title
from hardmix.settings.named_choices import (
    DenominatorName,
    FilterName,
    RunDenominator,
    RunFilter,
    RunWeights,
    StrategyName,
    WeightsName,
)
from hardmix.settings.saved import settings
from hardmix.strategies import STRATEGIES


def test_names_and_tables_are_the_same():
    assert set(get_args(WeightsName)) == {"none", *WEIGHTS}
    assert set(get_args(DenominatorName)) == set(DENOMINATORS)
    assert set(get_args(FilterName)) == {"none", *FILTERS}
    assert set(get_args(StrategyName)) == {"own", *STRATEGIES}
    assert set(get_args(RunWeights)) - {"own"} < set(get_args(WeightsName))
    assert set(get_args(RunFilter)) == {*get_args(FilterName), "same-cluster", "own"}
    assert set(get_args(RunDenominator)) - {"own"} < set(get_args(DenominatorName))
    assert "own" in set(get_args(RunWeights)) & set(get_args(RunDenominator))


def no_weights(logits, exclude):
    return None


def decoupled_loss(masses):
    return masses.negatives - masses.key


def of_partial(function):
    return getattr(function, "func", function), getattr(function, "keywords", {})


@pytest.mark.parametrize("weights", get_args(RunWeights))
@pytest.mark.parametrize("chosen", get_args(RunDenominator))
def test_every_choice_is_built_with_its_settings(weights, chosen):
    if (weights, chosen) == ("hcl", "hcl"):
        return
    loss = LossConfig(weights=weights, denominator=chosen, beta=0.7, tau_plus=0.2, alpha=3.0)
    own = OwnMixing(weights=no_weights, denominator=decoupled_loss)
    family = choose_family(loss, own)
    _, options = of_partial(family.weights)
    assert options.get("beta", 0.7) == 0.7
    assert options.get("alpha", 3.0) == 3.0
    formula = family.denominator if chosen == "own" else family.denominator.formula
    _, options = of_partial(formula)
    assert options.get("tau_plus", 0.2) == 0.2
    assert ("tau_plus" in options) == (chosen in ("debiased", "hcl"))
    assert (family.weights == "none") == (weights == "none")
    assert (family.weights is no_weights) == (weights == "own")
    assert (formula is decoupled_loss) == (chosen == "own")
    built = MixingSchedule(PretrainConfig(loss=loss), own).loss
    assert (built.weights is None) == (weights == "none")
    assert of_partial(built.denominator.formula) == of_partial(formula)


@pytest.mark.parametrize(
    ("setting", "argument"),
    [
        ("weights", "weights"),
        ("denominator", "denominator"),
        ("filter", "filter_negatives"),
    ],
)
def test_a_function_of_ones_own_is_asked_for_by_its_argument(setting, argument):
    words = rf"loss\.{setting}=own is a function .* pass it again.*pretrain\(\.\.\., {argument}="
    with pytest.raises(InputError, match=words):
        choose_family(LossConfig(**{setting: "own"}))


def test_syncos_counts_are_settings():
    config = PretrainConfig(mix=MixConfig(strategy="synco", num_noisy=3, num_adversarial=0))
    strategy = MixingSchedule(config).loss.mixing.strategy
    assert strategy.func is plan_synco
    assert strategy.keywords["num_noisy"] == 3
    assert strategy.keywords["num_adversarial"] == 0
    assert strategy.keywords["num_extrapolated"] == 256


def test_titles_name_the_members():
    loss = LossConfig(weights="hcl", denominator="debiased", filter="share-of-positive")
    config = PretrainConfig(method="moco-v2", loss=loss)
    title = method_title(settings(config))
    assert title == "MoCo-v2 + hcl weights + debiased + share-of-positive filter"
    assert method_title(settings(PretrainConfig(method="supervised", loss=loss))) == "supervised"
    assert " + " not in method_title(settings(PretrainConfig()))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"beta": -1.0}, r"loss\.beta=-1\.0 must be finite and at least 0|loss\.beta=-1\.0"),
        ({"tau_plus": 1.0}, r"loss\.tau_plus=1\.0 must be between 0\.0 and 0\.999"),
        ({"ring_low": 50.0, "ring_high": 40.0}, r"loss\.ring_low=50\.0 is not below"),
        ({"factor": 0.0}, r"loss\.factor=0\.0 must be a finite number above 0"),
        ({"weights": "hcl", "denominator": "hcl"}, r"would weigh twice.*debiased"),
    ],
)
def test_bad_settings_are_refused_in_words(wrong, words):
    with pytest.raises(InputError, match=words):
        LossConfig(**wrong)
