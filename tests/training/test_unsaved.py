"""Results that cannot be written are reported once, with what is kept and in the status."""

import errno
import json
import os
import resource
import shutil
import signal

import pytest

import hardmix.training.pretrain as loop
from hardmix.errors import OutputError, UnfinishedError
from hardmix.runs import folder as run_folder
from hardmix.runs.folder import Run
from hardmix.training.pretrain import pretrain
from hardmix.training.state import report_checkpoint
from ranks import lines_of, start, state_of, tiny, wait

pytestmark = pytest.mark.slow


class Disk:
    """A disk that is full for some kinds of files, from some step of training on."""

    def __init__(self, monkeypatch):
        self.full = ()
        self._write = run_folder.write_atomically
        monkeypatch.setattr(run_folder, "write_atomically", self.write)
        monkeypatch.setattr("hardmix.runs.checkpoints.write_atomically", self.write)

    def write(self, file, data):
        if file.suffix in self.full or file.name in self.full:
            raise OSError(errno.ENOSPC, "No space left on device", str(file))
        self._write(file, data)


def at_step(monkeypatch, number, event):
    """Let something happen after this step."""
    take_step = loop.take_step

    def step_and_act(training, batch, epoch):
        loss = take_step(training, batch, epoch)
        if training.step + 1 == number:
            event(training)
        return loss

    monkeypatch.setattr(loop, "take_step", step_and_act)


def fill(disk, *kinds):
    def event(training):
        report_checkpoint(training)  # what was saved before is there
        disk.full = kinds

    return event


EVERY_EPOCH = {"epochs": 4, "knn_every": 0}
"""Epochs of six steps, each with a checkpoint."""


def test_checkpoints_that_find_no_room_are_said_once_and_end_in_74(tmp_path, monkeypatch, capfd):
    disk = Disk(monkeypatch)
    at_step(monkeypatch, 7, fill(disk, ".safetensors"))
    monkeypatch.setattr(Run, "write_encoder", lambda *_, **__: None)
    with pytest.raises(OutputError) as ended:
        pretrain(tiny(train=EVERY_EPOCH), tmp_path / "my run")
    shown = capfd.readouterr().err
    assert shown.count("warning: no checkpoint") == shown.count("no checkpoint at step 12") == 1
    assert "The checkpoint of step 6 is kept." in shown
    for words in (
        "encoder.safetensors is complete",
        "its last checkpoint (No space left on device)",
        "The checkpoint of step 6 is kept.",
        f"hardmix pretrain --out '{tmp_path}/my run' --resume continues from step 6.",
    ):
        assert words in str(ended.value)
    assert ended.value.status == 74
    status = json.loads((tmp_path / "my run" / "status.json").read_text())
    assert status["state"] == "failed"
    assert "its last checkpoint" in status["reason"]


def test_a_disk_with_room_again_is_said_too_and_the_run_ends_well(tmp_path, monkeypatch, capfd):
    disk = Disk(monkeypatch)
    at_step(monkeypatch, 7, fill(disk, ".safetensors"))
    at_step(monkeypatch, 13, fill(disk))
    run = pretrain(tiny(train=EVERY_EPOCH), tmp_path / "run")
    shown = capfd.readouterr()
    assert "Checkpoints can be written again: saved step 18." in shown.out
    assert shown.err.count("warning: no checkpoint") == 1
    assert run.load_checkpoint().manifest["step"] == 24


