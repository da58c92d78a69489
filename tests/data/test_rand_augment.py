"""InfoMin's RandAugment: each operation is Pillow's, drawn as often as in the official code."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from hardmix.data import rand_augment
from hardmix.data.rand_augment import OPERATIONS, RAND_DRAWS, rand_stages
from hardmix.data.views import make_views
from hardmix.errors import InputError
from hardmix.settings.config import DataConfig

FILL = (124, 116, 104)
LEVEL = 0.93


def picture(size=48):
    """Return a smooth image: between its pixels there is little to interpolate."""
    y, x = torch.meshgrid(torch.linspace(0, 3, size), torch.linspace(0, 2, size), indexing="ij")
    image = torch.stack([x.sin(), (x * y).cos().abs(), (x + y).sin().square()])
    return (image * 250).round().to(torch.uint8)


def affine(image, *matrix):
    return image.transform(image.size, Image.AFFINE, matrix, Image.BILINEAR, fillcolor=FILL)


def brighten_the_dark(image):
    values = np.asarray(image).astype(int)
    return Image.fromarray(
        np.where(values < 128, np.minimum(255, values + int(110 * LEVEL)), values).astype("uint8")
    )


FACTOR = 1.8 * LEVEL + 0.1
PILLOW = {
    "auto_contrast_": ImageOps.autocontrast,
    "equalize_": ImageOps.equalize,
    "invert_": ImageOps.invert,
    "rotate_": lambda image: image.rotate(30 * LEVEL, Image.BILINEAR, fillcolor=FILL),
    "posterize_": lambda image: ImageOps.posterize(image, int(4 * LEVEL)),
    "solarize_": lambda image: ImageOps.solarize(image, int(256 * LEVEL)),
    "solarize_add_": brighten_the_dark,
    "colour_": lambda image: ImageEnhance.Color(image).enhance(FACTOR),
    "contrast_": lambda image: ImageEnhance.Contrast(image).enhance(FACTOR),
    "brightness_": lambda image: ImageEnhance.Brightness(image).enhance(FACTOR),
    "sharpness_": lambda image: ImageEnhance.Sharpness(image).enhance(FACTOR),
    "shear_x_": lambda image: affine(image, 1, 0.3 * LEVEL, 0, 0, 1, 0),
    "shear_y_": lambda image: affine(image, 1, 0, 0, 0.3 * LEVEL, 1, 0),
    "translate_x_": lambda image: affine(image, 1, 0, 0.45 * LEVEL * 48, 0, 1, 0),
    "translate_y_": lambda image: affine(image, 1, 0, 0, 0, 1, 0.45 * LEVEL * 48),
}


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: each.__name__)
def test_each_operation_is_pillows(operation):
    pixels = picture()
    expected = PILLOW[operation.__name__](Image.fromarray(pixels.permute(1, 2, 0).numpy()))
    expected = torch.from_numpy(np.array(expected)).permute(2, 0, 1).float()
    images = (pixels.float() / 255).repeat(2, 1, 1, 1)
    level, sign = torch.tensor([LEVEL, 0.5]), torch.ones(2)
    operation(images, level, sign)
    difference = (images[0] * 255 - expected).abs()
    assert float(difference.median()) <= 1.0
    assert float((difference > 4).float().mean()) < 0.06  # Pillow decides otherwise at borders
    assert torch.isfinite(images).all()
    assert float(images.min()) >= 0
    assert float(images.max()) <= 1 + 1e-6


def test_operations_are_drawn_as_often_as_in_the_official_code():
    draws = torch.rand(30_000, RAND_DRAWS, dtype=torch.float64)
    stages = rand_stages(draws)
    assert len(stages) == rand_augment.LAYERS
    for choice, operations in stages:
        assert len(operations) == 15
        shares = torch.bincount(choice, minlength=16) / len(choice)
        assert abs(float(shares[15]) - 0.5) < 0.01  # none
        assert float((shares[:15] - 0.5 / 15).abs().max()) < 0.006
    level = stages[0][1][0].args[1]
    assert abs(float((level == 1).float().mean()) - 0.5) < 0.01  # half of N(10, 0.5) exceeds 10
    assert abs(float(level[level < 1].mean()) - (1 - 0.05 * (2 / torch.pi) ** 0.5)) < 0.002


def test_views_are_made_in_groups_as_one_by_one_and_need_colours():
    images = picture().repeat(16, 1, 1, 1)
    config = DataConfig(image_size=32, augmentation="infomin")
    together = make_views(images, torch.arange(16), config, 1, 2)
    for row in (0, 7, 15):
        alone = make_views(images[:1], torch.tensor([row]), config, 1, 2)
        torch.testing.assert_close(alone[1][0], together[1][row], rtol=0, atol=1e-5)
    with pytest.raises(InputError, match=r"infomin with data\.channels=1"):
        DataConfig(augmentation="infomin", channels=1)
