"""Facts about a setting stand in one place: every list of settings is derived from them."""

import dataclasses
import re
import typing

import pytest

from hardmix.errors import InputError
from hardmix.paper.numbers import SETTING_NAMES
from hardmix.runs.reading import identity, label_runs
from hardmix.settings.config import (
    DataConfig,
    LossConfig,
    MixConfig,
    ModelConfig,
    OptimizerConfig,
    PretrainConfig,
    TrainConfig,
)
from hardmix.settings.evaluations import FinetuneConfig, KnnOptions, LinearOptions
from hardmix.settings.facts import SettingFacts, choices_of, docs_of, facts_of, setting
from hardmix.settings.methods import METHOD_FACTS, MethodFacts, MethodOptions, PclOptions
from hardmix.settings.recipes import RECIPES
from hardmix.settings.saved import (
    FACTS,
    LABELS,
    LATER,
    MAY_CHANGE,
    MAY_DIFFER,
    MUST_MATCH,
    build_config,
    own_facts,
    recorded,
    settings,
)
from places import ROOT

GROUPS = (DataConfig, ModelConfig, MixConfig, OptimizerConfig, TrainConfig)


def test_every_setting_has_facts_and_words_of_its_own():
    assert FACTS.keys() == settings(PretrainConfig()).keys()
    for group in GROUPS:
        undocumented = {field.name for field in dataclasses.fields(group)} - docs_of(group).keys()
        assert not undocumented, group
    assert all(facts.name for facts in FACTS.values())
    for names in METHOD_FACTS.values():
        if names.options is not None:
            assert facts_of(names.options).keys() == docs_of(names.options).keys()


def test_the_lists_are_the_facts_and_part_all_settings():
    assert {name for name, facts in FACTS.items() if facts.resume} == MAY_CHANGE
    assert {name for name, facts in FACTS.items() if not facts.identity} == MAY_DIFFER
    assert FACTS.keys() == MUST_MATCH | MAY_CHANGE
    assert not MUST_MATCH & MAY_CHANGE
    assert {name: facts.label for name, facts in FACTS.items() if facts.label} == LABELS


def test_no_fact_contradicts_another():
    """Settings outside the identity may change on resume; those that label runs are part of it."""
    known = FACTS | {k: v for method in METHOD_FACTS for k, v in own_facts(method).items()}
    for name, facts in known.items():
        assert facts.identity or facts.resume, name
        assert facts.identity or not facts.label, name
    assert {"data.root", "train.epochs", "train.stop_epoch"} == MAY_CHANGE - MAY_DIFFER
    assert not SETTING_NAMES.keys() & MAY_DIFFER


def test_what_a_method_does_not_use_are_settings_that_exist():
    for method, facts in METHOD_FACTS.items():
        for pattern in facts.unused:
            only = MethodFacts("", "", unused=(pattern,))
            assert any(not only.uses(name) for name in FACTS), (method, pattern)


def test_labels_can_be_filled_in():
    for name, label in LABELS.items():
        assert label.format(7).count("7") == 1, name


def test_the_page_on_resuming_lists_what_may_change():
    page = " ".join((ROOT / "docs" / "reliability.md").read_text().split())
    found = re.search(r"may change \((.*?)\)", page)
    assert found is not None
    assert set(re.findall(r"`([\w.]+)`", found[1])) == MAY_CHANGE


