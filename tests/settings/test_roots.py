"""A run finds its images from whichever folder it is used."""

import json
import os
from pathlib import Path

import pytest
import torch
from PIL import Image

from hardmix.commands import main as cli
from hardmix.runs.folder import Run
from hardmix.settings.saved import absolute_root, root_near


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """The folder we are in: photos in two class folders, and shards."""
    here = tmp_path / "project"
    for index in range(12):
        file = here / "photos" / f"class{index % 2}" / f"{index}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = torch.randint(0, 255, (40, 50, 3), dtype=torch.uint8).numpy()
        Image.fromarray(pixels).save(file)
    (here / "shards").mkdir()
    monkeypatch.chdir(here)
    return here


def test_paths_become_absolute_and_addresses_stay(project, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    (project / "c:odd").mkdir()
    for root, whole in {
        None: None,
        "photos": f"{project}/photos",
        "./photos/": f"{project}/photos",
        "../project/photos": f"{project}/../project/photos",
        "/data/photos": "/data/photos",
        "~/photos": "/home/me/photos",
        "not-there": f"{project}/not-there",
        "c:odd": f"{project}/c:odd",
        "shards/a-{000..099}.tar": f"{project}/shards/a-{{000..099}}.tar",
        "~/a-{0..9}.tar::b.tar": f"/home/me/a-{{0..9}}.tar::{project}/b.tar",
        "{/x,/y}/a.tar": "{/x,/y}/a.tar",
        "pipe:cat a.tar": "pipe:cat a.tar",
        "https://example.org/a-{0..9}.tar": "https://example.org/a-{0..9}.tar",
        "s3://bucket/a.tar": "s3://bucket/a.tar",
        "hf:uoft-cs/cifar10": "hf:uoft-cs/cifar10",
        "hf:photos": f"hf:{project}/photos",
    }.items():
        assert absolute_root(root) == whole
        assert absolute_root(absolute_root(root)) == whole


def test_a_folder_that_is_gone_leaves_the_root_as_it_is(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert absolute_root("photos") == "photos"


def test_an_old_runs_root_is_looked_for_here_and_then_above_the_run(project, monkeypatch):
    run = project / "runs" / "a"
    assert root_near("photos", run) == f"{project}/photos"
    monkeypatch.chdir(project.parent)
    assert root_near("photos", run) == f"{project}/photos"
    assert root_near("shards/a-{0..9}.tar", run) == f"{project}/shards/a-{{0..9}}.tar"
    assert root_near("nowhere", run) == "nowhere"
    assert root_near("tmp", Path("/elsewhere/run")) == "tmp"  # not /tmp
    (project.parent / "photos").mkdir()
    assert root_near("photos", run) == f"{project.parent}/photos"


def test_a_run_started_with_a_relative_root_is_used_from_another_folder(
    project, monkeypatch, capfd
):
    sizes = ["--train.batch-size", "4", "--train.queue-size", "8", "--mix.num-hardest", "4"]
    sizes += ["--data.workers", "0", "--model.key-bn-splits", "2", "--train.epochs"]
    start = ["pretrain", "demo", "--data.root", "photos", "--out", "runs/a", *sizes, "1"]
    with pytest.raises(SystemExit) as done:
        cli.main(start)
    assert not done.value.code
    config = Run(project / "runs" / "a").config_file
    assert json.loads(config.read_text())["data"]["root"] == f"{project}/photos"
    (project.parent / "elsewhere").mkdir()
    monkeypatch.chdir(project.parent / "elsewhere")
    run = os.path.relpath(project / "runs" / "a")
    old = json.loads(config.read_text())
    for words in (
        ["knn", run, "--k", "3"],
        ["pretrain", "--out", run, "--resume", "--train.epochs"],
    ):
        # Older versions saved the second. A run that has nothing left to train keeps its config.
        for epochs, root in (("2", f"{project}/photos"), ("3", "photos")):
            old["data"]["root"] = root
            config.write_text(json.dumps(old))
            with pytest.raises(SystemExit) as done:
                cli.main([*words, epochs] if "pretrain" in words else words)
            assert not done.value.code, capfd.readouterr().err
    assert json.loads(config.read_text())["data"]["root"] == f"{project}/photos"
