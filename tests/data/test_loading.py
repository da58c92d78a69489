"""Loaders: step k of epoch e is the same however one gets there; broken files are named."""

from dataclasses import replace
from itertools import islice

import pytest
import torch
from PIL import Image

from hardmix.data.batches import Batch, allowed_unreadable, check_unreadable
from hardmix.data.colours import channel_statistics
from hardmix.data.crops import evaluation_crop
from hardmix.data.image_set import ImageSet
from hardmix.data.loading import ViewLoader, evaluation_batches, open_loader
from hardmix.data.views import make_views
from hardmix.errors import InputError
from hardmix.runtime.own_code import allowing
from hardmix.settings.config import DataConfig, TrainConfig

CPU = torch.device("cpu")
COUNT = 22
CONFIG = DataConfig(image_size=16, workers=0)


def random_pixels(height, width):
    return torch.randint(0, 256, (3, height, width), dtype=torch.uint8)


@pytest.fixture
def in_memory():
    tensor = torch.stack([random_pixels(20, 20) for _ in range(COUNT)])
    return ImageSet(name="some", labels=torch.arange(COUNT) % 3, classes=None, tensor=tensor)


@pytest.fixture
def in_files(tmp_path):
    """Write images of many sizes, as PNG."""
    files = []
    for number in range(COUNT):
        pixels = random_pixels(18 + number, 40 - number)
        files.append(str(tmp_path / f"{number:02}.png"))
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(files[-1])
    return ImageSet(name="some", labels=None, classes=None, files=tuple(files))


@pytest.fixture(params=["in_memory", "in_files"])
def images(request):
    return request.getfixturevalue(request.param)


def loader_of(images, config=CONFIG, batch_size=4, **options):
    return ViewLoader(images, config, batch_size, 1, CPU, **options)


def break_files(images, *numbers):
    for number in numbers:
        with open(images.files[number], "wb") as file:
            file.write(b"<html>not found</html>")


def assert_same(batches, others):
    batches, others = list(batches), list(others)
    assert len(batches) == len(others) > 0
    for one, other in zip(batches, others, strict=True):
        assert len(one.views) == len(other.views) == 2
        for a, b in zip([*one.views, *one[1:]], [*other.views, *other[1:]], strict=True):
            assert torch.equal(a, b)


def together(parts):
    """Return the global batch from the batches of all ranks."""
    views = tuple(torch.cat(each) for each in zip(*(part.views for part in parts), strict=True))
    return Batch(views, *(torch.cat([part[place] for part in parts]) for place in (1, 2)))


# Batches


def test_an_epoch_shows_every_image_once_but_for_what_fills_no_batch(images):
    loader = loader_of(images)
    assert loader.steps_per_epoch == 5
    batches = list(loader.epoch(0))
    assert len(batches) == 5
    ids = torch.cat([batch.ids for batch in batches])
    assert len(ids.unique()) == len(ids) == 20
    assert all(batch.query.shape == batch.key.shape == (4, 3, 16, 16) for batch in batches)
    again = torch.cat([batch.ids for batch in loader.epoch(1)])
    assert not torch.equal(ids, again)


def test_a_smaller_last_batch_is_kept_where_asked(images):
    loader = loader_of(images, keep_last=True)
    batches = list(loader.epoch(0))
    assert loader.steps_per_epoch == len(batches) == 6
    assert [len(batch.ids) for batch in batches] == [4, 4, 4, 4, 4, 2]
    assert sorted(torch.cat([batch.ids for batch in batches]).tolist()) == [*range(len(images))]


def test_labels_belong_to_their_images(in_memory, in_files):
    batch = next(loader_of(in_memory).epoch(0))
    assert torch.equal(batch.labels, batch.ids % 3)
    assert (next(loader_of(in_files).epoch(0)).labels == -1).all()


def test_views_are_those_of_the_images(in_memory):
    batch = next(loader_of(in_memory).epoch(3))
    views = make_views(in_memory.tensor[batch.ids], batch.ids, CONFIG, 1, 3)
    assert torch.equal(batch.query, views[0])
    assert torch.equal(batch.key, views[1])


def test_files_and_memory_give_the_same_views_but_for_rounding(in_files):
    """Crops of files are rounded to uint8: 1/255 at most, before colours and normalisation."""
    batch = next(loader_of(in_files).epoch(0))
    for row, index in enumerate(batch.ids.tolist()):
        pixels = in_files.image(index)[None]
        query, _ = make_views(pixels, torch.tensor([index]), CONFIG, 1, 0)
        assert (query[0] - batch.query[row]).abs().mean() < 2 / 255 / 0.22


# The same, however one gets there


def test_the_first_step_changes_nothing(images):
    loader = loader_of(images)
    whole = list(loader.epoch(2))
    for first in (1, 4):
        assert_same(loader.epoch(2, first), whole[first:])
    assert list(loader.epoch(2, 5)) == []


def test_an_epoch_left_early_changes_nothing(images):
    loader = loader_of(images)
    next(loader.epoch(0))
    assert_same(loader.epoch(1), loader_of(images).epoch(1))


@pytest.mark.parametrize("size", [16, 160], ids=["in groups", "one by one"])
@pytest.mark.parametrize("workers", [1, 2])
def test_the_number_of_workers_changes_no_bit(in_files, workers, size):
    config = DataConfig(image_size=size, workers=workers)
    loader, alone = loader_of(in_files, config), loader_of(in_files, replace(config, workers=0))
    try:
        assert_same(loader.epoch(0), alone.epoch(0))
        next(loader.epoch(1))
        assert_same(loader.epoch(2, 3), alone.epoch(2, 3))
    finally:
        loader.close()


