"""Training on a pretended GPU: no waiting, few launches.

The launches of the loss alone are counted in tests/mixing, those of the views in tests/data.
"""

import pytest
import torch

import hardmix.training.pretrain as loop
from gpu_events import gpu
from hardmix.data.image_set import ImageSet
from hardmix.models.batch_norm import batch_norms
from hardmix.runs.folder import Run
from hardmix.runtime.signals import StopRequest
from hardmix.training import setup, step as training_step
from hardmix.training.nan_guard import LossScaler
from hardmix.training.state import settle
from hardmix.training.step import take_step
from ranks import tiny

MOST_LAUNCHES_OF_A_STEP = {
    "mochi": 358,  # counted: 353
    "mochi, without other views of the image": 375,  # 370
    "moco-v2, in two parts": 508,  # 503, of which 7 are for the proxy task of every step
    "supervised": 141,  # 137
}
"""Launches of a small network: views, encoders, loss, backward pass, optimizer and queue."""
STEPS = {
    "mochi": ("mochi", {}),
    "mochi, without other views of the image": ("mochi", {"exclude_same_image": True}),
    "moco-v2, in two parts": ("moco-v2", {"accumulate": 2}),
    "supervised": ("supervised", {}),
}

MOST_LAUNCHES_OF_A_LINE = 96  # counted: 95, of which 11 are for the hardest points (Sec. 4.3)


def images_of(number):
    pixels = torch.randint(0, 256, (number, 3, 40, 36), dtype=torch.uint8)
    return ImageSet("x", torch.randint(0, 5, (number,)), tuple("abcde"), tensor=pixels)


def prepared(tmp_path, method="mochi", **train):
    train = {"device": "cuda", "precision": "fp32", "log_every": 1000} | train
    config = tiny(method, mix={"warm_up_epochs": 0}, train=train, data={"name": "own"})
    return setup.prepare(config, Run(tmp_path), setup.Own(images=images_of(96)), StopRequest())


def steps_of(training, batches, number):
    for _ in range(number):
        take_step(training, next(batches), 0)
        training.step, training.position = training.step + 1, training.position + 1


@pytest.mark.parametrize("step", STEPS)
def test_a_step_reads_one_number_of_the_step_before_and_waits_for_no_copy(
    step, tmp_path, monkeypatch
):
    monkeypatch.setattr(training_step, "SAMPLED_STEPS", 1)  # Fig. 2a's first: it is not this one
    method, train = STEPS[step]
    with gpu() as log:
        training = prepared(tmp_path, method, **train)
        batches = training.loader.epoch(0)
        steps_of(training, batches, 2)
        log.clear()
        steps_of(training, batches, 1)
        assert [entry.what for entry in log.synchronisations] == ["Event.synchronize"]
        assert log.blocking_copies == []
        assert log.mixed_devices == []
        assert len(log.launches) <= MOST_LAUNCHES_OF_A_STEP[step], log.by_place(log.launches)
        assert training.outcomes == []  # a matrix of batch x K, kept where it is described


def test_a_step_that_fig_2a_samples_does_not_wait_either(tmp_path):
    with gpu() as log:
        training = prepared(tmp_path)
        batches = training.loader.epoch(0)
        steps_of(training, batches, 2)
        log.clear()
        steps_of(training, batches, 1)
        assert float(training.ranks[-1]) == 3
        assert [entry.what for entry in log.synchronisations][:1] == ["Event.synchronize"]
        assert (log.blocking_copies, log.mixed_devices) == ([], [])


def test_the_loss_scale_is_read_together_with_the_verdict(tmp_path):
    """The scaler of fp16 alone: a pretended GPU has no autocast."""
    with gpu() as log:
        training = prepared(tmp_path)
        training.scaler = LossScaler(training.compute.device)
        batches = training.loader.epoch(0)
        steps_of(training, batches, 2)
        log.clear()
        steps_of(training, batches, 1)
        assert [entry.what for entry in log.synchronisations] == ["Event.synchronize"]
        assert (log.blocking_copies, log.mixed_devices) == ([], [])
        assert len(training.pending.verdict.read()) == 3


def test_batch_norm_and_key_encoder_are_remembered_in_two_calls(tmp_path):
    """One for their floats, one for the queue's labels and ids."""
    with gpu() as log:
        training = prepared(tmp_path)
        log.clear()
        training.snapshot.note(0)
        copies = [entry for entry in log.launches if entry.what == "_foreach_copy_"]
        assert len(copies) == len(log.launches) == 2
        log.clear()
        training.snapshot.restore(0)
        assert len(log.launches) == 2


def test_batches_are_counted_on_the_host(tmp_path):
    with gpu() as log:
        training = prepared(tmp_path)
        norms = [*batch_norms(training.method.pair.query), *batch_norms(training.method.pair.key)]
        assert norms
        assert {norm.num_batches_tracked.device.type for norm in norms} == {"cpu"}
        before = [int(norm.num_batches_tracked) for norm in norms]
        batches = training.loader.epoch(0)
        log.clear()
        steps_of(training, batches, 1)
        counted = [entry for entry in log.launches if "batch_norm" in entry.what]
        assert len(counted) >= len(norms)
        groups = training.config.model.key_bn_splits
        ways = [1] * (len(norms) // 2) + [groups] * (len(norms) // 2)
        after = [int(norm.num_batches_tracked) for norm in norms]
        assert [b - a for a, b in zip(before, after, strict=True)] == ways


@pytest.mark.parametrize("oracle", [False, True])
def test_a_log_line_waits_once_for_all_its_numbers(oracle, tmp_path):
    """It waits once for all measures; the losses since the last line were copied before them."""
    with gpu() as log:
        training = prepared(tmp_path, log_every=2, exclude_same_image=oracle)
        batches = training.loader.epoch(0)
        for _ in range(2):
            loss = take_step(training, next(batches), 0)
            training.losses.append(loss)
            training.step, training.position = training.step + 1, training.position + 1
        settle(training)
        log.clear()
        line = loop.describe_steps(training, 0)
        assert [entry.what for entry in log.synchronisations] == ["tolist", "Event.synchronize"]
        assert (log.blocking_copies, log.mixed_devices) == ([], [])
        assert len(log.launches) <= MOST_LAUNCHES_OF_A_LINE, log.by_place(log.launches)
    assert {"proxy_accuracy", "false_negatives_top", "synthetic_both_false"} <= line.keys()


def test_a_broken_step_on_a_gpu_changes_nothing_and_is_told_a_step_later(tmp_path, capfd):
    with gpu():
        training = prepared(tmp_path, on_nan="skip")
        batches = training.loader.epoch(0)
        steps_of(training, batches, 2)
        settle(training)
        state = training.method.state_dict()
        before = {k: v.clone() for k, v in state.items() if torch.is_tensor(v)}
        parameter = next(iter(training.method.pair.query.parameters()))
        hook = parameter.register_hook(lambda gradient: gradient * torch.inf)
        steps_of(training, batches, 1)
        hook.remove()
        assert "is not applied" not in capfd.readouterr().err
        assert not settle(training)
        assert "step 2 is not applied" in capfd.readouterr().err
        after = training.method.state_dict()
        for name, value in before.items():
            assert torch.equal(*(getattr(each, "held", each) for each in (value, after[name])))
