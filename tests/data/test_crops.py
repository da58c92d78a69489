"""Crops made together have the very bits of torchvision's, made one by one."""

from itertools import product

import pytest
import torch
from torchvision.transforms.v2 import functional

from hardmix.data import crops
from hardmix.data.crops import CropBoxes, crop_weights, cut_equal_crops
from hardmix.data.views import crop_views
from hardmix.settings.config import DataConfig


@pytest.mark.parametrize(
    ("height", "width", "size", "channels"),
    [(32, 32, 32, 3), (64, 48, 32, 3), (9, 30, 16, 1), (20, 20, 33, 4)],
)
def test_every_crop_of_a_line_is_torchvisions(height, width, size, channels):
    """Rows and columns are resized apart: every (start, length) of both, not of their product."""
    image = torch.randint(256, (channels, height, width), dtype=torch.uint8)
    tall = [(s, n) for n in range(1, height + 1) for s in range(height - n + 1)]
    wide = [(s, n) for n in range(1, width + 1) for s in range(width - n + 1)]
    number = max(len(tall), len(wide))
    pairs = [(*tall[i % len(tall)], *wide[i * 7 % len(wide)]) for i in range(number)]
    top, tall_, left, wide_ = torch.tensor(pairs).T
    crops = cut_equal_crops([image] * number, CropBoxes(top, left, tall_, wide_), size)
    assert crops is not None
    for row, (y, h, x, w) in enumerate(pairs):
        part = image[:, y : y + h, x : x + w]
        assert torch.equal(crops[0, row], functional.resize(part, [size, size]))


@pytest.mark.parametrize("layout", ["planar", "side by side", "tensor"])
def test_views_have_the_same_bits_alone_and_together(layout, monkeypatch):
    pixels = torch.randint(256, (70, 24, 24, 3), dtype=torch.uint8).movedim(-1, 1)
    pixels = pixels.contiguous() if layout == "planar" else pixels
    images = pixels if layout == "tensor" else list(pixels)
    ids, config = torch.arange(70) * 3, DataConfig(image_size=16)
    together = crop_views(images, ids, config, 1, 2)
    monkeypatch.setattr(crops, "cut_equal_crops", lambda *_: None)
    assert torch.equal(together, crop_views(images, ids, config, 1, 2))
    monkeypatch.setattr(crops, "_resizes_bytes", lambda: False)
    assert torch.equal(together, crop_views(images, ids, config, 1, 2))


def test_other_images_are_left_to_torch():
    box = CropBoxes(*(torch.tensor([0, 0]) for _ in range(2)), *(torch.tensor([5, 5]),) * 2)
    small, other = (torch.zeros(3, side, 9, dtype=torch.uint8) for side in (9, 8))
    assert cut_equal_crops([small, small], box, 8) is not None
    assert cut_equal_crops([small, other], box, 8) is None
    large = torch.zeros(3, 300, 300, dtype=torch.uint8)
    assert cut_equal_crops([large, large], box, 224) is None
    assert crop_weights(200, 8) is None, "not exact in float32"


def test_a_machine_that_rounds_otherwise_is_noticed(monkeypatch):
    def other(image, size, **_):
        return torch.zeros(1, 1, *size, dtype=torch.uint8)

    box = CropBoxes(*(torch.tensor([0, 0]) for _ in range(2)), *(torch.tensor([5, 5]),) * 2)
    small = torch.zeros(3, 11, 13, dtype=torch.uint8)
    monkeypatch.setattr(crops, "interpolate", other)
    assert cut_equal_crops([small, small], box, 8) is None


def test_sums_are_exact():
    """Sums of the largest pixels, in any order, are whole multiples of 2^-16 below 256."""
    for source, size in product((8, 31, 64), (8, 32)):
        weights = crop_weights(source, size)
        if weights is not None:
            units = weights.table.double() * 2**16
            assert torch.equal(units, units.round())
            assert float(units.sum(dim=2).max()) * 255 < 2**24
