"""Full disks, NaN, and crashes during a save lose nothing good."""

import json
import os
import random
import resource
import signal
import time

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

import hardmix.training.pretrain as loop
from file_calls import FileCalls, disk_full, end_process
from hardmix.errors import InputError
from hardmix.evaluation.trained_encoder import load_encoder
from hardmix.runs.checkpoints import optimizer_tensors
from hardmix.runs.folder import Run
from hardmix.settings.config import PretrainConfig
from hardmix.training import nan_guard, setup
from hardmix.training.optimizers import parameters_of
from hardmix.training.pretrain import pretrain
from hardmix.training.state import settle
from ranks import lines_of, start, state_of, tensors_file, tiny, wait

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def run(tmp_path):
    return Run.create(tmp_path / "run", PretrainConfig())


def save(run, step):
    run.save_checkpoint(step, {"weights": torch.full((100,), float(step))}, {"note": step})


def calls_of_a_save(run, monkeypatch):
    with monkeypatch.context() as patch:
        calls = FileCalls(patch)
        save(run, 4)
    assert calls.count >= 6
    return calls.count


@pytest.mark.parametrize("kill", [False, True])
def test_a_save_that_fails_or_dies_at_any_file_call_leaves_a_whole_checkpoint(
    kill, run, monkeypatch
):
    for step in (1, 2, 3):
        save(run, step)
    calls = calls_of_a_save(run, monkeypatch)
    for which in range(1, calls + 1):
        step = 4 + which
        if kill:
            child = os.fork()
            if child == 0:
                with monkeypatch.context() as patch:
                    FileCalls(patch, which, end_process)
                    save(run, step)
                os._exit(0)
            os.waitpid(child, 0)
        else:
            with monkeypatch.context() as patch:
                FileCalls(patch, which, disk_full)
                try:
                    save(run, step)
                except OSError as error:
                    said = str(error.filename)
                    assert "needs" in said
            assert not list(run.checkpoints.glob(".*.tmp"))
        found = run.load_checkpoint()
        assert found.broken == []
        assert found.manifest["step"] in (step, step - 1, step - 2)
        assert torch.equal(
            found.tensors["weights"], torch.full((100,), float(found.manifest["step"]))
        )
        save(run, step)


def limited(config, out, limit):
    """Train while no file may grow beyond `limit` bytes, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    pretrain(config, out)


def test_a_disk_without_room_for_checkpoints_costs_checkpoints_only(tmp_path):
    """A checkpoint of `tiny` has 6.4 MB, its encoder 1.7."""
    processes = start(
        limited, tiny(), tmp_path / "run", 3_000_000, ranks=1, output=tmp_path / "log"
    )
    assert wait(processes) == [74]
    shown = (tmp_path / "log-0").read_text()
    assert "no checkpoint at step 6 (File too large)" in shown
    assert "step-00000006 needs 6.4 MB" in shown
    assert "MB are free" in shown
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
    assert load_encoder(tmp_path / "run").backbone == "small"
    pretrain(tiny(), tmp_path / "whole")
    assert lines_of(tmp_path / "run") == lines_of(tmp_path / "whole")


def test_an_encoder_that_cannot_be_written_is_said_and_written_later(tmp_path):
    processes = start(
        limited, tiny(), tmp_path / "run", 1_000_000, ranks=1, output=tmp_path / "log"
    )
    assert wait(processes) == [74]
    shown = (tmp_path / "log-0").read_text()
    assert "the encoder could not be written (File too large)" in shown
    assert "encoder.safetensors needs 1.7 MB" in shown
    assert not (tmp_path / "run" / "encoder.safetensors").exists()
    assert not list((tmp_path / "run").glob(".*.tmp"))
    pretrain(tiny(), tmp_path / "run", resume=True)
    pretrain(tiny(), tmp_path / "whole")
    assert state_of(tmp_path / "run") == state_of(tmp_path / "whole")


def test_lines_that_find_no_room_are_written_when_there_is_some(run, monkeypatch):
    run.log({"step": 1})
    with monkeypatch.context() as patch:
        FileCalls(patch, 1, disk_full)
        run.log({"step": 2})
    assert [line["step"] for line in run.metrics()] == [1]
    run.log({"step": 3})
    assert [line["step"] for line in run.metrics()] == [1, 2, 3]


def test_leftovers_of_a_killed_save_are_removed_at_the_next_start(tmp_path):
    pretrain(tiny(), tmp_path / "run")
    leftover = tmp_path / "run" / "checkpoints" / ".step-00000009.safetensors.123.tmp"
    leftover.write_bytes(b"half")
    pretrain(tiny(train={"epochs": 3}), tmp_path / "run", resume=True)
    assert not leftover.exists()


def poison(monkeypatch, steps, what="images", factor=torch.inf):
    """Make a batch's images NaN, or multiply gradients by this factor, at these steps."""
    take_step = loop.take_step

    def poisoned(training, batch, epoch):
        if training.step in steps and what == "images":
            batch.query[0, 0, 0, 0] = torch.nan
        if training.step in steps and what == "gradients":
            hook = parameters_of(training.optimizer)[0].register_hook(lambda grad: grad * factor)
            loss = take_step(training, batch, epoch)
            hook.remove()
            return loss
        return take_step(training, batch, epoch)

    monkeypatch.setattr(loop, "take_step", poisoned)


