"""`python -m benchmarks gpu` works without a GPU: a CPU and the pretended one stand in for it."""

import contextlib
import json
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from benchmarks import __main__ as program, gpu, gpu_checks, worker
from benchmarks.gpu_checks import CHECKS, Check, Failed, Found
from benchmarks.jobs import BenchJob, run_job
from gpu_events import gpu as pretended
from hardmix.commands.main import main as hardmix

pytestmark = pytest.mark.slow

MACHINE = gpu.machine_of(gpu.GpuOptions(device="cpu", rounds=2))
NAMED = {check.name: check for check in CHECKS}


def attempt(name, folder, machine=MACHINE):
    return NAMED[name].attempt(machine, folder, lambda _: None)


def in_this_process(_, *words, processes=1, variables=None):
    """A command without another process, which would take seconds to import torch."""
    assert processes == 1
    with contextlib.suppress(SystemExit):
        hardmix(list(words))
    return ""


@pytest.mark.parametrize("name", ["losses", "views", "waiting", "profile", "launches", "decoding"])
def test_a_check_passes_if_the_cpu_stands_in(name, tmp_path):
    assert attempt(name, tmp_path)["result"] == "passed"


@pytest.mark.parametrize("name", ["precisions", "same bits", "evaluations"])
def test_a_check_of_commands_passes_if_the_cpu_stands_in(name, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_checks, "command", in_this_process)
    found = attempt(name, tmp_path, replace(MACHINE, gpus=1))
    assert found["result"] == "passed", found


def test_a_check_of_two_processes_kills_one_and_passes_if_cpus_stand_in(tmp_path):
    found = attempt("two GPUs, resume", tmp_path)
    assert found["result"] == "passed", found


@pytest.mark.parametrize("name", ["losses", "views", "waiting"])
def test_a_check_passes_on_the_pretended_gpu(name, tmp_path):
    machine = replace(MACHINE, device="cuda", gpus=1)
    with pretended() as log:

        def set_sync_debug_mode(mode):
            if mode == "error":
                log.clear()
                return
            waits = [each for each in log.synchronisations if each.what != "Event.synchronize"]
            if waits or log.blocking_copies:
                raise RuntimeError(f"{waits} {log.blocking_copies}")

        with patch("torch.cuda.set_sync_debug_mode", set_sync_debug_mode):
            found = attempt(name, tmp_path, machine)
        assert log.mixed_devices == [], log.by_place(log.mixed_devices)
    assert found["result"] == "passed", found


def test_a_loss_that_differs_is_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_checks, "loss_disagreement", lambda *_: (0.0, 0.5))
    found = attempt("losses", tmp_path)
    assert found["result"] == "failed"
    assert "mochi, fp32 (loss 0.0e+00, gradient 5.0e-01)" in found["words"]


def test_every_check_is_a_job_with_a_time_limit_and_a_reason_if_it_is_skipped():
    assert worker.MEASURES["gpu"] is gpu.measure
    alone = replace(MACHINE, gpus=1)
    assert NAMED["second GPU"].skipped(alone) == "there is only one GPU"
    assert "--voc" in NAMED["detector"].skipped(MACHINE)
    assert sum(each.seconds for each in CHECKS if not each.needs_voc) < 25 * 60
    for each in CHECKS:
        assert each.limit >= 600
        restored = gpu_checks.Machine.restored(json.loads(json.dumps(gpu.asdict(MACHINE))))
        assert restored == MACHINE


def fail(*_):
    raise Failed("something else")


def break_down(*_):
    raise ValueError("no such thing")


FAKES = (
    Check(name="good", claim="it holds", look=lambda *_: Found("it does", {"n": 1}), seconds=1),
    Check(name="wrong", claim="it holds", look=fail, seconds=1),
    Check(name="broken", claim="it works", look=break_down, seconds=1),
    Check(name="crash", claim="it ends", look=fail, seconds=1),
    Check(name="another GPU", claim="there is one", look=fail, seconds=1, needs=9),
)


def run_fake(job, tell):
    if job.title == "crash":
        raise RuntimeError("crash: ended with status -11 and no result")
    return worker.MEASURES[job.kind](json.loads(json.dumps(job.settings)), tell)


def test_a_failing_check_stops_nothing_and_the_last_line_says_what_failed(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr(gpu, "CHECKS", FAKES)
    out = tmp_path / "gpu.json"
    report = gpu.check_gpu(MACHINE, FAKES, out, run=run_fake)
    assert [each["result"] for each in report["checks"]] == [
        *("passed", "failed", "failed", "failed", "skipped")
    ]
    last = capfd.readouterr().out.splitlines()[-1]
    assert last.startswith(
        "1 of 5 checks passed. Failed: wrong, broken, crash."
        " Skipped: another GPU (there is only one GPU)."
    )
    assert json.loads(out.read_text())["checks"][2]["words"] == "ValueError: no such thing"
    page = out.with_suffix(".md").read_text()
    assert "| wrong | it holds | FAILED | something else |" in page


def test_a_check_that_hangs_is_ended_with_its_children():
    job = BenchJob(title="slow", kind="gpu", settings={}, turns=1, seconds=0.2)
    with pytest.raises(RuntimeError, match=r"slow: was ended after 0 s without a result"):
        run_job(job, lambda _: None)


def test_the_command_refuses_in_a_sentence_and_fails_with_its_checks(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words, sentence in [
        (["gpu"], "torch finds no GPU here"),
        (["gpu", "--device", "cpu", "--only", "nothing"], "there is no check 'nothing'"),
        (["gpu", "--device", "cpu", "--voc", "nowhere"], "--voc nowhere is not a folder"),
    ]:
        with pytest.raises(SystemExit) as end:
            program.main(words)
        assert end.value.code == 2
        assert sentence in capfd.readouterr().err
    monkeypatch.setattr(gpu, "CHECKS", FAKES[:2])
    monkeypatch.setattr(gpu, "run_job", run_fake)
    monkeypatch.setattr(gpu.check_gpu, "__defaults__", (run_fake,))
    with pytest.raises(SystemExit) as end:
        program.main(["gpu", "--device", "cpu", "--out", str(tmp_path / "gpu.json")])
    assert end.value.code == 1
