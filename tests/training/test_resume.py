"""A run that is stopped and resumed ends as the unbroken one: weights, queue, logs, bit for bit."""

import dataclasses
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import hardmix.training.pretrain as loop
import hardmix.training.state
from hardmix.commands import main as cli
from hardmix.errors import InputError, UnfinishedError
from hardmix.evaluation import knn
from hardmix.runs.folder import Run, check_resumable
from hardmix.settings.config import PretrainConfig
from hardmix.settings.saved import MAY_CHANGE, MUST_MATCH, settings
from hardmix.training.pretrain import pretrain
from ranks import (
    lines_of,
    manifest_of,
    signal_after,
    start,
    state_of,
    tensors_file,
    tiny,
    wait,
)

pytestmark = pytest.mark.slow

STEPS = 12
"""Steps of `tiny`: two epochs of six."""


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Threads of a run that shares its cores with other tests wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    run = tmp_path_factory.mktemp("unbroken") / "run"
    pretrain(tiny(), run)
    return state_of(run)


def train_to_the_end(run, config=None):
    """Resume until it is done; returns how often it was stopped."""
    for stops in itertools.count():
        try:
            pretrain(config or tiny(), run, resume="auto")
        except UnfinishedError:
            continue
        return stops
    raise AssertionError("it never ends")


@pytest.mark.parametrize("steps", [{1}, {6}, {2, 5, 8, 11}, set(range(1, 12))])
def test_stopped_at_any_step_and_resumed_it_ends_as_the_unbroken_run(
    steps, unbroken, tmp_path, monkeypatch
):
    signal_after(monkeypatch, steps)
    assert train_to_the_end(tmp_path / "run") == len(steps)
    assert state_of(tmp_path / "run") == unbroken


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_each_signal_saves_and_says_how_to_go_on(number, tmp_path, monkeypatch):
    before = signal.getsignal(number)
    signal_after(monkeypatch, {3}, number)
    with pytest.raises(UnfinishedError, match=rf"{number.name} after step 3: .*--resume"):
        pretrain(tiny(), tmp_path / "run")
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["step"]) == ("stopped", 3)
    assert (tmp_path / "run" / "checkpoints" / "step-00000003.json").exists()
    assert signal.getsignal(number) is before


def test_a_signal_before_the_first_step_saves_that_nothing_was_done(
    unbroken, tmp_path, monkeypatch
):
    def signalled(training, **options):
        begin(training, **options)
        os.kill(os.getpid(), signal.SIGTERM)

    begin = loop.start
    monkeypatch.setattr(loop, "start", signalled)
    with pytest.raises(UnfinishedError, match="after step 0"):
        pretrain(tiny(), tmp_path / "run")
    monkeypatch.undo()
    pretrain(tiny(), tmp_path / "run", resume=True)
    assert state_of(tmp_path / "run") == unbroken


@pytest.mark.parametrize("asked", [1, 2])
def test_a_signal_while_the_accuracy_is_measured_stops_between_batches(
    asked, unbroken, tmp_path, monkeypatch
):
    counter = itertools.count(1)

    def signalled(*arguments, **options):
        if next(counter) == asked:
            os.kill(os.getpid(), signal.SIGTERM)
        return extract(*arguments, **options)

    extract = knn.extract
    monkeypatch.setattr(knn, "extract", signalled)
    with pytest.raises(UnfinishedError, match="after step 12"):
        pretrain(tiny(), tmp_path / "run")
    assert not any("knn" in line for line in lines_of(tmp_path / "run"))
    pretrain(tiny(), tmp_path / "run", resume=True)
    assert state_of(tmp_path / "run") == unbroken


def test_what_was_logged_after_the_checkpoint_is_not_logged_twice(unbroken, tmp_path, monkeypatch):
    """Killed between the k-NN line and the checkpoint that would have covered it."""
    monkeypatch.setattr(loop, "save_checkpoint", lambda training: 1 / 0)
    signal_after(monkeypatch, {5})
    with pytest.raises(UnfinishedError):
        pretrain(tiny(train={"save_every": 2}), tmp_path / "run")
    with pytest.raises(ZeroDivisionError):
        pretrain(tiny(train={"save_every": 2}), tmp_path / "run", resume=True)
    assert any("knn" in line for line in lines_of(tmp_path / "run"))
    monkeypatch.undo()
    pretrain(tiny(), tmp_path / "run", resume=True)
    assert state_of(tmp_path / "run") == unbroken