@pytest.mark.parametrize("what", ["images", "gradients"])
@pytest.mark.parametrize("method", ["mochi", "supervised"])
def test_a_step_that_is_no_number_is_not_applied_and_kept_for_inspection(
    method, what, tmp_path, monkeypatch
):
    poison(monkeypatch, {8}, what)
    words = r"step 8 is not applied: .* Its images: shapes\[\d+\], .*learning rate.*nan-step-8"
    with pytest.raises(InputError, match=words):
        pretrain(tiny(method), tmp_path / "run")
    folder = tmp_path / "run" / "nan-step-8"
    facts = json.loads((folder / "facts.json").read_text())
    assert facts["step"] == 8
    assert len(facts["images"]) == 16
    state = load_file(folder / "state.safetensors")
    assert all(bool(value.isfinite().all()) for value in state.values())
    batch = load_file(folder / "batch-of-rank-0.safetensors")
    views = {"view-0"} if method == "supervised" else {"view-0", "view-1"}
    assert set(batch) == {"labels", "ids"} | views
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "failed"
    monkeypatch.undo()
    pretrain(tiny(method), tmp_path / "run", resume=True)
    pretrain(tiny(method), tmp_path / "whole")
    assert state_of(tmp_path / "run") == state_of(tmp_path / "whole")


@pytest.mark.parametrize("what", ["images", "gradients"])
def test_steps_that_are_no_numbers_can_be_skipped(what, tmp_path, monkeypatch, capfd):
    poison(monkeypatch, {3, 8, 11}, what)
    run = pretrain(tiny(train={"on_nan": "skip"}), tmp_path / "run")
    assert capfd.readouterr().err.count("is not applied") == 3
    newest = load_file(sorted(run.checkpoints.glob("*.safetensors"))[-1])
    assert all(bool(value.isfinite().all()) for value in newest.values())
    assert all(line["loss"] == line["loss"] for line in run.metrics() if "loss" in line)
    assert len(list(run.path.glob("nan-step-*"))) == 3


@pytest.mark.parametrize("optimizer", ["sgd", "lars", "adamw"])
def test_a_verdict_that_is_read_a_step_later_skips_the_same_steps(optimizer, tmp_path, monkeypatch):
    """A GPU's optimizer acts on the flag, and the rest of the step is undone in the next."""
    options = {"optimizer": {"name": optimizer, "lr": 0.01}}
    config = tiny(train={"on_nan": "skip", "log_every": 1, "knn_every": 0}, **options)
    poison(monkeypatch, {0, 3, 4, 11}, "gradients")
    pretrain(config, tmp_path / "at once")
    monkeypatch.setattr(setup, "judged_late", lambda _: True)
    pretrain(config, tmp_path / "late every step")
    pretrain(tiny(train={"on_nan": "skip", "knn_every": 0}, **options), tmp_path / "late")
    newest = [
        sorted((tmp_path / name / "checkpoints").glob("*.safetensors"))[-1].read_bytes()
        for name in ("at once", "late every step", "late")
    ]
    assert newest[0] == newest[1] == newest[2]
    assert len(list((tmp_path / "late").glob("nan-step-*"))) == 3


