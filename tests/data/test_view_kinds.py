"""Views of several kinds: the same from memory, files, workers and shards."""

import dataclasses
from pathlib import Path

import pytest
import torch
from PIL import Image

from hardmix.data.crops import CROP_DRAWS, draw_crops
from hardmix.data.image_set import ImageSet
from hardmix.data.loading import ViewLoader, open_loader
from hardmix.data.views import ViewKind, ViewMaker, draw_views, make_views
from hardmix.errors import InputError
from hardmix.settings.config import DataConfig, TrainConfig

KINDS = (ViewKind(2), ViewKind(3, 16, (0.05, 0.14)), ViewKind(1, 36, (0.6, 1.0), "plain"))
CONFIG = DataConfig(image_size=24, channels=3, workers=0)
CPU = torch.device("cpu")


def some_images(number=12, size=40):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(256, (number, 3, size, size), generator=generator, dtype=torch.uint8)


def test_every_kind_has_its_size_and_the_first_views_stay():
    images, ids = some_images(), torch.arange(12)
    views = ViewMaker(KINDS, CONFIG, seed=3).make(images, ids, epoch=1)
    assert [view.shape[-1] for view in views] == [24, 24, 16, 16, 16, 36]
    for one, other in zip(views, make_views(images, ids, CONFIG, 3, 1), strict=False):
        assert torch.equal(one, other)
    assert not torch.equal(views[2], views[3])


def test_crops_cover_the_share_that_the_kind_says():
    ids = torch.arange(2000)
    sides = torch.full((2000,), 200), torch.full((2000,), 200)
    boxes = draw_crops(draw_views(ids, 0, 0, CROP_DRAWS, 1, 4), *sides, 0.05, 0.14)
    share = boxes.height * boxes.width / 200**2
    assert float(share.min()) > 0.045
    assert float(share.max()) < 0.145
    assert abs(float(share.double().mean()) - 0.095) < 0.002


@pytest.mark.parametrize("workers", [0, 1])
def test_files_give_what_memory_gives_but_for_rounding(workers, tmp_path):
    images = some_images()
    for number, image in enumerate(images):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(tmp_path / f"{number:02d}.png")
    files = tuple(sorted(str(file) for file in Path(tmp_path).iterdir()))
    config = dataclasses.replace(CONFIG, workers=workers)
    sets = (
        ImageSet("memory", None, None, tensor=images),
        ImageSet("files", None, None, files=files),
    )
    batches = []
    for each in sets:
        loader = ViewLoader(each, config, 6, 1, CPU, views=KINDS)
        batches.append(next(iter(loader.epoch(2))))
        loader.close()
    differences = [
        (one - other).abs() for one, other in zip(*(batch.views for batch in batches), strict=True)
    ]
    assert all(float(each.mean()) < 0.03 for each in differences)  # a pixel of 255, over 0.22
    assert float(differences[-1].max()) < 0.05  # without colours, which magnify rounding
    assert torch.equal(batches[0].ids, batches[1].ids)


def test_own_pipelines_make_views_of_one_kind_only():
    images = ImageSet("memory", None, None, tensor=some_images())
    train = TrainConfig(batch_size=4)
    with pytest.raises(InputError, match="3 of 16 px"):
        open_loader(CONFIG, train, CPU, KINDS, own=images, pipeline=lambda image: image)
