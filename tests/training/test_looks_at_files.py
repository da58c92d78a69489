"""How often a run looks at its images on disk: once each when it starts, never while it saves."""

import os

import pytest
from PIL import Image

import hardmix.training.pretrain as loop
from hardmix.data.changed_data import record_data
from hardmix.training.pretrain import pretrain
from ranks import tiny


@pytest.fixture
def config(tmp_path):
    for number in range(24):
        file = tmp_path / "images" / f"class{number % 2}" / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 36), (10 * number, 5, 9)).save(file)
    data = {"name": None, "root": str(tmp_path / "images"), "num_images": None, "workers": 0}
    return tiny(data=data, train={"batch_size": 8, "queue_size": 16, "knn_every": 0})


@pytest.fixture
def looks(monkeypatch, tmp_path):
    """The files below images/ that os.stat was asked for."""
    asked, stat = [], os.stat

    def noted(path, *arguments, **options):
        if str(tmp_path / "images") in os.fsdecode(path):
            asked.append(path)
        return stat(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", noted)
    return asked


def test_saving_looks_at_no_image(config, looks, monkeypatch, tmp_path):
    save, saved = loop.save_checkpoint, []

    def counted(training):
        before = len(looks)
        save(training)
        saved.append(len(looks) - before)

    monkeypatch.setattr(loop, "save_checkpoint", counted)
    pretrain(config, tmp_path / "run")
    assert saved == [0, 0]


def test_a_run_looks_at_every_image_once_when_it_starts(config, looks, monkeypatch, tmp_path):
    found = []

    def counted(images, data):
        before = len(looks)
        record = record_data(images, data)
        found.extend(looks[before:])
        return record

    monkeypatch.setattr(loop, "record_data", counted)
    pretrain(config, tmp_path / "run")
    assert len(found) == len(set(found)) == 24
