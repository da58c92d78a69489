"""Batched operations equal torchvision's, sample by sample, within 1e-5 of the range [0, 1]."""

import pytest
import torch
from hypothesis import given, strategies as st
from torchvision.transforms.v2 import functional as reference

from hardmix.data import colours
from hardmix.data.crops import CropBoxes, resized_crops

CLOSE = {"rtol": 0, "atol": 1e-5}


def pictures(batch=16, channels=3, height=24, width=24, seed=0):
    """Return random pixels with awkward ones among them: grey, black, white, pure colours, ties."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(batch, channels, height, width, generator=generator)
    images[0] = images[0, :1]
    images[1] = 0
    images[2] = 1
    images[3] = (images[3] > 0.5).float()
    images[4] = (images[4] * 4).floor() / 4
    return images


def one_by_one(operation, images, factors):
    return torch.stack(
        [operation(image, float(f)) for image, f in zip(images, factors, strict=True)]
    )


@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation"])
def test_a_colour_adjustment_equals_torchvisions(name):
    images, factors = pictures(), torch.linspace(0, 2, 16)
    expected = one_by_one(getattr(reference, f"adjust_{name}"), images, factors)
    getattr(colours, f"adjust_{name}_")(images, factors)
    torch.testing.assert_close(images, expected, **CLOSE)


@pytest.mark.parametrize("reach", [0.1, 0.4, 0.5])
def test_hue_equals_torchvisions(reach):
    images, factors = pictures(seed=1), torch.linspace(-reach, reach, 16)
    expected = one_by_one(reference.adjust_hue, images, factors)
    colours.adjust_hue_(images, factors)
    torch.testing.assert_close(images, expected, **CLOSE)


def test_hue_of_every_colour_of_a_fine_grid_equals_torchvisions():
    levels = torch.linspace(0, 1, 17)
    grid = torch.cartesian_prod(levels, levels, levels).T.reshape(1, 3, 17, 17 * 17)
    for factor in (-0.1, 0.03, 1 / 6, 0.4):
        turned = grid.clone()
        colours.adjust_hue_(turned, torch.tensor([factor]))
        torch.testing.assert_close(turned, reference.adjust_hue(grid, factor), **CLOSE)


def test_no_saturation_is_grey():
    images = pictures()
    expected = reference.rgb_to_grayscale(images, num_output_channels=3)
    colours.adjust_saturation_(images, torch.zeros(16))
    torch.testing.assert_close(images, expected, **CLOSE)


@pytest.mark.parametrize("channels", [1, 4])
def test_contrast_without_colours_starts_from_the_mean_of_all_channels(channels):
    images, factors = pictures(channels=channels), torch.linspace(0, 2, 16)
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    expected = torch.lerp(mean, images, factors.view(-1, 1, 1, 1)).clamp(0, 1)
    colours.adjust_contrast_(images, factors)
    torch.testing.assert_close(images, expected, **CLOSE)


@pytest.mark.parametrize("height", [8, 17, 33, 64, 150])
def test_blur_equals_torchvisions_with_the_same_kernel(height):
    """Images may be square or not, and blurred in tiles or at once."""
    images, sigmas = pictures(batch=6, height=height), torch.linspace(0.1, 2, 6)
    kernel = [2 * colours.blur_radius(side) + 1 for side in (24, height)]
    assert kernel[1] <= height
    expected = one_by_one(
        lambda image, sigma: reference.gaussian_blur(image, kernel, [sigma, sigma]), images, sigmas
    )
    colours.blur_(images, sigmas)
    torch.testing.assert_close(images, expected, **CLOSE)


def test_the_kernel_holds_the_whole_gaussian():
    """The largest blur differs by less than 1e-3 from one with a kernel of six sigma."""
    images = pictures(batch=5, height=40, width=40)
    expected = reference.gaussian_blur(images, [25, 25], [2.0, 2.0])
    colours.blur_(images, torch.full((5,), 2.0))
    torch.testing.assert_close(images, expected, rtol=0, atol=1e-3)


def test_flip_and_normalise_equal_torchvisions():
    images = pictures()
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    expected = reference.normalize(reference.horizontal_flip(images), mean, std)
    colours.flip_(images)
    torch.testing.assert_close(colours.normalise(images, mean, std), expected, **CLOSE)


@given(
    height=st.integers(1, 60),
    width=st.integers(1, 60),
    size=st.integers(1, 40),
    channels=st.integers(1, 4),
    seed=st.integers(0, 999),
)
def test_a_crop_equals_torchvisions(height, width, size, channels, seed):
    """Images and boxes have any size, smaller or larger than the result."""
    generator = torch.Generator().manual_seed(seed)

    def whole(low, high):
        return torch.randint(low, high, (1,), generator=generator)

    tall, wide = whole(1, height + 1), whole(1, width + 1)
    box = CropBoxes(whole(0, height - int(tall) + 1), whole(0, width - int(wide) + 1), tall, wide)
    images = torch.randint(
        0, 256, (1, channels, height, width), dtype=torch.uint8, generator=generator
    )
    expected = reference.resized_crop(
        images / 255, *(int(side) for side in box), size=[size, size], antialias=True
    )
    torch.testing.assert_close(resized_crops(images, box, size), expected, **CLOSE)


def test_crops_of_a_batch_are_each_samples_own():
    images = torch.randint(0, 256, (5, 3, 375, 500), dtype=torch.uint8)
    boxes = CropBoxes(
        torch.tensor([0, 10, 300, 0, 374]),
        torch.tensor([0, 20, 400, 0, 0]),
        torch.tensor([375, 224, 75, 1, 1]),
        torch.tensor([500, 224, 100, 500, 1]),
    )
    expected = torch.stack(
        [
            reference.resized_crop(image / 255, *box, size=[64, 64], antialias=True)
            for image, box in zip(images, torch.stack(boxes, dim=1).tolist(), strict=True)
        ]
    )
    torch.testing.assert_close(resized_crops(images, boxes, 64), expected, **CLOSE)


def test_no_weight_of_a_blur_is_denormal():
    """Multiplying by one takes an Intel core fifteen times as long."""
    sigma = torch.linspace(0.1, 2.0, 500)
    band = colours._gaussian_band(sigma, 64)
    assert band[band > 0].min() >= colours.LEAST_WEIGHT
    torch.testing.assert_close(band.sum(dim=2), torch.ones(500, band.shape[1]), **CLOSE)


def test_solarisation_equals_torchvisions_on_bytes():
    images = (pictures() * 255).round().to(torch.uint8)
    expected = reference.solarize(images, 128)
    changed = images / 255
    colours.solarise_(changed)
    torch.testing.assert_close(changed, expected / 255, **CLOSE)


def test_byols_second_views_are_blurred_and_solarised_as_often_as_published():
    """Blur 1.0 and 0.1, solarisation 0 and 0.2, of which the blur tells nothing."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(20_000, colours.COLOUR_DRAWS, generator=generator, dtype=torch.float64)
    moco, first, second = (
        colours.draw_colours(draws, name, True) for name in ("moco-v2", "byol", "byol-second")
    )
    assert bool((first.sigma > 0).all())
    assert not (first.solarise | moco.solarise).any()
    blurred = second.sigma > 0
    assert float(blurred.float().mean()) == pytest.approx(0.1, abs=0.01)
    for part in (blurred, ~blurred):
        assert float(second.solarise[part].float().mean()) == pytest.approx(0.2, abs=0.03)
    reaches = [float((each - 1).abs().max()) for each in (second.saturation, second.contrast)]
    assert reaches == pytest.approx([0.2, 0.4], abs=1e-3)
    assert torch.equal(moco.contrast, second.contrast)
