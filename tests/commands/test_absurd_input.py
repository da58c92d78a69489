"""Absurd settings, names and files end in one sentence, before they cost time or memory."""

import dataclasses
import errno

import pytest
import torch

from hardmix.commands import main as cli
from hardmix.errors import InputError
from hardmix.models.backbones import build_backbone
from hardmix.runs.folder import Run
from hardmix.settings.config import ModelConfig, PretrainConfig, TrainConfig
from hardmix.settings.evaluations import schedule_of, with_batch
from hardmix.settings.recipes import RECIPES
from hardmix.training.setup import check_queue_fits

LONG = "n" * 256
"""A name that no file system takes."""


def command(capfd, *arguments: object) -> tuple[int, str]:
    with pytest.raises(SystemExit) as done:
        cli.main([str(word) for word in arguments])
    shown = capfd.readouterr()
    assert "Traceback" not in shown.err
    return done.value.code or 0, shown.out + shown.err


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("train.queue-size", 10**12, "train.queue_size=1000000000000 keys of model.dim=128 need"),
        ("train.batch-size", 10**400, "train.batch_size=1e400 must be at least 1 and below 2^63"),
        ("model.dim", 10**12, "keys of model.dim=1000000000000 need"),
        ("data.num-images", 10**13, "not enough memory"),
        ("data.root", LONG, "File name too long"),
    ],
)
def test_an_absurd_setting_is_one_sentence(setting, value, words, tmp_path, capfd):
    out = tmp_path / "run"
    code, shown = command(capfd, "pretrain", "demo", "--out", out, f"--{setting}", value)
    assert code == 2
    assert words in shown
    assert len(shown.strip().splitlines()) == 1
    assert not out.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["pretrain", "demo", "--out", LONG, "--data.num-images", 300],
        ["pretrain", "--out", LONG, "--resume"],
        ["pretrain", "--config", LONG, "--out", "RUN"],
        ["demo", "--out", LONG],
        ["knn", LONG],
        ["analyze", LONG],
        ["report", LONG],
        ["import", LONG, "--out", "RUN"],
        ["imagenet100", "--imagenet", LONG, "--out", "RUN"],
        ["sweep", "table1", "--scale", "shapes", "--out", LONG, "--dry-run"],
    ],
    ids=lambda words: words[0],
)
def test_a_name_that_no_disk_takes_is_refused(arguments, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    code, shown = command(capfd, *arguments)
    assert code == 2
    assert LONG in shown.replace("\n", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["toy", "--dim", 10**25], "toy.dim=10000000000000000000000000 must be between"),
        (["toy", "--seed", 10**25], "toy.seed=10000000000000000000000000 must be at least 0"),
        (
            ["sweep", "table1", "--out", "S", "--seeds", 10**12],
            "seeds must be between 1 and 1000",
        ),
        (["linear", "RUN", "--seeds", 10**400], "linear.seeds=1e400 must be between 1 and 1000"),
        (["linear", "RUN", "--preset", "imagenet100", "--lr", 1e308], "linear.lr=1e+308"),
        (["finetune", "RUN", "--weight-decay", -1], "finetune.weight_decay=-1.0"),
        (["neighbours", "RUN", "x.png", "--out", ""], "out=. is a folder"),
    ],
    ids=lambda each: " ".join(map(str, each))[:20] if isinstance(each, list) else "",
)
def test_absurd_options_of_other_commands(arguments, words, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    config = RECIPES["demo"].build("mochi", False)
    data = dataclasses.replace(config.data, num_images=200)
    run = Run.create(tmp_path / "RUN", dataclasses.replace(config, data=data))
    run.write_encoder(build_backbone("small").trunk, config)
    code, shown = command(capfd, *arguments)
    assert code == 2
    assert words in shown


@pytest.mark.parametrize("brackets", ["[" * 200_000, '{"a":' * 200_000])
def test_brackets_without_end_are_no_settings(brackets, tmp_path, capfd):
    file = tmp_path / "config.json"
    file.write_text(brackets)
    code, shown = command(capfd, "pretrain", "--config", file, "--out", tmp_path / "run")
    assert (code, len(shown.splitlines())) == (2, 1)
    assert f"{file} is not JSON" in shown
    code, shown = command(capfd, "knn", tmp_path)
    assert (code, len(shown.splitlines())) == (2, 1)


def test_the_queue_is_measured_against_the_memory():
    config = PretrainConfig(train=TrainConfig(queue_size=2**20), model=ModelConfig(dim=256))
    check_queue_fits(config, memory=2**30)
    with pytest.raises(InputError, match=r"need 1\.1 GB, but there are only 1\.0 GB"):
        check_queue_fits(config, memory=2**30 - 2**26)


def test_a_detectors_batch_is_checked_before_its_learning_rate_follows():
    with pytest.raises(InputError, match=r"detect\.batch_size=1e400"):
        with_batch(schedule_of("voc", None), 10**400)


@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        (OSError(errno.ENOSPC, "No space left", "x.json"), 74, "written (No space left): x.json"),
        (OSError(errno.EDQUOT, "Quota exceeded", "x"), 74, "written (Quota exceeded): x; free"),
        (OSError(errno.EIO, "Input/output error"), 74, "(Input/output error): a file; check"),
        (OSError(errno.ESTALE, "Stale file handle", "x"), 74, "(Stale file handle): x; check"),
        (PermissionError(errno.EACCES, "Permission denied", "x"), 2, "x cannot be used"),
        (MemoryError("Unable to allocate 7.28 TiB for an array"), 2, "7.28 TiB"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), 2, "2.00 GiB"),
    ],
)
def test_what_the_machine_cannot_do_is_no_bug(fault, status, words, monkeypatch, capfd):
    def fail(_: list[str]) -> None:
        raise fault

    monkeypatch.setitem(cli.COMMANDS, "version", fail)
    code, shown = command(capfd, "version")
    assert code == status
    assert words in shown
