"""Lines of metrics.jsonl also go to a function of the program, and to Weights & Biases."""

import json

import pytest

from hardmix.errors import InputError, UnfinishedError
from hardmix.runs.folder import Run
from hardmix.training import metric_logs
from hardmix.training.pretrain import pretrain
from ranks import signal_after, tiny


def test_a_function_gets_every_line_once_also_after_a_resume(tmp_path, monkeypatch):
    seen = []
    signal_after(monkeypatch, {5})
    with pytest.raises(UnfinishedError):
        pretrain(tiny(train={"log_every": 2}), tmp_path / "run", on_log=seen.append)
    before = len(seen)
    assert [line["step"] for line in seen] == [2, 4]
    pretrain(tiny(train={"log_every": 2}), tmp_path / "run", on_log=seen.append, resume=True)
    assert seen == Run(tmp_path / "run").metrics()
    assert len(seen) > before
    assert "knn" in seen[-1]


def test_a_line_that_the_function_changes_stays_as_it_was(tmp_path):
    pretrain(tiny(train={"knn_every": 0}), tmp_path / "run", on_log=lambda line: line.clear())
    assert all("loss" in line for line in Run(tmp_path / "run").metrics())


def test_what_the_function_raises_ends_the_run_which_can_be_resumed(tmp_path):
    def full(line):
        if line["step"] > 6:
            raise RuntimeError("the database is full")

    with pytest.raises(RuntimeError, match="the database is full"):
        pretrain(tiny(), tmp_path / "run", on_log=full)
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["reason"]) == ("failed", "RuntimeError: the database is full")
    assert pretrain(tiny(), tmp_path / "run", resume=True).encoder_file.exists()


def test_of_many_processes_the_first_alone_logs(monkeypatch):
    pytest.importorskip("tensorboard")
    config = tiny(train={"tensorboard": True})
    assert len(metric_logs.open_logs(config, print)) == 2
    monkeypatch.setattr(metric_logs, "is_main", lambda: False)
    assert metric_logs.open_logs(config, print) == []


def records_of(data):
    """Yield the records of a .wandb file: blocks of 32 kB, records with checksum, length, kind."""
    at, record = 7, b""
    while at < len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or its last part
            yield record
            record = b""


def logged_by_wandb(folder):
    """Return the numbers in the files of offline runs, by step and by name."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = {}
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in records_of(file.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            items = {
                each.key or each.nested_key[0]: each.value_json for each in record.history.item
            }
            if items:
                numbers = {name: json.loads(value) for name, value in items.items()}
                found[numbers["_step"]] = {k: v for k, v in numbers.items() if k[0] != "_"}
    return found


@pytest.mark.slow
def test_wandb_holds_what_metrics_jsonl_holds(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="pip install 'hardmix[wandb]'")
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_CACHE_DIR": str(tmp_path / "cache"),
        "WANDB_CONFIG_DIR": str(tmp_path / "config"),
        "WANDB_DATA_DIR": str(tmp_path / "data"),
    }.items():
        monkeypatch.setenv(name, value)
    run = pretrain(tiny(train={"wandb": True}), tmp_path / "run")
    expected = {}
    for line in run.metrics():  # the k-NN accuracy has the step of the line before it
        numbers = {name: value for name, value in line.items() if name != "step"}
        expected[line["step"]] = expected.get(line["step"], {}) | numbers
    assert "knn" in expected[12]
    found = logged_by_wandb(run.path)
    assert found.keys() == expected.keys()
    for step, numbers in expected.items():
        assert found[step] == pytest.approx(numbers, nan_ok=True)


def test_wandb_that_refuses_is_said_in_a_sentence(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="pip install 'hardmix[wandb]'")

    def refuse(**options):
        assert options["id"]
        assert options["config"]["train.epochs"] == 2
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(InputError, match=r"train\.wandb: .*No API key.*WANDB_MODE=offline"):
        pretrain(tiny(train={"wandb": True}), tmp_path / "run")


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_library_is_said_before_anything_is_made(name, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=rf"train\.{name} needs {name}.*hardmix\[{name}\]"):
        pretrain(tiny(train={name: True}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