def test_a_late_verdict_stops_with_the_step_and_its_files(tmp_path, monkeypatch):
    monkeypatch.setattr(setup, "judged_late", lambda _: True)
    poison(monkeypatch, {8}, "gradients")
    words = (
        r"step 8 is not applied: gradients contain NaN.* Its images: shapes\[\d+\], .*nan-step-8"
    )
    with pytest.raises(InputError, match=words):
        pretrain(tiny(), tmp_path / "run")
    monkeypatch.undo()
    pretrain(tiny(), tmp_path / "run", resume=True)
    pretrain(tiny(), tmp_path / "whole")
    assert state_of(tmp_path / "run") == state_of(tmp_path / "whole")


def test_no_checkpoint_holds_a_step_that_was_not_judged(tmp_path, monkeypatch):
    """A NaN in the last step before a save within an epoch is undone before the save."""
    monkeypatch.setattr(setup, "judged_late", lambda _: True)
    poison(monkeypatch, {1}, "gradients")
    train = {"on_nan": "skip", "knn_every": 0, "epochs": 1, "save_minutes": 1e-9, "log_every": 9}
    run = pretrain(tiny(data={"num_images": 48}, train=train), tmp_path / "run")
    file = run.checkpoints / "step-00000002.json"
    assert json.loads(file.read_text())["skipped"] == 1
    saved = load_file(tensors_file(run.checkpoints, 2))
    assert saved["losses"].shape == (1, 1)
    assert int(saved["objective.memory._extra_state"][0]) == 16  # only the first step's keys


@pytest.mark.parametrize("late", [False, True])
def test_a_skipped_step_changes_nothing(late, tmp_path, monkeypatch):
    monkeypatch.setattr(setup, "judged_late", lambda _: late)
    take_step, seen = loop.take_step, []

    def state(training):
        tensors = {f"method.{k}": v for k, v in training.method.state_dict().items()}
        tensors |= optimizer_tensors(training.optimizer)
        return {name: each.clone() for name, each in tensors.items() if isinstance(each, Tensor)}

    def noted(training, batch, epoch):
        if training.step != 7:
            return take_step(training, batch, epoch)
        settle(training)
        before = state(training)
        hook = parameters_of(training.optimizer)[0].register_hook(lambda grad: grad * torch.inf)
        loss = take_step(training, batch, epoch)
        hook.remove()
        settle(training)
        after = state(training)
        seen.extend(name for name in before if not torch.equal(before[name], after[name]))
        seen.append(len(before))
        return loss

    monkeypatch.setattr(loop, "take_step", noted)
    pretrain(tiny(train={"on_nan": "skip", "knn_every": 0}), tmp_path / "run")
    assert len(seen) == 1


def test_an_overflow_of_half_precision_is_no_fault(tmp_path, monkeypatch, capfd):
    """fp16: the scale starts so high that gradients overflow; it is halved until they do not."""
    monkeypatch.setattr(nan_guard, "START", 2.0**40)
    config = tiny(train={"precision": "fp16", "knn_every": 0, "epochs": 4})
    run = pretrain(config, tmp_path / "run")
    assert "is not applied" not in capfd.readouterr().err
    newest = load_file(sorted(run.checkpoints.glob("*.safetensors"))[-1])
    assert 2.0**10 < float(newest["scaler.scale"]) < 2.0**40
    assert all(bool(value.isfinite().all()) for value in newest.values())
    poison(monkeypatch, {26}, "images")
    with pytest.raises(InputError, match="step 26 is not applied"):
        pretrain(tiny(train=config.train.__dict__ | {"epochs": 5}), run.path, resume=True)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("on_nan", "step"), [("stop", 2), ("skip", 4)])