def test_a_run_of_before_has_the_defaults_of_settings_that_came_later():
    config = dataclasses.asdict(RECIPES["demo"].build("mochi", False))
    older = {**config, "optimizer": dict(config["optimizer"]), "data": dict(config["data"])}
    for name in LATER:
        group, _, field = name.partition(".")
        (older[group] if field else older).pop(field or group, None)
    del older["options"]
    young, old = recorded(config), recorded(older)
    assert {k: list(v) if isinstance(v, tuple) else v for k, v in young.items()} == {
        k: list(v) if isinstance(v, tuple) else v for k, v in old.items()
    }
    del older["train"]["temperature"]
    assert "train.temperature" not in recorded(older)  # nothing else is guessed
    assert recorded({}) == {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SomeOptions(MethodOptions):
    """Options of a method."""

    weight: float = setting(1.0, label="w = {}")
    """Weight of something."""
    note: int = setting(0, resume=True, identity=False)
    """Steps between notes."""


def test_a_methods_own_settings_have_facts_too(monkeypatch):
    monkeypatch.setitem(
        METHOD_FACTS, "some", MethodFacts("Some", "some.Some", SomeOptions, unused=("mix.*",))
    )
    assert own_facts("some") == {
        "some.weight": SettingFacts(label="w = {}", name="weight"),
        "some.note": SettingFacts(resume=True, identity=False, name="note"),
    }
    assert own_facts("mochi") == own_facts(["x"]) == own_facts("never heard of") == {}
    config = dataclasses.replace(PretrainConfig(), method="some")
    other = dataclasses.replace(config, options=SomeOptions(weight=2.0, note=5))
    assert label_runs([settings(config), settings(other)], ["a", "b"]) == [
        "Some, w = 1.0",
        "Some, w = 2.0",
    ]
    assert "some.weight" in identity(settings(config))
    assert "some.note" not in identity(settings(config))


CHOSEN = [
    (kind, name, choices)
    for kind in (*GROUPS, LossConfig, PclOptions, KnnOptions, LinearOptions, FinetuneConfig)
    for name, (choices, _) in choices_of(kind).items()
]


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(("kind", "name", "choices"), CHOSEN)
def test_a_typo_in_a_named_choice_is_one_sentence_with_the_nearest_first(kind, name, choices):
    """A config in Python is refused too, before the run has a folder."""
    typo = (f"{choices[-1]}x",) if name == "baseline" else f"{choices[-1]}x"
    with pytest.raises(InputError) as refused:
        kind(**{name: typo})
    words = str(refused.value)
    assert f".{name}='{choices[-1]}x' is unknown: choose one of {choices[-1]}, " in f"{words}, "
    assert all(choice in words for choice in choices)
    assert ("'mypackage:function'" in words) == (name in OWN)
    for choice in choices:
        kind(**{name: (choice,) if name == "baseline" else choice})


OWN = ("strategy", "weights", "denominator", "filter")


@pytest.mark.usefixtures("unchecked_types")
def test_named_choices_of_a_run_are_settings_that_a_typo_would_break():
    """A typo in one of them once gave a KeyError, when the run's folder existed already."""
    assert len(CHOSEN) >= 20
    names = {name for _, name, _ in CHOSEN}
    assert {"strategy", "augmentation", "weights", "denominator", "filter", "head"} <= names
    with pytest.raises(
        InputError, match=r"^data\.name='imagnet' .* one of imagenet, imagenet100, "
    ):
        DataConfig(name="imagnet")
    with pytest.raises(InputError, match=r"^config\.json: data: name='imagnet' is unknown"):
        build_config({"data": {"name": "imagnet"}}, "config.json")
    with pytest.raises(InputError, match=r"^mix\.strategy=7 is unknown"):
        MixConfig(strategy=7)


def test_types_of_settings_are_those_a_command_line_and_a_file_can_say():
    plain = (bool, int, float, str, type(None))
    for group in GROUPS:
        for name, hint in typing.get_type_hints(group).items():
            parts = typing.get_args(hint) or (hint,)
            kinds = [part for part in parts if part is not ...]
            assert all(
                kind in plain or isinstance(kind, str) or typing.get_origin(kind) is typing.Literal
                for kind in kinds
            ), (group, name)


@pytest.mark.parametrize("method", METHOD_FACTS)
def test_a_setting_that_a_method_does_not_use_makes_no_other_run(method):
    config = settings(RECIPES["imagenet100"].build(method, False))
    unused = {name for name in FACTS if not METHOD_FACTS[method].uses(name)}
    assert not unused & identity(config).keys()
    assert identity({**config, **dict.fromkeys(unused, "other")}) == identity(config)