@pytest.mark.parametrize(("filled", "kept"), [(1, None), (7, 6)])
def test_a_signal_on_a_full_disk_does_not_promise_a_checkpoint(filled, kept, tmp_path, monkeypatch):
    disk = Disk(monkeypatch)
    at_step(monkeypatch, filled, fill(disk, ".safetensors"))
    at_step(monkeypatch, 8, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(OutputError) as ended:
        pretrain(tiny(train=EVERY_EPOCH), tmp_path / "run")
    said = str(ended.value)
    assert "stopped by SIGTERM, but the checkpoint of step 8 could not be written" in said
    if kept is None:
        assert "There is no earlier checkpoint." in said
        assert "--resume starts again from the beginning." in said
    else:
        assert "The checkpoint of step 6 is kept." in said
        assert "--resume continues from step 6." in said
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert said in status["reason"]
    disk.full = ()
    monkeypatch.undo()
    pretrain(tiny(train=EVERY_EPOCH), tmp_path / "run", resume=True)
    pretrain(tiny(train=EVERY_EPOCH), tmp_path / "whole")
    assert state_of(tmp_path / "run") == state_of(tmp_path / "whole")


def test_a_signal_right_after_a_checkpoint_needs_no_other(tmp_path, monkeypatch):
    """The step is saved already: a full disk costs nothing then."""
    disk = Disk(monkeypatch)
    save = loop.save_checkpoint

    def save_then_stop(training):
        save(training)
        report_checkpoint(training)
        disk.full = (".json",)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(loop, "save_checkpoint", save_then_stop)
    with pytest.raises(UnfinishedError, match=r"after step 6: .* --resume continues from there"):
        pretrain(tiny(train=EVERY_EPOCH), tmp_path / "run")


def test_status_json_is_written_on_a_full_disk_in_its_own_place(tmp_path, monkeypatch):
    disk = Disk(monkeypatch)
    run = Run(tmp_path)
    run.set_status("running", step=3, reason="r" * 300)
    disk.full = ("status.json",)
    run.set_status("failed", step=7)
    status = json.loads(run.status_file.read_text())
    assert (status["state"], status["step"]) == ("failed", 7)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (("pretrain.json",), "results/pretrain.json"),
        (("metrics.jsonl",), "the last 4 lines of its logs"),
    ],
)
def test_a_missing_summary_or_log_is_said_at_the_end(files, words, tmp_path, monkeypatch):
    disk = Disk(monkeypatch)
    append = run_folder.append_line

    def append_line(file, text):
        if file.name in disk.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(file, text)

    monkeypatch.setattr(run_folder, "append_line", append_line)
    at_step(monkeypatch, 7, fill(disk, *files))
    with pytest.raises(OutputError) as ended:
        pretrain(tiny(), tmp_path / "run")
    assert words in str(ended.value)


@pytest.mark.parametrize("fault", [errno.EIO, errno.ESTALE, errno.EDQUOT])
def test_a_log_that_cannot_be_synced_costs_a_checkpoint_not_the_run(
    fault, tmp_path, monkeypatch, capfd
):
    run, fsync = Run(tmp_path / "run"), os.fsync

    def failing(number):
        if os.path.samestat(os.fstat(number), os.stat(run.metrics_file)):
            raise OSError(fault, os.strerror(fault))
        fsync(number)

    at_step(monkeypatch, 7, lambda _: monkeypatch.setattr(os, "fsync", failing))
    at_step(monkeypatch, 13, lambda _: monkeypatch.setattr(os, "fsync", fsync))
    pretrain(tiny(train=EVERY_EPOCH), run.path)
    shown = capfd.readouterr()
    assert f"no checkpoint at step 12 ({os.strerror(fault)}): {run.metrics_file}." in shown.err
    assert "Checkpoints can be written again: saved step 18." in shown.out
    assert run.load_checkpoint().manifest["step"] == 24


def test_an_encoder_that_finds_no_room_ends_in_74(tmp_path, monkeypatch):
    disk = Disk(monkeypatch)
    at_step(monkeypatch, 7, fill(disk, "encoder.safetensors"))
    with pytest.raises(
        OutputError, match=r"the encoder could not be written .* are kept: .*resume"
    ):
        pretrain(tiny(), tmp_path / "run")


@pytest.mark.parametrize("step", [8, 12])
@pytest.mark.parametrize("replaced", [False, True], ids=["moved", "replaced"])
def test_a_folder_that_is_moved_away_is_noticed_and_nothing_is_written_elsewhere(
    step, replaced, tmp_path, monkeypatch
):
    def move(training):
        report_checkpoint(training)
        shutil.move(tmp_path / "run", tmp_path / "new place")
        if replaced:
            (tmp_path / "run").mkdir()

    at_step(monkeypatch, step, move)
    with pytest.raises(OutputError, match=r"run was moved, deleted or replaced .* --resume"):
        pretrain(tiny(), tmp_path / "run")
    assert (tmp_path / "run").exists() == replaced
    assert not replaced or not list((tmp_path / "run").iterdir())
    monkeypatch.undo()
    pretrain(tiny(), tmp_path / "new place", resume=True)
    pretrain(tiny(), tmp_path / "whole")
    assert state_of(tmp_path / "new place") == state_of(tmp_path / "whole")


def limited(config, out, limit):
    """Train while no file may grow beyond `limit` bytes, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    pretrain(config, out)


def test_two_processes_end_alike_where_the_disk_is_full(tmp_path):
    out = tmp_path / "run"
    processes = start(limited, tiny(), out, 3_000_000, output=tmp_path / "log")
    assert wait(processes) == [74, 74]
    shown = "".join((tmp_path / f"log-{rank}").read_text() for rank in range(2))
    assert shown.count("its last checkpoint (File too large)") == 1  # one speaks for all
    assert shown.count("warning: no checkpoint") == 1
    assert lines_of(out)[-1]["step"] == 12