def test_a_run_killed_before_its_first_checkpoint_starts_anew(unbroken, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "save_checkpoint", lambda training: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pretrain(tiny(), tmp_path / "run")
    assert lines_of(tmp_path / "run")
    monkeypatch.undo()
    pretrain(tiny(), tmp_path / "run", resume=True)
    assert state_of(tmp_path / "run") == unbroken


def test_a_broken_newest_checkpoint_costs_time_only(unbroken, tmp_path, monkeypatch, capfd):
    signal_after(monkeypatch, {3, 9})
    for _ in range(2):
        with pytest.raises(UnfinishedError):
            pretrain(tiny(), tmp_path / "run", resume="auto")
    newest = tensors_file(tmp_path / "run" / "checkpoints", 9)
    newest.write_bytes(newest.read_bytes()[:-1])
    pretrain(tiny(), tmp_path / "run", resume=True)
    assert "step-00000009.json does not match its checksum" in capfd.readouterr().err
    assert state_of(tmp_path / "run") == unbroken


def test_checkpoints_by_the_clock_change_nothing(unbroken, tmp_path, monkeypatch):
    monkeypatch.setattr(hardmix.training.state, "time", Clock())
    pretrain(tiny(train={"save_minutes": 1.5}), tmp_path / "run")
    assert state_of(tmp_path / "run") == unbroken
    assert Clock.saved > 2


class Clock:
    """A clock that advances by a minute whenever it is read."""

    saved, now = 0, 0.0

    def monotonic(self):
        Clock.now += 60.0
        Clock.saved += 1
        return Clock.now


def test_dropout_repeats_after_a_resume(tmp_path, monkeypatch):
    def trunk():
        torch.manual_seed(1)
        return torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Dropout(0.5), torch.nn.Linear(3 * 32 * 32, 16)
        )

    pretrain(tiny(), tmp_path / "whole", trunk=trunk())
    signal_after(monkeypatch, {4})
    with pytest.raises(UnfinishedError):
        pretrain(tiny(), tmp_path / "stopped", trunk=trunk())
    torch.rand(7)
    pretrain(tiny(), tmp_path / "stopped", trunk=trunk(), resume=True)
    assert state_of(tmp_path / "stopped") == state_of(tmp_path / "whole")


def test_files_read_by_workers_resume_within_an_epoch(tmp_path, monkeypatch):
    for index in range(24):
        file = tmp_path / "images" / f"class{index % 2}" / f"{index}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 36), (10 * index, 5, 9)).save(file)
    data = {"name": None, "root": str(tmp_path / "images"), "num_images": None, "workers": 1}
    config = tiny(data=data, train={"batch_size": 8, "queue_size": 16})
    pretrain(config, tmp_path / "whole")
    signal_after(monkeypatch, {2, 4})
    assert train_to_the_end(tmp_path / "stopped", config) == 2
    assert state_of(tmp_path / "stopped") == state_of(tmp_path / "whole")


def test_two_processes_stopped_killed_and_resumed_end_as_the_unbroken_two(tmp_path):
    pretrain_both(tmp_path / "whole", [])
    whole = state_of(tmp_path / "whole")
    generator = random.Random(0)
    kills = [(signal.SIGTERM, [1]), (signal.SIGKILL, [0]), (signal.SIGKILL, [1])]
    for number, victims in kills:
        processes = start(pretrain_any, tmp_path / "run", output=tmp_path / "log")
        wait_for_steps(tmp_path / "run", generator.randint(1, 4), processes)
        for victim in victims:
            os.kill(processes[victim].pid, number)
        statuses = wait(processes)
        if number == signal.SIGTERM:
            assert statuses in ([75, 75], [0, 0])
    pretrain_both(tmp_path / "run", [0, 0])
    assert state_of(tmp_path / "run") == whole


def pretrain_any(run):
    pretrain(tiny(train={"log_every": 1}), run, resume="auto")


def pretrain_both(run, _):
    assert wait(start(pretrain_any, run)) == [0, 0]


def wait_for_steps(run, number, processes):
    """Wait until these processes have logged `number` lines, or are done."""
    before = None
    while all(process.is_alive() for process in processes):
        status = run / "status.json"
        if status.exists() and json.loads(status.read_text())["process"] == processes[0].pid:
            logged = len(lines_of(run))
            before = logged if before is None else before
            if logged >= before + number or json.loads(status.read_text())["state"] != "running":
                return
        time.sleep(0.005)


