"""Views on a pretended GPU equal those of a CPU, and take few launches and no waiting."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hardmix.data.batches import batch_of
from hardmix.data.colours import channel_statistics, colours_at_once
from hardmix.data.image_set import ImageSet
from hardmix.data.loading import ViewLoader, open_loader
from hardmix.data.views import colour_views, make_views
from hardmix.settings.config import DataConfig, TrainConfig
from pretended_gpu import GPU, pretended_gpu

MOST_LAUNCHES = 90
"""Launches for colour and blur of a batch of two views."""


def some_images(number, channels, height=40, width=36):
    """Return images of few colours, some of them grey, where hues are undefined."""
    images = torch.randint(0, 256, (number, channels, 5, 6), dtype=torch.uint8)
    images[0] = 77
    return images.repeat_interleave(height // 5, 2).repeat_interleave(width // 6, 3)


@pytest.mark.parametrize("augmentation", ["moco-v1", "moco-v2", "byol-second", "plain"])
@pytest.mark.parametrize("channels", [1, 2, 3])
@pytest.mark.parametrize("views", [1, 2])
def test_a_gpu_makes_the_views_of_a_cpu(augmentation, channels, views):
    config = DataConfig(augmentation=augmentation, channels=channels, image_size=24)
    images, ids = some_images(40, channels), torch.arange(40) * 7
    crops = some_images(40 * views, channels, 24, 24)[..., :24].unflatten(0, (views, 40))
    crops = torch.nn.functional.pad(crops, (0, 24 - crops.shape[-1], 0, 24 - crops.shape[-2]))
    expected = make_views(images, ids, config, 3, 4, views)
    coloured = colour_views(crops, ids, config, 3, 4)
    with pretended_gpu() as log:
        made = make_views(images.to("cuda"), ids, config, 3, 4, views)
        also = colour_views(crops.to("cuda"), ids, config, 3, 4)
    assert log.mixed_devices == []
    scale = min(channel_statistics(channels)[1])
    for there, here in zip((*made, *also), (*expected, *coloured), strict=True):
        torch.testing.assert_close(there.held, here, rtol=0, atol=2e-5 / scale)


@pytest.mark.parametrize("augmentation", ["moco-v1", "moco-v2"])
def test_colour_and_blur_of_a_batch_take_few_launches_and_one_copy(augmentation):
    config = DataConfig(augmentation=augmentation, image_size=32)
    ids = torch.arange(32)
    crops = torch.randint(0, 256, (2, 32, 3, 32, 32), dtype=torch.uint8)
    with pretended_gpu() as log:
        there = crops.to("cuda")
        colour_views(there, ids, config, 0, 0)  # constants travel once
        log.clear()
        colour_views(there, ids, config, 0, 1)
        assert len(log.launches) <= MOST_LAUNCHES, log.by_place(log.launches)
        assert (log.synchronisations, log.blocking_copies, log.mixed_devices) == ([], [], [])
        assert len(log.other_copies) == 1


@pytest.mark.parametrize(
    "augmentation", ["moco-v1", "moco-v2", "simclr", "byol", "byol-second", "plain"]
)
def test_colours_that_a_compiler_can_fuse_are_the_usual_ones(augmentation, monkeypatch):
    """The same random numbers, sent in one copy; here without the compiler."""
    monkeypatch.setattr("hardmix.data.views.compiled_colours", lambda: colours_at_once)
    config, ids = DataConfig(augmentation=augmentation, image_size=24), torch.arange(40) * 7
    images, crops = some_images(40, 3), some_images(80, 3, 24, 24)
    missing = [0, 24 - crops.shape[-1], 0, 24 - crops.shape[-2]]
    crops = torch.nn.functional.pad(crops, missing).unflatten(0, (2, 40))
    expected = make_views(images, ids, config, 3, 4), colour_views(crops, ids, config, 3, 4)
    with pretended_gpu() as log:
        pixels, crops = images.to("cuda"), crops.to("cuda")
        for compiled in (False, True):
            log.clear()
            made = make_views(pixels, ids, config, 3, 4, compiled=compiled)
            also = colour_views(crops, ids, config, 3, 4, compiled=compiled)
        assert (log.synchronisations, log.blocking_copies, log.mixed_devices) == ([], [], [])
        assert len(log.other_copies) == 2
    for there, here in zip((*made, *also), (*expected[0], *expected[1]), strict=True):
        torch.testing.assert_close(there.held, here, rtol=0, atol=1e-3)


@pytest.mark.parametrize(("what", "compiled"), [("no", False), ("all", True), ("graphs", True)])
def test_train_compile_says_whether_colours_are_compiled(what, compiled):
    data = DataConfig(name="shapes", num_images=8, image_size=32)
    train = TrainConfig(batch_size=4, compile=what)
    _, loader = open_loader(data, train, torch.device("cpu"))
    assert loader._maker.compiled is compiled


@pytest.mark.slow
def test_compiled_colours_are_twelve_kernels_at_most_and_the_usual_colours():
    program = Path(__file__).parents[1] / "support" / "compiled_colours.py"
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["kernels"] <= 12  # counted: 10
    assert found["apart"] <= 1e-3


def test_a_loader_never_waits_for_the_gpu():
    """Pixels, labels and parameters travel in three copies for a batch."""
    images = ImageSet("x", torch.arange(64), tuple(map(str, range(64))), tensor=some_images(64, 3))
    config = DataConfig(image_size=24, workers=0)
    files = ImageSet("y", torch.arange(64), images.classes, files=("",) * 64, read=_read)
    with pretended_gpu() as log:
        for source in (images, files):
            loader = ViewLoader(source, config, 16, 0, GPU)
            batches = loader.epoch(0)
            next(batches)
            log.clear()
            batch = next(batches)
            assert {each.device for each in (*batch.views, batch.labels, batch.ids)} == {GPU}
            assert (log.synchronisations, log.blocking_copies, log.mixed_devices) == ([], [], [])
            assert len(log.other_copies) == 3


def _read(_, channels, __):
    return torch.randint(0, 256, (channels, 30, 30), dtype=torch.uint8)


def test_labels_and_ids_travel_together():
    with pretended_gpu() as log:
        views = [torch.zeros(4, 3, 8, 8, device="cuda")]
        batch = batch_of(views, torch.arange(4), torch.arange(4) + 9)
        assert len(log.other_copies) == 1
    assert batch.ids.tolist() == [9, 10, 11, 12]
