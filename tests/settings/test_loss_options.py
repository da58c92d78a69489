"""The family around MoCHi in the settings of a run."""

from typing import get_args

import pytest

from hardmix import DENOMINATORS, FILTERS, STRATEGIES, WEIGHTS, InputError, LossConfig, MixConfig
from hardmix.methods.mixing_schedule import MixingSchedule, choose_family
from hardmix.mixing.synco import plan_synco
from hardmix.mixing.variants import function_of
from hardmix.settings.config import PretrainConfig
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
from hardmix.settings.titles import method_title


def test_names_and_tables_are_the_same():
    assert set(get_args(WeightsName)) == {"none", *WEIGHTS}
    assert set(get_args(DenominatorName)) == set(DENOMINATORS)
    assert set(get_args(FilterName)) == {"none", *FILTERS}
    assert set(get_args(StrategyName)) == {"own", *STRATEGIES}
    assert set(get_args(RunWeights)) < set(get_args(WeightsName))
    assert set(get_args(RunFilter)) == {*get_args(FilterName), "same-cluster"}
    assert set(get_args(RunDenominator)) < set(get_args(DenominatorName))


@pytest.mark.parametrize("weights", get_args(RunWeights))
@pytest.mark.parametrize("chosen", get_args(RunDenominator))
def test_every_choice_is_built_with_its_settings(weights, chosen):
    if (weights, chosen) == ("hcl", "hcl"):
        return
    loss = LossConfig(weights=weights, denominator=chosen, beta=0.7, tau_plus=0.2, alpha=3.0)
    family = choose_family(loss)
    options = getattr(family.weights, "keywords", {})
    assert options.get("beta", 0.7) == 0.7
    assert options.get("alpha", 3.0) == 3.0
    assert getattr(family.denominator, "keywords", {}).get("tau_plus", 0.2) == 0.2
    assert (family.weights == "none") == (weights == "none")
    MixingSchedule(PretrainConfig(loss=loss)).loss(0)


def test_syncos_counts_are_settings():
    config = PretrainConfig(mix=MixConfig(strategy="synco", num_noisy=3, num_adversarial=0))
    strategy = MixingSchedule(config).loss(0).strategy
    assert function_of(strategy) is plan_synco
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
