"""Checkpoints are written while training continues: one at a time, of the state at their step."""

import threading

import pytest
import torch

import hardmix.training.pretrain as loop
from hardmix.errors import InputError
from hardmix.runs.folder import Run
from hardmix.training.pretrain import pretrain
from hardmix.training.state import CheckpointWriter
from ranks import state_of, tiny

pytestmark = pytest.mark.slow

EVERY_EPOCH = {"epochs": 3, "knn_every": 0}


def test_the_copy_is_written_however_the_tensor_changes():
    writer, go, seen = CheckpointWriter(), threading.Event(), {}

    def write(tensors):
        go.wait(60)
        seen.update(tensors)
        return 5

    tensor = torch.ones(3)
    writer.start(4, {"a": tensor}, write)
    assert writer.collect(wait=False) is None
    tensor.zero_()
    go.set()
    written = writer.collect(wait=True)
    assert (written.step, written.size, written.error) == (4, 5, None)
    assert seen["a"].tolist() == [1, 1, 1]
    assert writer.collect(wait=True) is None  # it is told once


def test_errors_of_the_thread_are_handed_over():
    writer = CheckpointWriter()

    def write(_):
        raise OSError(28, "No space left on device")

    writer.start(4, {}, write)
    assert writer.collect(wait=True).error.errno == 28


def slowly(monkeypatch, until):
    """Let every checkpoint wait in its thread, and note which threads write at once."""
    save, threads, most = Run.save_checkpoint, set(), []

    def save_slowly(run, step, tensors, facts):
        threads.add(threading.current_thread())
        most.append(len([each for each in threads if each.is_alive()]))
        assert threading.current_thread() is not threading.main_thread()
        until(step)
        return save(run, step, tensors, facts)

    monkeypatch.setattr(Run, "save_checkpoint", save_slowly)
    return most


def test_steps_continue_while_a_checkpoint_is_written_and_never_two_at_once(tmp_path, monkeypatch):
    pretrain(tiny(train=EVERY_EPOCH), tmp_path / "plain")
    stepped = {step: threading.Event() for step in range(1, 19)}
    take_step = loop.take_step

    def step_and_tell(training, batch, epoch):
        loss = take_step(training, batch, epoch)
        stepped[training.step + 1].set()
        return loss

    def until(step):
        assert step == 18 or stepped[step + 3].wait(60)  # three steps later it is still writing

    monkeypatch.setattr(loop, "take_step", step_and_tell)
    most = slowly(monkeypatch, until)
    pretrain(tiny(train=EVERY_EPOCH), tmp_path / "run")
    assert most == [1, 1, 1]
    assert state_of(tmp_path / "run") == state_of(tmp_path / "plain")


def test_a_run_that_fails_waits_for_its_checkpoint(tmp_path, monkeypatch):
    failed = threading.Event()
    slowly(monkeypatch, lambda step: failed.wait(60))
    take_step = loop.take_step

    def fail(training, batch, epoch):
        if training.step == 8:
            failed.set()
            raise InputError("this step fails")
        return take_step(training, batch, epoch)

    monkeypatch.setattr(loop, "take_step", fail)
    with pytest.raises(InputError, match="this step fails"):
        pretrain(tiny(train=EVERY_EPOCH), tmp_path / "run")
    assert Run(tmp_path / "run").load_checkpoint().manifest["step"] == 6


def test_a_bug_in_the_thread_ends_the_run(tmp_path, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError

    slowly(monkeypatch, broken)
    with pytest.raises(ZeroDivisionError):
        pretrain(tiny(train=EVERY_EPOCH), tmp_path / "run")
