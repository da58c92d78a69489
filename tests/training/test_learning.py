"""The warning that nothing is learnt: on curves made up for it, and in a real run."""

import math

import pytest

import ranks
from hardmix.training.metric_logs import LearningWatch
from hardmix.training.pretrain import pretrain

pytestmark = pytest.mark.slow

CHANCE = math.log(1 + 64)


def watched(losses, accuracies, capfd, every=20, filled=1.0):
    watch = LearningWatch(ranks.tiny())  # K = 64
    for number, (loss, accuracy) in enumerate(zip(losses, accuracies, strict=True)):
        line = {"step": every * (number + 1), "epoch": number, "loss": loss, "spread": 0.9}
        watch.write(line | {"proxy_accuracy": accuracy, "queue_filled": filled})
    return capfd.readouterr().err


def test_a_loss_that_stays_at_chance_is_told_once_with_the_way_out(capfd):
    said = watched([CHANCE] * 60, [0.02] * 60, capfd)
    assert said.count("nothing is learnt so far") == 1
    for setting in ("train.queue_size", "data.colour_strength", "optimizer.lr", "model.init"):
        assert setting in said
    assert "step 320:" in said  # after 300 steps with a full queue


def test_a_loss_that_rises_to_chance_is_told(capfd):
    rising = [CHANCE * (0.6 + 0.4 * min(1, number / 10)) for number in range(60)]
    assert "nothing is learnt" in watched(rising, [0.03] * 60, capfd)


@pytest.mark.parametrize(
    ("losses", "accuracies"),
    [
        ([CHANCE * (1 - 0.005 * number) for number in range(60)], [0.03] * 60),  # falls
        ([CHANCE] * 60, [0.4] * 60),  # MoCHi's points make the loss high, the task is solved
        ([0.8 * CHANCE] * 60, [0.03] * 60),
        ([CHANCE] * 10, [0.02] * 10),  # too early
    ],
    ids=["falls", "solves", "below", "early"],
)
def test_other_curves_are_left_alone(losses, accuracies, capfd):
    assert watched(losses, accuracies, capfd) == ""


def test_a_queue_of_random_keys_is_not_judged(capfd):
    assert watched([CHANCE] * 60, [0.02] * 60, capfd, filled=0.5) == ""


def test_a_collapse_is_told(capfd):
    LearningWatch(ranks.tiny()).write({"step": 9, "epoch": 1, "loss": 1.0, "spread": 0.01})
    assert "the keys have collapsed" in capfd.readouterr().err


def test_too_many_points_are_told_once(capfd):
    watch = LearningWatch(ranks.tiny())
    for step, mass in ((1, 0.5), (2, 0.85), (3, 0.9)):
        watch.write({"step": step, "epoch": 0, "loss": 1.0, "synthetic_mass": mass})
    said = capfd.readouterr().err
    assert said.count("of the softmax, so that real negatives hardly count") == 1
    assert "step 2: synthetic points hold 85%" in said
    assert "mix.num_pairs" in said


def test_a_real_run_that_cannot_learn_says_so(tmp_path, capfd, monkeypatch):
    """A learning rate of nearly nothing, and a temperature at which all are alike."""
    monkeypatch.setattr("hardmix.training.metric_logs.PATIENCE", 10)
    train = {"epochs": 4, "temperature": 100.0, "queue_size": 19, "log_every": 2, "knn_every": 0}
    config = ranks.tiny(train=train, optimizer={"lr": 1e-9}, mix={"warm_up_epochs": 9})
    monkeypatch.setattr("hardmix.training.metric_logs.GUESSING", 1.0)  # few images: luck is likely
    run = pretrain(config, tmp_path / "run")
    said = capfd.readouterr()
    assert "nothing is learnt so far" in said.err
    assert "mix.warm_up_epochs=9 covers all 4 epochs: nothing is mixed" in " ".join(
        said.err.split()
    )
    assert "MoCo-v2 (MoCHi in its warm-up)" in said.out
    assert run.metrics()[-1]["loss"] == pytest.approx(math.log(20), abs=0.05)