def test_another_number_of_processes_goes_on_with_the_same_images(tmp_path, monkeypatch):
    config = tiny(train={"log_every": 1})
    pretrain(config, tmp_path / "whole")
    signal_after(monkeypatch, {4})
    with pytest.raises(UnfinishedError):
        pretrain(config, tmp_path / "run")
    assert wait(start(pretrain_any, tmp_path / "run")) == [0, 0]
    newest = [tensors_file(tmp_path / name / "checkpoints", STEPS) for name in ("whole", "run")]
    ids = [load_file(file)["objective.memory.ids"] for file in newest]
    assert ids[0].equal(ids[1])


def test_a_second_interrupt_ends_at_once(tmp_path):
    program = """
import os, signal
from hardmix.runtime.signals import listening
with listening() as stop:
    os.kill(os.getpid(), signal.SIGINT)
    assert stop.name == "SIGINT"
    os.kill(os.getpid(), signal.SIGINT)
    raise SystemExit("still here")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert ended.returncode == -signal.SIGINT  # 130 in a shell


def test_a_folder_has_one_writer(tmp_path):
    config = tiny(train={"epochs": 500, "knn_every": 0})
    (process,) = start(pretrain, config, tmp_path / "run", ranks=1)
    wait_for_steps(tmp_path / "run", 1, [process])
    with pytest.raises(InputError, match=rf"written by process {process.pid} on "):
        pretrain(config, tmp_path / "run", resume="auto")
    process.kill()
    wait([process])
    (process,) = start(pretrain, tiny(), tmp_path / "other", ranks=1)
    assert wait([process]) == [0]


def test_the_last_two_every_nth_and_the_best_checkpoint_are_kept(tmp_path):
    config = tiny(train={"epochs": 7, "keep_every": 3, "knn_every": 1})
    run = pretrain(config, tmp_path / "run")
    best = json.loads((run.checkpoints / "best.json").read_text())
    accuracies = {line["step"]: line["knn"] for line in run.metrics() if "knn" in line}
    assert best["knn"] == max(accuracies.values())
    assert accuracies[int(best["checkpoint"].split("-")[1])] == best["knn"]
    kept = {int(file.stem.split("-")[1]) for file in run.checkpoints.glob("step-*.json")}
    assert kept == {18, 36, 42} | {int(best["checkpoint"].split("-")[1])}
    assert set(run.checkpoints.glob("*.safetensors")) == {
        tensors_file(run.checkpoints, step) for step in kept
    }


def test_every_setting_must_match_or_may_change():
    names = set(settings(PretrainConfig()))
    assert names == MUST_MATCH | MAY_CHANGE
    assert not MUST_MATCH & MAY_CHANGE


@pytest.mark.parametrize("name", sorted(MUST_MATCH | MAY_CHANGE))
def test_a_changed_setting_is_taken_or_refused_by_name_and_value(name, tmp_path):
    run = Run.create(tmp_path / "run", PretrainConfig())
    values = json.loads(run.config_file.read_text())
    group, _, field = name.partition(".")
    changed = dataclasses.replace(PretrainConfig())
    target = getattr(changed, group) if field else changed
    object.__setattr__(target, field or group, "something else")
    if name in MAY_CHANGE:
        check_resumable(run.path, changed)
        run.write_config(changed)
        saved = json.loads(run.config_file.read_text())[group]
        assert (saved[field] if field else saved) == "something else"
    else:
        with pytest.raises(InputError, match=rf"{name} cannot change from .* to something else"):
            check_resumable(run.path, changed)
        assert json.loads(run.config_file.read_text()) == values


@pytest.fixture
def photographs(tmp_path):
    for index in range(16):
        file = tmp_path / "images" / f"class{index % 2}" / f"{index:02}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 36), (10 * index, 5, 9)).save(file)
    return tmp_path / "images"


def test_changed_images_are_counted_and_named_and_need_a_word(photographs, tmp_path, capfd):
    data = {"name": None, "root": str(photographs), "num_images": None, "workers": 0}
    options = {"batch_size": 8, "queue_size": 16, "knn_every": 0}
    pretrain(tiny(data=data, train=options), tmp_path / "run")
    photographs.rename(tmp_path / "moved")
    moved = tiny(data=data | {"root": str(tmp_path / "moved")}, train=options | {"epochs": 3})
    pretrain(moved, tmp_path / "run", resume=True)  # a folder may move
    for index in range(20, 27):
        Image.new("RGB", (30, 30), (index, 0, 0)).save(tmp_path / f"moved/class1/{index}.png")
    (tmp_path / "moved" / "class0" / "04.png").unlink()
    longer = tiny(data=data | {"root": str(tmp_path / "moved")}, train=options | {"epochs": 4})
    words = r"7 added \(.*class1/20\.png, .*24\.png, \.\.\.\); 1 removed \(.*class0/04\.png\)"
    with pytest.raises(InputError, match=words):
        pretrain(longer, tmp_path / "run", resume=True)
    pretrain(longer, tmp_path / "run", resume=True, allow_changed_data=True)
    assert "7 added" in capfd.readouterr().err
    pretrain(longer, tmp_path / "run", resume=True)  # known from now on


def command(capfd, *arguments):
    with pytest.raises(SystemExit) as done:
        cli.main([str(word) for word in arguments])
    shown = capfd.readouterr()
    assert "Traceback" not in shown.err
    return done.value.code or 0, shown.out + shown.err


SMALL = "--data.num-images 48 --train.batch-size 16 --train.queue-size 32 --mix.num-hardest 16"
SMALL += " --train.knn-every 0 --train.epochs 1"


def test_the_command_resumes_as_it_is_told(tmp_path, capfd, monkeypatch):
    out = ["--out", tmp_path / "run"]
    for resume in (["--resume"], ["--resume", "yes"]):
        code, shown = command(capfd, "pretrain", *out, *resume)
        assert code == 2
        assert "contains no run to resume" in shown
        assert "--resume auto" in shown
    assert not (tmp_path / "run").exists()
    signal_after(monkeypatch, {2})
    start_or_go_on = ["pretrain", "demo", *out, *SMALL.split(), "--resume", "auto"]
    code, shown = command(capfd, *start_or_go_on)
    assert code == 75
    assert "stopped by SIGTERM after step 2" in shown
    code, shown = command(capfd, *start_or_go_on)
    assert code == 0
    assert "Resuming from step 2." in shown
    code, shown = command(capfd, "pretrain", *out, "--resume", "--model.dim", "64")
    assert code == 2
    assert "model.dim cannot change from 128 to 64" in shown


def test_a_run_stopped_by_stop_epoch_continues_and_says_when_there_is_nothing_to_train(
    tmp_path, capfd
):
    """App. C.1: results at epoch 100 of 200, then the whole schedule, then 800."""
    run = pretrain(tiny(train={"stop_epoch": 1}), tmp_path / "run")
    words = f"hardmix pretrain --out {run.path} --resume --train.epochs 2"
    assert words in " ".join(capfd.readouterr().out.split())
    before = run.config_file.read_bytes()
    code, shown = command(capfd, "pretrain", "--out", run.path, "--resume")
    assert code == 0
    assert "is finished after 1 epoch, where train.stop_epoch stops it" in shown
    assert f"{words} continues it" in shown
    assert "Done" not in shown
    assert run.config_file.read_bytes() == before
    for checkpoint, accuracy in (("1", "knn"), ("step-00000006", "linear"), ("1", "finetune")):
        words = (accuracy, run.path, "--checkpoint", checkpoint, "--data.workers", "0")
        few = ("--epochs", "1", "--batch-size", "16") if accuracy == "finetune" else ()
        assert command(capfd, *words, *few)[0] == 0
    assert json.loads((run.results / "knn-step-00000006.json").read_text())["checkpoint"]
    assert (run.results / "linear-cached-step-00000006.json").exists()
    assert (run.results / "finetune-1-step-00000006.json").exists()
    assert not (run.results / "knn.json").exists()
    kept, features = tmp_path / "kept.safetensors", tmp_path / "features.npy"
    words = ("--checkpoint", "1", "--out")
    assert command(capfd, "export", run.path, "--format", "safetensors", *words, kept)[0] == 0
    assert kept.read_bytes() == run.encoder_file.read_bytes()
    assert command(capfd, "features", run.path, *words, features)[0] == 0
    assert features.exists()
    code, shown = command(
        capfd, "export", tensors_file(run.checkpoints), "--format", "onnx", "--out", "a.onnx"
    )
    assert code == 2
    assert f"{run.path} --checkpoint step-00000006" in " ".join(shown.split())
    detect = ("detect", run.path, "--task", "voc", "--data.root", tmp_path, "--checkpoint", "7")
    assert "checkpoint=7" in command(capfd, *detect)[1]
    code, shown = command(capfd, "knn", run.path, "--checkpoint", "7")
    assert code == 2
    assert "checkpoint=7" in shown
    assert "step-00000006 (epoch 1)" in shown
    code, shown = command(capfd, "pretrain", "--out", run.path, "--resume", "--train.epochs", "3")
    assert code == 0
    assert "Resuming from step 6" in shown
    assert (run.config().train.epochs, run.config().train.stop_epoch) == (3, None)
    assert max(line["epoch"] for line in run.metrics()) == 2


def test_a_checkpoint_of_an_older_version_goes_on_with_a_notice(tmp_path, monkeypatch, capfd):
    config = tiny(train={"knn_every": 0})
    monkeypatch.setattr(hardmix.training.state, "BITS", 1)
    pretrain(config, tmp_path / "run")
    monkeypatch.undo()
    capfd.readouterr()
    pretrain(tiny(train={"knn_every": 0, "epochs": 3}), tmp_path / "run", resume=True)
    words = "not be bit-identical to an uninterrupted run"
    assert words in capfd.readouterr().out
    pretrain(tiny(train={"knn_every": 0, "epochs": 4}), tmp_path / "run", resume=True)
    assert words not in capfd.readouterr().out


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return pretrain(tiny("moco-v2"), tmp_path_factory.mktemp("finished") / "run").path


def with_facts(checkpoints, **facts):
    """Change the newest manifest, with a checksum that matches."""
    manifest = manifest_of(checkpoints)
    file = checkpoints / f"step-{manifest['step']:08d}.json"
    manifest = {name: each for name, each in manifest.items() if name != "checksum"} | facts
    text = json.dumps(manifest, sort_keys=True).encode()
    file.write_text(json.dumps({**manifest, "checksum": hashlib.sha256(text).hexdigest()}))
    return file


ODD = [
    *({"best": value} for value in ("x", [], {}, {"checkpoint": 3, "knn": 0.5}, 7)),
    *({"best": {"checkpoint": "step-00000012", "knn": value}} for value in (None, "0.5", True)),
    *({"epoch": value} for value in ("1", None, -1, 1.5, 10**40, True, [1])),
    *({"position": "3"}, {"skipped": None}, {"seconds": "long"}, {"processes": "two"}),
    *({"logs": {"metrics.jsonl": -1}}, {"logs": 3}, {"logs": {"metrics.jsonl": "a"}}),
    *({"bits": "x"}, {"data": 3}),
]


@pytest.mark.parametrize("facts", ODD, ids=str)
def test_an_odd_fact_of_a_manifest_with_a_valid_checksum_is_named(facts, finished, tmp_path, capfd):
    shutil.copytree(finished, tmp_path / "run")
    file = with_facts(tmp_path / "run" / "checkpoints", **facts)
    (name,) = facts
    code, shown = command(
        capfd, "pretrain", "--out", tmp_path / "run", "--resume", "--train.epochs", "3"
    )
    assert code == 2
    assert f"{file} holds {name}=" in " ".join(shown.split())
    assert "delete the file to resume from the checkpoint before it" in " ".join(shown.split())


@pytest.mark.parametrize("step", ["12", 12.0, None, -12, 10**40, 11])
def test_a_manifest_of_another_step_than_its_name_says_is_not_used(step, finished, tmp_path, capfd):
    shutil.copytree(finished, tmp_path / "run")
    with_facts(tmp_path / "run" / "checkpoints", step=step)
    code, shown = command(capfd, "pretrain", "--out", tmp_path / "run", "--resume")
    assert code == 0
    assert "step-00000012.json does not match its checksum" in shown


def test_text_in_place_of_a_number_in_the_log_is_left_out(finished, tmp_path, capfd):
    shutil.copytree(finished, tmp_path / "run")
    run = Run(tmp_path / "run")
    odd = {"images_per_second": "fast", "knn": "good", "loss": [1], "proxy_accuracy": "high"}
    lines = [json.dumps({"step": 1, **odd}) + "\n", *run.metrics_file.open()]
    run.metrics_file.write_text("".join(lines))
    lengths = {"metrics.jsonl": run.metrics_file.stat().st_size}
    with_facts(run.checkpoints, logs=lengths)
    code, shown = command(capfd, "pretrain", "--out", run.path, "--resume")
    assert code == 0, shown
    result = json.loads((run.results / "pretrain.json").read_text())
    assert isinstance(result["images_per_second"], float)
