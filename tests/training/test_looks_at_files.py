"""A run looks at each image on disk once when it starts, and never while it saves."""

import os

import pytest
import torch
from PIL import Image

import hardmix.training.pretrain as loop
from hardmix.data import cache
from hardmix.data.changed_data import record_data
from hardmix.data.sources import open_images
from hardmix.errors import InputError
from hardmix.training.pretrain import pretrain
from ranks import all_ranks, tiny

COUNT = 24


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path):
    for number in range(COUNT):
        file = tmp_path / "images" / f"class{number % 2}" / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 36), (10 * number, 5, 9)).save(file)
    return tmp_path / "images"


def config(folder, **more):
    data = {"name": None, "root": str(folder), "num_images": None, "workers": 0}
    return tiny(data=data | more, train={"batch_size": 8, "queue_size": 16, "knn_every": 0})


def noted_looks(set_attribute):
    """Return the list of images that os.stat is asked for from now on."""
    asked, stat = [], os.stat

    def noted(path, *arguments, **options):
        if os.fsdecode(path).endswith(".png"):
            asked.append(os.fsdecode(path))
        return stat(path, *arguments, **options)

    set_attribute(os, "stat", noted)
    return asked


def noted_starts(set_attribute, looks):
    """Return a list that gets, at the first step of each run, the images looked at until then."""
    train, started = loop.train, []

    def noted(training):
        started.append(sorted(looks))
        looks.clear()
        train(training)

    set_attribute(loop, "train", noted)
    return started


@pytest.fixture
def looks(monkeypatch):
    return noted_looks(monkeypatch.setattr)


def test_saving_looks_at_no_image(folder, looks, monkeypatch, tmp_path):
    save, saved = loop.save_checkpoint, []

    def counted(training):
        before = len(looks)
        save(training)
        saved.append(len(looks) - before)

    monkeypatch.setattr(loop, "save_checkpoint", counted)
    pretrain(config(folder), tmp_path / "run")
    assert saved == [0, 0]


@pytest.mark.parametrize("cache", ["auto", "file", "off"])
def test_a_run_looks_at_every_image_once_when_it_starts(
    cache, folder, looks, monkeypatch, tmp_path
):
    """Runs that find decoded images of an earlier one, and resumed ones, do the same."""
    started = noted_starts(monkeypatch.setattr, looks)
    for out, resume in (("run", False), ("other", False), ("other", True)):
        pretrain(config(folder, cache=cache), tmp_path / out, resume=resume)
    assert started == [sorted(map(str, folder.rglob("*.png")))] * 3


def write_looks(config, out):
    started = noted_starts(setattr, noted_looks(setattr))
    pretrain(config, out / "run")
    (out / f"looks-{torch.distributed.get_rank()}").write_text(str(len(started[0])))


def test_of_several_processes_the_first_looks_for_all(folder, tmp_path):
    all_ranks(write_looks, config(folder, cache="file"), tmp_path)
    assert [(tmp_path / f"looks-{rank}").read_text() for rank in (0, 1)] == [str(COUNT), "0"]


def test_a_few_of_many_images_are_looked_at_once(folder, looks):
    """Methods that need labels cache the few images that have one by themselves."""
    data = config(folder, cache="memory").data
    for _ in range(2):
        few = open_images(data).select(torch.tensor([2, 3, 5, 7]))
        record = record_data(few, data)
        assert len(few.decode_once(epochs=True).cache.kept) == len(record.sizes) == 4
        assert len(looks) == len(set(looks)) == COUNT
        looks.clear()


def test_processes_that_see_different_files_are_refused(folder, monkeypatch):
    monkeypatch.setattr(cache, "agree_on_max", lambda number: number + 1)
    data = config(folder).data
    with pytest.raises(InputError, match="finds 24 images, another one 25"):
        record_data(open_images(data), data)
