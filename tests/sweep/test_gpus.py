"""Processes of a sweep share the GPUs of a machine; torchrun trains a run on several."""

import json
import multiprocessing
import os
import tempfile
from dataclasses import replace

import pytest
import torch

from hardmix.errors import InputError, UnfinishedError
from hardmix.runs.folder import Run
from hardmix.runtime.signals import StopRequest
from hardmix.settings.recipes import RECIPES
from hardmix.settings.saved import to_json
from hardmix.sweep import gpus

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _four_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv(gpus.VISIBLE, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(gpus, "RETRY_SECONDS", 0.01)


def _hold(ready, done, number):
    with gpus.taken_gpus(number, "auto", StopRequest()) as taken:
        ready.put(taken)
        done.get()


def test_every_process_takes_gpus_of_its_own_and_gives_them_back():
    context = multiprocessing.get_context("fork")
    ready, done = context.Queue(), context.Queue()
    others = [context.Process(target=_hold, args=(ready, done, number)) for number in (1, 2)]
    for each in others:
        each.start()
    held = [name for _ in others for name in ready.get(timeout=30)]
    with gpus.taken_gpus(1, "auto", StopRequest()) as mine:
        assert sorted([*held, *mine]) == ["0", "1", "2", "3"]
        assert os.environ[gpus.VISIBLE] == mine[0]
    assert gpus.VISIBLE not in os.environ
    stop = StopRequest()
    stop.name = "SIGTERM"
    with pytest.raises(UnfinishedError, match="SIGTERM"), gpus.taken_gpus(2, "auto", stop):
        pass  # only one is free
    for _ in others:
        done.put(1)
    for each in others:
        each.join(30)
    with gpus.taken_gpus(4, "auto", StopRequest()) as mine:
        assert len(mine) == 4


def test_gpus_that_a_scheduler_gave_are_the_ones_shared(monkeypatch):
    monkeypatch.setenv(gpus.VISIBLE, "5,7")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with gpus.taken_gpus(1, "auto", StopRequest()) as mine:
        assert mine == ["5"]
        assert os.environ[gpus.VISIBLE] == "5"
    assert os.environ[gpus.VISIBLE] == "5,7"


def test_processes_stand_for_gpus_on_a_cpu():
    gpus.check_gpus(8, "cpu")
    with gpus.taken_gpus(2, "cpu", StopRequest()) as mine:
        assert mine == ["cpu", "cpu"]


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_a_named_device_is_left_as_it_is(device):
    with gpus.taken_gpus(1, device, StopRequest()) as mine:
        assert mine == []
        assert gpus.VISIBLE not in os.environ


@pytest.mark.parametrize(
    ("number", "device", "words"),
    [(0, "auto", "must be at least 1"), (2, "cuda:1", "leave out"), (5, "auto", "sees 4 GPUs")],
)
def test_gpus_that_cannot_be_had_are_refused(number, device, words):
    with pytest.raises(InputError, match=words):
        gpus.check_gpus(number, device)
    gpus.check_gpus(4, "auto")


def test_torchrun_trains_and_evaluates_a_run_and_its_failure_is_told(tmp_path, monkeypatch):
    """torchrun starts two real processes on the CPU; the GPUs are pretended."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config = RECIPES["demo"].build("moco-v2", False)
    config = replace(
        config,
        data=replace(config.data, num_images=64, workers=0),
        train=replace(
            config.train, epochs=1, batch_size=16, queue_size=32, knn_every=0, device="cpu"
        ),
    )
    file = tmp_path / "config.json"
    file.write_bytes(to_json(config))
    run = Run(tmp_path / "run")
    assert gpus.train_by_torchrun(run, file, ["0", "1"], StopRequest()) is run
    assert run.encoder_file.exists()
    gpus.evaluate_by_torchrun(["knn", str(run.path), "--k", "5"], ["cpu", "cpu"], StopRequest())
    assert json.loads((run.results / "knn.json").read_text())["k"] == 5
    with pytest.raises(InputError, match=r"the command was hardmix knn nowhere"):
        gpus.evaluate_by_torchrun(["knn", "nowhere"], ["cpu", "cpu"], StopRequest())
    wrong = replace(config, data=replace(config.data, name="folder", root=str(tmp_path / "none")))
    file.write_bytes(to_json(wrong))
    with pytest.raises(InputError, match=r"torchrun ended with status \d+ before other"):
        gpus.train_by_torchrun(Run(tmp_path / "other"), file, ["0", "1"], StopRequest())
