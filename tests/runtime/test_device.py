"""Devices and number formats of a run: chosen, set, reported, and restored."""

import os
import warnings
from functools import partialmethod

import pytest
import torch
from torch import nn

from gpu_events import gpu
from hardmix.errors import InputError
from hardmix.runtime.device import (
    algorithms_chosen,
    choose_compute,
    describe_device,
    read_together,
    send,
)
from hardmix.training import setup
from hardmix.training.pretrain import pretrain
from pretended_gpu import GPU
from ranks import lines_of, state_of, tiny

pytestmark = pytest.mark.slow


def test_one_thread_is_singular(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert describe_device(torch.device("cpu"), deterministic=False) == "cpu, 1 thread"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert describe_device(torch.device("cpu"), deterministic=False) == "cpu, 2 threads"


def test_cuda_1_is_the_device_of_everything(monkeypatch):
    """Otherwise kernels of libraries that use the current device would run on the first."""
    chosen = []
    with gpu():
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen[-1].index)
        compute = choose_compute("cuda:1", "fp16")
    assert chosen == [torch.device("cuda", 1)] == [compute.device]
    assert (compute.precision, compute.bf16, compute.fp16) == ("fp16", False, True)
    with pytest.raises(InputError, match=r"train\.device=cuda:9 cannot be used here"):
        choose_compute("cuda:9")


def test_half_precision_is_what_was_asked_for():
    layer, rows = nn.Linear(4, 4), torch.zeros(2, 4)
    for precision, dtype in [
        ("fp32", torch.float32),
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
    ]:
        with choose_compute("cpu", precision).autocast():
            assert layer(rows).dtype == dtype


def test_what_is_chosen_for_a_gpu_is_said_and_given_back():
    before = torch.backends.cudnn.benchmark
    with algorithms_chosen(deterministic=False):
        assert torch.backends.cudnn.benchmark
        assert "cudnn.benchmark" in describe_device(GPU, deterministic=False)
        assert "TF32 in convolutions" in describe_device(GPU, deterministic=False)
    with algorithms_chosen(deterministic=True):
        assert not torch.backends.cudnn.benchmark
        assert torch.are_deterministic_algorithms_enabled()
        assert "deterministic algorithms" in describe_device(GPU, deterministic=True)
    assert torch.backends.cudnn.benchmark == before
    assert not torch.are_deterministic_algorithms_enabled()


def test_what_cannot_be_deterministic_is_said():
    with (
        algorithms_chosen(deterministic=True),
        pytest.warns(UserWarning, match="does not have a deterministic implementation"),
    ):
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))


def test_a_deterministic_run_has_the_bits_of_another_and_leaves_no_trace(tmp_path):
    plain = tiny(train={"knn_every": 0})
    pretrain(plain, tmp_path / "plain")
    with warnings.catch_warnings(action="error"):
        pretrain(tiny(train={"knn_every": 0, "deterministic": True}), tmp_path / "same")
    assert not torch.are_deterministic_algorithms_enabled()
    assert state_of(tmp_path / "plain") == state_of(tmp_path / "same")


def test_algorithms_are_chosen_before_anything_touches_the_device(tmp_path, monkeypatch):
    """cuBLAS reads its variable when it is first used, which may be while a run is prepared."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    seen = []

    def noted(*_):
        seen.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
        seen.append(torch.are_deterministic_algorithms_enabled())
        raise InputError("enough")

    monkeypatch.setattr(setup, "choose_compute", noted)
    with pytest.raises(InputError, match="enough"):
        pretrain(tiny(train={"deterministic": True}), tmp_path / "run")
    assert seen == [":4096:8", True]
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("what", ["encoders", "all"])
def test_a_compiled_run_is_the_same_run(what, tmp_path, monkeypatch):
    """Dynamo's part of torch.compile, which finds the graphs; to translate them takes minutes."""
    calls = []
    compile_function = torch.compile

    def compiled(*arguments, **options):
        calls.append(arguments)
        return compile_function(*arguments, **options, backend="eager")

    def compile_module(module):
        calls.append(module)
        own = nn.Module._call_impl
        module._compiled_call_impl = compile_function(
            own.__get__(module), dynamic=False, backend="eager"
        )

    monkeypatch.setattr(nn.Module, "compile", partialmethod(lambda self: compile_module(self)))
    monkeypatch.setattr(torch, "compile", compiled)
    train = {"knn_every": 0, "epochs": 1, "precision": "fp32"}
    pretrain(tiny(train=train | {"compile": what}), tmp_path / "compiled")
    monkeypatch.undo()
    pretrain(tiny(train=train), tmp_path / "plain")
    assert len(calls) == (2 if what == "encoders" else 3)
    for one, other in zip(
        lines_of(tmp_path / "compiled"), lines_of(tmp_path / "plain"), strict=True
    ):
        assert one == pytest.approx(other, rel=1e-4)


def test_cuda_graphs_are_refused_without_cuda_in_a_sentence(tmp_path):
    with pytest.raises(InputError, match=r"train.compile=graphs .* train.device=cpu .*choose all"):
        pretrain(tiny(train={"compile": "graphs"}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_graphs_record_both_encoders_and_begin_anew_with_every_step(tmp_path, monkeypatch):
    compiled, steps = [], []
    monkeypatch.setattr(setup, "check_graphs", lambda *_: None)
    monkeypatch.setattr(nn.Module, "compile", lambda _, **options: compiled.append(options))
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: steps.append(1))
    train = {"knn_every": 0, "epochs": 1, "compile": "graphs", "verdict": False}
    pretrain(tiny(train=train), tmp_path / "run")
    assert compiled == [{"mode": "reduce-overhead"}] * 2
    assert len(steps) == 96 // 16


def test_numbers_are_sent_and_read_without_waiting_twice():
    with gpu() as log:
        there = send(torch.arange(4.0), GPU)
        assert (log.blocking_copies, len(log.other_copies)) == ([], 1)
        found = read_together({"sum": there.sum(), "all": (there >= 0).all()})
        assert len(log.synchronisations) == 1
    assert found == {"sum": 6.0, "all": 1.0}
