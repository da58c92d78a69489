"""Sets of Hugging Face's datasets, from local folders: saved ones, and parquet files of bytes."""

import io
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from hardmix import InputError
from hardmix.data.image_files import UnreadableImage
from hardmix.data.loading import ViewLoader
from hardmix.data.sources import data_name, has_test, open_images
from hardmix.settings.config import DataConfig

datasets = pytest.importorskip("datasets", reason="pip install 'hardmix[hf]'")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def picture(value: int) -> Image.Image:
    return Image.new("RGB", (6, 4), (value, 0, 0))


def png(value: int) -> bytes:
    file = io.BytesIO()
    picture(value).save(file, "PNG")
    return file.getvalue()


def config(root, **options) -> DataConfig:
    return DataConfig(**({"root": f"hf:{root}", "image_size": 8, "workers": 0} | options))


def reds(images) -> list[int]:
    return [int(images.image(number)[0, 0, 0]) for number in range(len(images))]


def labelled(values, **more):
    features = datasets.Features(
        {"id": datasets.Value("int64"), "img": datasets.Image()}
        | {"kind": datasets.ClassLabel(names=["cat", "dog"])}
    )
    rows = {
        "id": list(values),
        "img": [picture(value) for value in values],
        "kind": [value % 2 for value in values],
    }
    return datasets.Dataset.from_dict(rows | more, features=features)


def test_a_saved_set_with_splits_and_classes(tmp_path):
    splits = {"train": labelled(range(8)), "validation": labelled(range(8, 11))}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    data = config(tmp_path / "saved")
    assert (data_name(data), has_test(data)) == ("hf", True)
    train, test = open_images(data), open_images(data, "test")
    assert (reds(train), reds(test)) == (list(range(8)), [8, 9, 10])
    assert train.classes == test.classes == ("cat", "dog")
    assert train.labels.tolist() == [0, 1] * 4
    assert train.name_of(3) == "train[3]"


def test_parquet_files_with_the_bytes_of_images(tmp_path):
    pandas = pytest.importorskip("pandas")
    rows = {"image": [png(value) for value in range(5)], "label": ["b", "a", None, "b", "a"]}
    (tmp_path / "files").mkdir()
    pandas.DataFrame(rows).to_parquet(tmp_path / "files" / "train.parquet")
    images = open_images(config(tmp_path / "files"))
    assert reds(images) == list(range(5))
    assert (images.classes, images.labels.tolist()) == (("a", "b"), [1, 0, -1, 1, 0])
    assert not has_test(config(tmp_path / "files"))
    with pytest.raises(InputError, match="has no test split"):
        open_images(config(tmp_path / "files"), "test")


def test_a_set_without_labels_is_trained_on_by_workers_in_any_order(tmp_path):
    table = datasets.Dataset.from_dict(
        {"image": [picture(value) for value in range(12)]},
        features=datasets.Features({"image": datasets.Image()}),
    )
    table.save_to_disk(tmp_path / "one")
    data = config(tmp_path / "one", augmentation="plain", cache="off")
    images = open_images(data)
    assert images.labels is None
    alone = ViewLoader(images, data, 4, 0, torch.device("cpu"))
    two = config(tmp_path / "one", augmentation="plain", cache="off", workers=2)
    shared = ViewLoader(open_images(two), two, 4, 0, torch.device("cpu"))
    for one, other in zip(alone.epoch(1), shared.epoch(1), strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert torch.equal(one.query, other.query)
    shared.close()


def test_a_damaged_image_is_named(tmp_path):
    table = datasets.Dataset.from_dict(
        {"image": [{"bytes": png(1), "path": None}, {"bytes": b"no", "path": None}]},
        features=datasets.Features({"image": datasets.Image()}),
    )
    table.save_to_disk(tmp_path / "damaged")
    images = open_images(config(tmp_path / "damaged"))
    with pytest.raises(UnreadableImage, match=r"train\[1\]: "):
        images.image(1)


def test_what_cannot_be_opened_is_said(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"data\.root=hf:.*empty cannot be opened by datasets"):
        open_images(config(tmp_path / "empty"))
    datasets.Dataset.from_dict({"x": [1, 2]}).save_to_disk(tmp_path / "numbers")
    with pytest.raises(InputError, match=r"has no column of images: it has x"):
        open_images(config(tmp_path / "numbers"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"pip install 'hardmix\[hf\]'"):
        open_images(config(tmp_path / "numbers"))


def test_pixels_are_those_of_the_file(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8)
    table = datasets.Dataset.from_dict(
        {"image": [Image.fromarray(pixels), picture(1)]},
        features=datasets.Features({"image": datasets.Image()}),
    )
    table.save_to_disk(tmp_path / "saved")
    image = open_images(config(tmp_path / "saved")).image(0)
    np.testing.assert_array_equal(image.permute(1, 2, 0).numpy(), pixels)
