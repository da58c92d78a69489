import math
from itertools import pairwise

import pytest

from hardmix import InputError
from hardmix.settings.schedules import cosine, decreasing, mixing_started, shown_epochs, step


@pytest.mark.parametrize("epochs", [1, 200, 800])
def test_cosine_is_official_mocos_formula(epochs):
    lr = 0.03
    for epoch in range(epochs + 1):
        official = lr * 0.5 * (1.0 + math.cos(math.pi * epoch / epochs))
        assert lr * cosine(epoch, epochs) == pytest.approx(official, abs=1e-16)


def test_cosine_falls_from_one_to_zero_and_stays_there():
    values = [cosine(epoch, 200) for epoch in range(201)]
    assert (values[0], values[200]) == (1.0, 0.0)
    assert all(later < earlier for earlier, later in pairwise(values))
    assert cosine(201, 200) == cosine(math.inf, 200) == 0.0
    assert cosine(-1, 200) == 1.0


def test_the_papers_100_epochs_are_half_way_down_its_200():
    assert cosine(100, 200) == pytest.approx(0.5)
    assert cosine(100, 100) == 0.0


def test_going_on_from_200_to_800_epochs_lifts_the_learning_rate_again():
    assert cosine(199, 200) < 1e-4
    assert cosine(200, 800) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    assert cosine(200, 800) > 0.85


@pytest.mark.parametrize(
    "milestones",
    [
        pytest.param([120, 160], id="MoCo-v1"),
        pytest.param([30, 40, 50], id="linear-ImageNet-100"),
        pytest.param([60, 80], id="linear-ImageNet-1k"),
    ],
)
def test_step_drops_to_a_tenth_at_each_milestone_and_nowhere_else(milestones):
    drops = [
        epoch for epoch in range(1, 200) if step(epoch, milestones) != step(epoch - 1, milestones)
    ]
    assert drops == milestones
    assert step(0, milestones) == 1.0
    for reached, milestone in enumerate(milestones, start=1):
        assert step(milestone, milestones) == pytest.approx(10.0**-reached)


def test_step_takes_another_factor_and_no_milestones():
    assert step(5, [1, 5, 6], factor=0.5) == 0.25
    assert step(5, []) == 1.0


def test_mixing_starts_at_once_without_a_warm_up():
    assert mixing_started(0, 0)


@pytest.mark.parametrize("warm_up", [10, 15, 5000])
def test_mixing_starts_right_after_the_warm_up(warm_up):
    assert not mixing_started(0, warm_up)
    assert not mixing_started(warm_up - 1, warm_up)
    assert mixing_started(warm_up, warm_up)
    assert mixing_started(warm_up + 1, warm_up)


def test_decreasing_is_a_line_from_start_to_end_and_flat_outside():
    assert [decreasing(epoch, 4) for epoch in range(5)] == [100.0, 75.0, 50.0, 25.0, 0.0]
    assert decreasing(2, 4, start=60.0, end=20.0) == pytest.approx(40.0)
    assert decreasing(-3, 4, start=60.0, end=20.0) == 60.0
    assert decreasing(9, 4, start=60.0, end=20.0) == 20.0


@pytest.mark.parametrize("schedule", [cosine, decreasing])
@pytest.mark.parametrize("epochs", [0, -1, math.nan])
def test_a_schedule_without_a_length_is_refused(schedule, epochs):
    with pytest.raises(InputError, match=f"epochs={epochs} must be above 0"):
        schedule(0, epochs)


def test_shown_epochs_are_the_first_the_last_and_evenly_between():
    assert shown_epochs(1) == [0]
    assert shown_epochs(3) == [0, 1, 2]
    assert shown_epochs(200, 5) == [0, 50, 100, 149, 199]
    assert len(shown_epochs(200)) == 10
