"""Sets in which the class of some images is known: STL-10, and folders of one's own."""

import math

import numpy as np
import pytest
import torch
from PIL import Image

import ranks
from hardmix.data.image_set import ImageSet
from hardmix.errors import InputError
from hardmix.evaluation import knn
from hardmix.evaluation.features import extract
from hardmix.settings.config import DataConfig
from hardmix.training.pretrain import pretrain

LABELLED, UNLABELLED, TESTED = 20, 30, 10


@pytest.fixture
def stl10(tmp_path):
    """STL-10's files, with fewer images."""
    folder = tmp_path / "stl10_binary"
    folder.mkdir()
    random = np.random.default_rng(0)
    for name, number in {"train": LABELLED, "test": TESTED, "unlabeled": UNLABELLED}.items():
        random.integers(0, 256, (number, 3, 96, 96), dtype=np.uint8).tofile(
            folder / f"{name}_X.bin"
        )
        (np.arange(number, dtype=np.uint8) % 10 + 1).tofile(folder / f"{name}_y.bin")
    return {"name": "stl10", "root": str(tmp_path), "num_images": None}


def own_set(labels):
    pixels = torch.randint(0, 256, (len(labels), 3, 32, 32), dtype=torch.uint8)
    return ImageSet("mine", torch.tensor(labels), ("a", "b"), tensor=pixels)


def test_knn_is_measured_by_the_labelled_images_and_opens_the_test_set_once(
    stl10, tmp_path, monkeypatch
):
    opened, open_images = [], knn.open_images

    def count(config, split, seed):
        opened.append(split)
        return open_images(config, split, seed)

    monkeypatch.setattr(knn, "open_images", count)
    run = pretrain(ranks.tiny("moco-v2", data=stl10, train={"knn_every": 1}), tmp_path / "run")
    accuracies = [line["knn"] for line in run.metrics() if "knn" in line]
    assert len(accuracies) == 2
    assert all(0 <= accuracy <= 1 for accuracy in accuracies)
    assert opened == ["test"]


def test_supervised_training_leaves_out_images_without_a_class_and_says_so(stl10, tmp_path, capfd):
    run = pretrain(ranks.tiny("supervised", data=stl10), tmp_path / "run")
    assert f"the {LABELLED} of {LABELLED + UNLABELLED} images whose class" in capfd.readouterr().out
    losses = [line["loss"] for line in run.metrics() if "loss" in line]
    assert losses
    assert all(math.isfinite(loss) for loss in losses)
    assert run.metrics()[-1]["step"] == 2 * (LABELLED // 16)


def test_a_set_of_ones_own_without_a_single_class_has_no_knn_and_nothing_to_supervise(tmp_path):
    images = own_set([-1] * 32)
    run = pretrain(ranks.tiny("moco-v2"), tmp_path / "run", images=images)
    assert not [line for line in run.metrics() if "knn" in line]
    with pytest.raises(InputError, match="mine has no labels"):
        pretrain(ranks.tiny("supervised"), tmp_path / "other", images=images)
    with pytest.raises(InputError, match="mine has no labels"):
        images.labelled()


def test_knn_of_a_half_labelled_set_of_ones_own_leaves_one_out(tmp_path):
    labels = [index % 2 if index < 12 else -1 for index in range(32)]
    run = pretrain(ranks.tiny("mochi"), tmp_path / "run", images=own_set(labels))
    assert 0 <= run.metrics()[-1]["knn"] <= 1


def picture(file):
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (40, 40), (hash(file.name) % 255, 9, 9)).save(file)


def test_test_images_that_do_not_fit_are_refused_before_the_training(tmp_path):
    for index in range(16):
        picture(tmp_path / "images" / "train" / "ab"[index % 2] / f"{index}.png")
        picture(tmp_path / "images" / "test" / "ac"[index % 2] / f"{index}.png")
    data = {"name": "folder", "root": str(tmp_path / "images"), "num_images": None, "workers": 0}
    with pytest.raises(InputError, match="classes among its test images"):
        pretrain(ranks.tiny("moco-v2", data=data), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_unlabelled_test_images_leave_knn_to_the_training_images(tmp_path, capfd):
    for index in range(16):
        picture(tmp_path / "images" / "train" / "ab"[index % 2] / f"{index}.png")
        picture(tmp_path / "images" / "test" / f"{index}.png")
    data = {"name": "folder", "root": str(tmp_path / "images"), "num_images": None, "workers": 0}
    run = pretrain(ranks.tiny("moco-v2", data=data), tmp_path / "run")
    assert "knn" in run.metrics()[-1]
    assert "test images have no labels" in capfd.readouterr().out


def test_features_are_refused_where_more_images_are_unreadable_than_allowed(tmp_path):
    for index in range(20):
        picture(tmp_path / f"{index:02}.png")
    for name in ("04.png", "05.png", "06.png"):
        (tmp_path / name).write_bytes(b"not an image")
    files = tuple(sorted(str(file) for file in tmp_path.iterdir()))
    images, trunk = ImageSet("files", None, None, files=files), torch.nn.Flatten()
    lenient = DataConfig(image_size=16, workers=0, max_unreadable=0.2)
    assert len(extract(trunk, images, lenient).ids) == 17
    strict = DataConfig(image_size=16, workers=0, max_unreadable=0.1)
    with pytest.raises(InputError, match=r"3 of 20 images .* data\.max_unreadable=0\.1 "):
        extract(trunk, images, strict)