@pytest.mark.parametrize("world_size", [2, 4])
def test_processes_share_the_batches_of_one(images, world_size):
    ranks = [
        loader_of(images, rank=rank, world_size=world_size).epoch(0) for rank in range(world_size)
    ]
    shared = [together(batches) for batches in zip(*ranks, strict=True)]
    assert_same(shared, loader_of(images).epoch(0))


def test_the_seed_changes_order_and_views(images):
    batches = [next(ViewLoader(images, CONFIG, COUNT, seed, CPU).epoch(0)) for seed in (0, 1)]
    assert not torch.equal(batches[0].ids, batches[1].ids)
    rows = [batch.ids.argsort() for batch in batches]
    pairs = zip(batches[0].query[rows[0]], batches[1].query[rows[1]], strict=True)
    assert not any(torch.equal(one, other) for one, other in pairs)


# Broken files


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_file_is_replaced_by_the_next_and_named(in_files, workers):
    intact = list(loader_of(in_files).epoch(0))
    break_files(in_files, 9)
    loader = loader_of(in_files, DataConfig(image_size=16, workers=workers))
    try:
        for batch, before in zip(loader.epoch(0), intact, strict=True):
            assert torch.equal(batch.ids, torch.where(before.ids == 9, 10, before.ids))
            kept = before.ids != 9
            assert torch.equal(batch.query[kept], before.query[kept])
        assert list(loader.unreadable) == [9]
        assert "09.png" in loader.unreadable[9]
        list(loader.epoch(1))
        assert len(loader.unreadable) == 1
    finally:
        loader.close()


def test_the_last_images_replacement_is_the_first(in_files):
    break_files(in_files, COUNT - 1)
    loader = loader_of(in_files, batch_size=COUNT)
    assert sorted(next(loader.epoch(0)).ids.tolist())[:3] == [0, 0, 1]


def test_many_broken_files_pass_only_if_allowed(in_files):
    break_files(in_files, 3, 4, 5)
    lenient = DataConfig(image_size=16, workers=0, max_unreadable=0.15)
    loader = loader_of(in_files, lenient)
    seen = torch.cat([batch.ids for batch in loader.epoch(0)])
    assert not {3, 4, 5} & set(seen.tolist())
    with pytest.raises(InputError, match=r"2 of 22 images .*data\.max_unreadable=0\.05"):
        list(loader_of(in_files).epoch(0))


def test_two_broken_files_of_a_hundred_are_skipped_and_none_if_none_may_be():
    images = ImageSet("files", None, None, files=("a.png",) * 103)
    share = DataConfig().max_unreadable
    assert allowed_unreadable(images, share) == 5
    assert allowed_unreadable(images.subset(3, 0), share) == 1
    assert allowed_unreadable(images, 0.0) == 0
    with pytest.raises(InputError, match=r"raise --data\.max-unreadable"):
        check_unreadable(dict.fromkeys(range(6), "a.png: empty"), images, share)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_set_of_broken_files_stops_naming_five(in_files, workers):
    break_files(in_files, *range(COUNT))
    config = DataConfig(image_size=16, workers=workers, max_unreadable=0.5)
    loader = loader_of(in_files, config)
    try:
        with pytest.raises(InputError, match=r"of 22 images cannot be read") as caught:
            list(loader.epoch(0))
        assert str(caught.value).count(".png") == 5
    finally:
        loader.close()


# Errors


def test_a_batch_larger_than_the_set_is_refused(images):
    with pytest.raises(InputError, match=r"train\.batch_size=23 exceeds the 22 images"):
        loader_of(images, batch_size=23)


def test_a_batch_that_processes_cannot_share_is_refused(images):
    with pytest.raises(InputError, match=r"train\.batch_size=4 .* 3 processes"):
        loader_of(images, world_size=3)


# Evaluation


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_shows_every_image_once_in_order(images, workers):
    batches = list(evaluation_batches(images, 16, 5, CPU, workers))
    pictures, labels, ids = (torch.cat(column) for column in zip(*batches, strict=True))
    assert ids.tolist() == list(range(COUNT))
    assert torch.equal(labels, torch.full_like(ids, -1) if images.labels is None else ids % 3)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in channel_statistics(3))
    for index, picture in enumerate(pictures):
        expected = evaluation_crop(images.image(index), 16) / 255
        torch.testing.assert_close(picture * std + mean, expected, rtol=0, atol=1e-6)


def test_evaluation_leaves_broken_files_out(in_files):
    break_files(in_files, 4, 5)
    some = list(evaluation_batches(in_files, 16, 1, CPU, max_unreadable=0.1))
    assert torch.cat([ids for *_, ids in some]).tolist() == [
        i for i in range(COUNT) if i not in (4, 5)
    ]
    with pytest.raises(InputError, match="2 of 22 images"):
        list(evaluation_batches(in_files, 16, 8, CPU))


# From the settings


def test_settings_choose_the_loader(in_files, tmp_path):
    images, loader = open_loader(
        DataConfig(root=str(tmp_path), image_size=16, workers=0), TrainConfig(batch_size=4), CPU
    )
    assert len(images) == COUNT
    assert len(list(islice(loader.epoch(0), 2))) == 2
    pytest.importorskip("webdataset", reason="webdataset is not installed: hardmix[shards]")
    data = DataConfig(name="shards", root="pipe:a.tar", num_images=8)
    with pytest.raises(InputError, match=r"asks for data\.root='pipe:a\.tar'"):
        open_loader(data, TrainConfig(batch_size=4), CPU)
    with allowing("pipe:a.tar"):
        images, loader = open_loader(data, TrainConfig(batch_size=4), CPU)
    assert images is None
    assert loader.steps_per_epoch == 2
