"""Settings that fit a folder: every choice is valid, bounded, explained, and can be overridden."""

import dataclasses
import math

import pytest
from hypothesis import given, strategies as st

from hardmix.errors import InputError
from hardmix.settings.fitting_rules import (
    CHOSEN,
    FEWEST,
    MOST_EPOCHS,
    SHOWN,
    FolderFacts,
    Machine,
    Pace,
    fit,
)
from hardmix.settings.recipes import RECIPES, photos
from hardmix.settings.saved import settings, with_settings

FACTS = st.builds(
    FolderFacts,
    images=st.integers(FEWEST, 2_000_000),
    short_side=st.integers(1, 8000),
    colour=st.floats(0, 1),
    labelled=st.booleans(),
    tests=st.integers(0, 100_000),
)
MACHINES = st.builds(Machine, gpu=st.booleans(), processes=st.sampled_from([1, 2, 3, 4]))
PACES = st.builds(
    Pace, step=st.floats(1e-3, 20), decode=st.floats(1e-5, 1), spent=st.floats(0, 100)
)
METHODS = st.sampled_from(["moco-v1", "moco-v2", "mochi", "supervised"])


@given(FACTS, MACHINES, PACES, METHODS, st.floats(0.01, 1000))
def test_every_choice_is_valid_bounded_and_explained(facts, machine, pace, method, minutes):
    config = dataclasses.replace(photos(method), minutes=minutes)
    fitted = fit(config, facts, machine, pace)
    chosen = fitted.config
    train, mix = chosen.train, chosen.mix
    images = min(facts.images, chosen.data.num_images or facts.images)
    assert chosen.choose == ()
    assert train.exclude_same_image
    if chosen.uses("train.queue_size"):
        assert 1 <= train.queue_size <= images / 5
    if chosen.uses("mix.num_hardest"):
        assert 2 <= mix.num_hardest <= train.queue_size
        assert mix.num_with_query >= 1
        assert 0 < mix.warm_up_epochs < max(2, train.epochs)
    assert train.batch_size <= images
    assert train.batch_size % (machine.processes * train.accumulate) == 0
    assert train.batch_size % chosen.model.key_bn_splits == 0
    assert 1 <= train.epochs <= MOST_EPOCHS
    assert 0 <= chosen.data.colour_strength <= 1
    assert all(each.why for each in fitted.choices if each.name in SHOWN)
    # Training fits into the time, or is as short as makes sense.
    seconds = images * pace.decode + train.epochs * (images // train.batch_size) * pace.step
    assert seconds <= 60 * minutes or train.epochs == 1


def test_a_million_images_in_ten_minutes_are_a_part_of_them():
    facts = FolderFacts(1_000_000, 1000, 0.8)
    chosen = fit(photos(), facts, Machine(), Pace(0.05, 0.015, 20)).config
    assert 1000 < chosen.data.num_images < 100_000
    assert chosen.train.epochs >= 9
    assert chosen.data.reduce


def test_twenty_images_give_a_run():
    chosen = fit(photos(), FolderFacts(20, 500, 0.8), Machine(), Pace(0.05, 0.02, 5)).config
    assert (chosen.train.batch_size, chosen.train.queue_size) == (8, 4)
    assert (chosen.mix.num_hardest, chosen.mix.num_pairs) == (2, 2)
    assert chosen.train.epochs == MOST_EPOCHS
    assert chosen.data.num_images is None


def test_too_few_images_are_refused_with_the_number_and_the_limit():
    with pytest.raises(InputError, match=r"there are 19 images, but the recipe photos needs 20"):
        fit(photos(), FolderFacts(19, 500, 0.8), Machine())


OWN = {
    "data.image_size": 48,
    "data.reduce": True,
    "data.colour_strength": 0.9,
    "data.num_images": 333,
    "model.backbone": "resnet18",
    "train.batch_size": 24,
    "optimizer.lr": 0.011,
    "train.queue_size": 77,
    "mix.num_hardest": 3,
    "mix.num_pairs": 5,
    "mix.num_with_query": 2,
    "train.epochs": 7,
    "mix.warm_up_epochs": 0.5,
    "train.knn_every": 2,
    "train.save_every": 3,
    "optimizer.milestones": (3, 4),
}


def test_there_is_a_value_of_ones_own_for_every_choice():
    assert OWN.keys() == set(CHOSEN)
    assert set(CHOSEN) <= settings(photos()).keys()


@given(st.sets(st.sampled_from(CHOSEN)), FACTS)
def test_what_is_given_stays_and_is_called_yours(given_, facts):
    config = with_settings(photos(), {name: OWN[name] for name in given_})
    left = tuple(name for name in CHOSEN if name not in given_)
    config = dataclasses.replace(config, choose=left)
    facts = facts._replace(images=max(facts.images, 20_000))
    fitted = fit(config, facts, Machine(), Pace(0.01, 0.001))
    values = settings(fitted.config)
    for each in fitted.choices:
        assert (each.why == "yours") == (each.name in given_)
        assert values[each.name] == (OWN[each.name] if each.name in given_ else each.value)


def test_the_more_colour_tells_the_less_it_is_changed():
    strengths = [
        fit(photos(), FolderFacts(1000, 500, share), Machine()).config.data.colour_strength
        for share in (0.0, 0.3, 0.6, 0.9, 1.0)
    ]
    assert strengths == [1.0, 0.7, 0.4, 0.1, 0.0]


def test_from_weights_all_images_are_used_before_more_epochs():
    config = with_settings(photos(), {"model.init": "weights.pth"})
    facts, slow = FolderFacts(2640, 500, 0.3), Pace(4.0, 0.01, 20)
    fitted = fit(config, facts, Machine(), slow)
    assert fitted.config.data.num_images is None
    assert fitted.config.train.epochs == 2
    assert fitted.after > 0
    from_scratch = fit(photos(), facts, Machine(), slow).config
    assert from_scratch.data.num_images < 1000


def test_moco_v1_keeps_the_fractions_of_its_steps():
    facts, pace = FolderFacts(4000, 500, 0.5), Pace(0.05, 0.001)
    chosen = fit(photos("moco-v1"), facts, Machine(), pace).config
    epochs = chosen.train.epochs
    assert chosen.optimizer.milestones == (epochs * 60 // 100, epochs * 80 // 100)


def test_only_photos_chooses():
    assert [name for name, entry in RECIPES.items() if entry.build("mochi", False).choose] == [
        "photos"
    ]
    assert math.isclose(photos().minutes, 10)