def test_gradients_that_are_broken_at_any_scale_are_a_fault(
    on_nan, step, late, tmp_path, monkeypatch
):
    """fp16: gradients are always NaN, the loss is not; the scale falls from 2 to 1 to 0.5."""
    monkeypatch.setattr(setup, "judged_late", lambda _: late)
    monkeypatch.setattr(nan_guard, "START", 2.0)
    monkeypatch.setattr("hardmix.training.state.MOST_SKIPPED", 2)
    poison(monkeypatch, set(range(99)), "gradients", torch.nan)
    words = (
        rf"step {step} is not applied: gradients contain NaN .*loss scale .*"
        r"Its images: shapes\[\d+\], .*fp16 .*nan-step-"
    )
    train = {"precision": "fp16", "on_nan": on_nan, "knn_every": 0}
    with pytest.raises(InputError, match=words):
        pretrain(tiny(train=train), tmp_path / "run")


def test_a_run_that_only_skips_has_diverged_and_stops(tmp_path, monkeypatch):
    poison(monkeypatch, set(range(1, 100)))
    with pytest.raises(InputError, match="step 21 is not applied"):
        pretrain(tiny(train={"on_nan": "skip", "epochs": 9, "knn_every": 0}), tmp_path / "run")
    assert len(list((tmp_path / "run").glob("nan-step-*"))) == 3


def poison_rank_1(config, out):
    take_step = loop.take_step

    def poisoned(training, batch, epoch):
        if training.step == 2 and torch.distributed.get_rank() == 1:
            batch.key[0, 0, 0, 0] = torch.nan
        return take_step(training, batch, epoch)

    loop.take_step = poisoned
    pretrain(config, out)


def test_one_ranks_nan_stops_both_at_the_same_step(tmp_path):
    log = tmp_path / "log"
    assert wait(start(poison_rank_1, tiny(), tmp_path / "run", output=log)) == [2, 2]
    assert "step 2 is not applied" in (tmp_path / "log-0").read_text()
    kept = {file.name for file in (tmp_path / "run" / "nan-step-2").iterdir()}
    assert {"batch-of-rank-0.safetensors", "batch-of-rank-1.safetensors"} <= kept


def test_a_signal_to_the_whole_group_leaves_workers_alive_until_all_is_saved(tmp_path):
    for index in range(24):
        file = tmp_path / "images" / f"class{index % 2}" / f"{index}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 36), (10 * index, 5, 9)).save(file)
    data = {"name": None, "root": str(tmp_path / "images"), "num_images": None, "workers": 2}
    train = {"batch_size": 8, "queue_size": 16, "epochs": 300, "knn_every": 0, "log_every": 1}
    (process,) = start(
        in_own_group, tiny(data=data, train=train), tmp_path / "run", ranks=1, output=tmp_path / "l"
    )
    while len(lines_of(tmp_path / "run")) < 5 and process.is_alive():
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGTERM)
    assert wait([process]) == [75]
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (tmp_path / "run" / "checkpoints" / f"step-{status['step']:08d}.json").exists()


def in_own_group(config, out):
    os.setpgrp()
    pretrain(config, out)


def test_damaged_run_folders_are_refused_in_words_or_resumed(tmp_path):
    """A few mutations of each file; benchmarks/torture tries thousands."""
    run = pretrain(tiny("moco-v2", train={"knn_every": 0}), tmp_path / "run")
    generator = random.Random(0)
    files = [file for file in run.path.rglob("*") if file.is_file() and file.name != ".lock"]
    for file in sorted(files):
        data = file.read_bytes()
        for _ in range(2):
            damaged = bytearray(data)
            damaged[generator.randrange(len(damaged))] ^= 1 << generator.randrange(8)
            file.write_bytes(damaged[: generator.choice([len(damaged), len(damaged) // 2])])
            try:
                found = run.load_checkpoint()
                assert found is not None
                run.metrics()
                run.config()
                load_encoder(run.path)
            except InputError as error:
                assert str(tmp_path) in str(error)  # noqa: PT017
            for broken in run.checkpoints.glob("*.broken"):
                broken.rename(broken.with_suffix(""))
            file.write_bytes(data)
