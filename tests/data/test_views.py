"""Views are official MoCo's: their parameters in distribution, their pixels given parameters."""

import math

import pytest
import torch
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.v2 import functional as reference

from hardmix.data import views
from hardmix.data.colours import COLOUR_DRAWS, channel_statistics, draw_colours, normalise
from hardmix.data.crops import CROP_DRAWS, draw_crops, evaluation_crop
from hardmix.data.views import colour_views, crop_views, make_views
from hardmix.runtime.random_numbers import uniform
from hardmix.settings.config import DataConfig

N = 20_000
SURE = 4.5
"""Standard errors that a measured share or mean may be off."""


def colours(augmentation, blur=True, count=N):
    return draw_colours(uniform(0, 0, torch.arange(count), 0, COLOUR_DRAWS), augmentation, blur)


def apply_colours(images, parameters, augmentation):
    """Apply official MoCo's operations between crop and normalisation to images of floats."""
    stages = views.colour_stages(parameters, augmentation, images.shape[1])
    coloured = images.clone()
    views.apply_stages_(stages, coloured, 0)
    return coloured


def images_of(batch=12, channels=3, height=40, width=32):
    return torch.randint(0, 256, (batch, channels, height, width), dtype=torch.uint8)


def assert_share(flags, share):
    assert abs(float(flags.float().mean()) - share) <= SURE * (share * (1 - share) / N) ** 0.5


def assert_uniform(values, low, high):
    """Check the range, and a Kolmogorov-Smirnov distance that chance exceeds once in 10^5."""
    assert low <= values.min()
    assert values.max() <= high
    ranks = (torch.arange(len(values)) + 0.5) / len(values)
    distance = ((values.sort().values - low) / (high - low) - ranks).abs().max()
    assert distance < 2.5 / len(values) ** 0.5


# Parameters


@pytest.mark.parametrize(("augmentation", "hue"), [("moco-v1", 0.4), ("moco-v2", 0.1)])
def test_colours_are_drawn_as_in_official_moco(augmentation, hue):
    drawn = colours(augmentation)
    for factor in (drawn.brightness, drawn.contrast, drawn.saturation):
        assert_uniform(factor, 0.6, 1.4)
    assert_uniform(drawn.hue, -hue, hue)
    assert_share(drawn.grey, 0.2)
    assert_share(drawn.flip, 0.5)
    if augmentation == "moco-v1":
        assert drawn.jitter.all()
        assert (drawn.sigma == 0).all()
    else:
        assert_share(drawn.jitter, 0.8)
        assert_share(drawn.sigma > 0, 0.5)
        assert_uniform(drawn.sigma[drawn.sigma > 0], 0.1, 2.0)


def test_blur_can_be_left_out():
    assert (colours("moco-v2", blur=False).sigma == 0).all()


def test_every_order_of_the_colour_operations_is_equally_likely():
    code = (colours("moco-v2").order * torch.tensor([64, 16, 4, 1])).sum(1)
    _, counts = code.unique(return_counts=True)
    assert len(counts) == 24
    assert ((counts - N / 24).abs() < SURE * (N / 24) ** 0.5).all()


def test_parameters_are_unrelated_to_each_other():
    drawn = colours("moco-v2")
    columns = torch.stack([value.float() for value in drawn[1:]] + [drawn.order[:, 0].float()])
    varying = columns[columns.std(dim=1) > 0]
    assert len(varying) == len(columns) - 1  # MoCo-v2 solarises no view
    related = torch.corrcoef(varying) - torch.eye(len(varying))
    assert related.abs().max() < SURE / N**0.5


@pytest.mark.parametrize(
    ("height", "width", "min_scale", "count"),
    [
        (375, 500, 0.2, 20_000),
        (32, 32, 0.2, 20_000),
        (300, 30, 0.2, 3000),
        (20, 90, 0.5, 3000),
        (64, 64, 0.9, 3000),
    ],
)
def test_crops_are_distributed_as_torchvisions(height, width, min_scale, count):
    """A Kolmogorov-Smirnov test of box, shape and area, which chance fails once in 10^4."""
    draws = uniform(0, 0, torch.arange(count), 0, CROP_DRAWS)
    sides = torch.full((count,), height), torch.full((count,), width)
    ours = torch.stack(draw_crops(draws, *sides, min_scale), dim=1)
    image = torch.empty(1, height, width)
    scale, ratio = [min_scale, 1.0], [3 / 4, 4 / 3]
    theirs = torch.tensor([RandomResizedCrop.get_params(image, scale, ratio) for _ in range(count)])

    def measures(boxes):
        height, width = boxes[:, 2].double(), boxes[:, 3].double()
        return [*boxes.double().T, width / height, width * height]

    for mine, other in zip(measures(ours), measures(theirs), strict=True):
        points = torch.cat([mine, other]).unique()
        below = [torch.searchsorted(v.sort().values, points, right=True) for v in (mine, other)]
        assert (below[0] - below[1]).abs().max() < 2.2 * (2 * count) ** 0.5


def test_crops_lie_inside_images_of_any_size():
    heights = torch.cat([torch.randint(1, 9, (N // 2,)), torch.randint(1, 3000, (N // 2,))])
    widths = heights[torch.randperm(N)]
    boxes = draw_crops(uniform(1, 0, torch.arange(N), 0, CROP_DRAWS), heights, widths, 0.0)
    assert (boxes.top >= 0).all()
    assert (boxes.left >= 0).all()
    assert (boxes.height >= 1).all()
    assert (boxes.width >= 1).all()
    assert (boxes.top + boxes.height <= heights).all()
    assert (boxes.left + boxes.width <= widths).all()


def test_a_crop_that_never_fits_is_the_centre():
    """The values are those of torchvision's fallback."""
    draws = torch.full((3, CROP_DRAWS), 0.999, dtype=torch.float64)
    boxes = draw_crops(draws, torch.tensor([10, 100, 40]), torch.tensor([100, 10, 50]), 1.0)
    assert torch.stack(boxes, dim=1).tolist() == [[0, 43, 10, 13], [43, 0, 13, 10], [0, 0, 40, 50]]


# Pixels, given parameters


def slowly(image, row, parameters, augmentation):
    """Return the view that torchvision makes of one image."""
    p = parameters
    adjust = [
        lambda x: reference.adjust_brightness(x, float(p.brightness[row])),
        lambda x: reference.adjust_contrast(x, float(p.contrast[row])),
        lambda x: reference.adjust_saturation(x, float(p.saturation[row])),
        lambda x: reference.adjust_hue(x, float(p.hue[row])),
    ]

    def jitter(x):
        for number in p.order[row].tolist() if p.jitter[row] else []:
            x = adjust[number](x)
        return x

    def grey(x):
        return reference.rgb_to_grayscale(x, num_output_channels=3) if p.grey[row] else x

    def blur(x):
        return reference.gaussian_blur(x, [17, 17], [float(p.sigma[row])]) if p.sigma[row] else x

    image = jitter(grey(image)) if augmentation == "moco-v1" else blur(grey(jitter(image)))
    return reference.horizontal_flip(image) if p.flip[row] else image


@pytest.mark.parametrize("augmentation", ["moco-v1", "moco-v2"])
def test_colours_equal_torchvisions_one_by_one(augmentation):
    """They agree within 1e-4 of the range, whatever the parameters are."""
    images, parameters = torch.rand(64, 3, 20, 20), colours(augmentation, count=64)
    before = images.clone()
    ours = apply_colours(images, parameters, augmentation)
    theirs = [slowly(image, row, parameters, augmentation) for row, image in enumerate(images)]
    torch.testing.assert_close(ours, torch.stack(theirs), rtol=0, atol=1e-4)
    assert torch.equal(images, before)


@pytest.mark.parametrize("channels", [1, 2, 4])
def test_images_without_colours_keep_brightness_contrast_blur_and_flip(channels):
    images, parameters = torch.rand(64, channels, 16, 16), colours("moco-v2", count=64)
    ours = apply_colours(images, parameters, "moco-v2")
    only_colour = ~parameters.jitter & (parameters.sigma == 0) & ~parameters.flip
    assert only_colour.any()
    assert torch.equal(ours[only_colour], images[only_colour])
    same = parameters._replace(
        saturation=torch.zeros(64), hue=torch.zeros(64), grey=~parameters.grey
    )
    assert torch.equal(ours, apply_colours(images, same, "moco-v2"))


def test_one_channel_equals_torchvisions_on_grey_images():
    images = torch.rand(32, 1, 16, 16)
    parameters = colours("moco-v2", count=32)._replace(grey=torch.zeros(32, dtype=torch.bool))
    ours = apply_colours(images, parameters, "moco-v2")
    theirs = [slowly(image, row, parameters, "moco-v2") for row, image in enumerate(images)]
    torch.testing.assert_close(ours, torch.stack(theirs), rtol=0, atol=1e-4)


def test_large_images_one_by_one_and_small_ones_in_groups_are_the_same(monkeypatch):
    """They agree to the bit: the grouping of samples does not change the result."""
    images, parameters = torch.rand(24, 3, 40, 40), colours("moco-v2", count=24)
    grouped = apply_colours(images, parameters, "moco-v2")
    monkeypatch.setattr(views, "ALONE", 1)
    before = images.clone()
    assert torch.equal(apply_colours(images, parameters, "moco-v2"), grouped)
    assert torch.equal(images, before)


# Views


def test_views_depend_on_seed_epoch_sample_and_nothing_else():
    config = DataConfig(image_size=16)
    images, ids = images_of(), torch.arange(12) * 1000
    query, key = make_views(images, ids, config, seed=1, epoch=2)
    assert query.shape == key.shape == (12, 3, 16, 16)
    some = torch.tensor([7, 2, 3])
    for one, other in zip(
        make_views(images[some], ids[some], config, 1, 2), (query, key), strict=True
    ):
        assert torch.equal(one, other[some])
    for changed in [(ids + 1, 1, 2), (ids, 2, 2), (ids, 1, 3)]:
        again, _ = make_views(images, changed[0], config, *changed[1:])
        assert not any(torch.equal(a, b) for a, b in zip(again, query, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(query, key, strict=True))


def test_the_number_of_threads_and_pieces_changes_no_bit(monkeypatch):
    config, images, ids = DataConfig(image_size=64), images_of(6, 3, 96, 96), torch.arange(6)
    expected = make_views(images, ids, config, 0, 0)
    threads = torch.get_num_threads()
    monkeypatch.setattr(views, "CACHED", 1)
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            for one, other in zip(make_views(images, ids, config, 0, 0), expected, strict=True):
                assert torch.equal(one, other)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_halves_make_the_whole(channels):
    """A worker's crops, coloured later, equal the batch's views up to rounding to uint8."""
    config = DataConfig(image_size=16, channels=channels, augmentation="moco-v1", blur=False)
    images, ids = images_of(channels=channels), torch.arange(12)
    crops = crop_views(list(images), ids, config, 3, 4)
    halves = colour_views(crops, ids, config, 3, 4)
    scale = min(channel_statistics(channels)[1])
    for half, whole in zip(halves, make_views(images, ids, config, 3, 4), strict=True):
        assert (half - whole).abs().mean() < 2 / 255 / scale


def test_query_and_key_are_alike_in_distribution():
    """Means over 512 samples of each view agree within 4.5 standard errors."""
    images = images_of(1, 3, 8, 8).expand(512, -1, -1, -1)
    views = make_views(images, torch.arange(512), DataConfig(image_size=8), 0, 0)
    query, key = (view.mean(dim=(1, 2, 3)) for view in views)
    error = math.sqrt((float(query.var()) + float(key.var())) / 512)
    assert abs(float(query.mean() - key.mean())) < SURE * error
    assert abs(float(torch.corrcoef(torch.stack([query, key]))[0, 1])) < SURE / 512**0.5


# Evaluation


@pytest.mark.parametrize(("height", "width"), [(500, 375), (224, 300), (60, 61), (40, 100)])
def test_evaluation_crop_equals_official_mocos(height, width):
    image = images_of(1, 3, height, width)[0]
    expected = reference.center_crop(reference.resize(image, [256], antialias=True), [224, 224])
    assert torch.equal(evaluation_crop(image, 224), expected)


def test_images_of_the_right_size_are_evaluated_as_they_are():
    images = images_of(2, 3, 32, 32)
    assert evaluation_crop(images, 32) is images


@pytest.mark.parametrize(("height", "width"), [(1, 20_000), (20_000, 1), (1, 1)])
def test_strips_and_dots_are_evaluated_without_filling_the_memory(height, width):
    assert evaluation_crop(images_of(1, 3, height, width)[0], 32).shape == (3, 32, 32)


def test_normalisation_is_imagenets_or_plain():
    mean, std = channel_statistics(3)
    assert (mean, std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert channel_statistics(1) == ((0.5,), (0.25,))
    assert normalise(torch.full((1, 2, 3, 3), 0.75), *channel_statistics(2)).unique().item() == 1


@pytest.mark.parametrize(("height", "width"), [(375, 500), (30, 24)])
def test_a_workers_crops_equal_torchvisions_at_the_same_boxes(height, width):
    image = images_of(1, 3, height, width)[0]
    ids, config = torch.tensor([5]), DataConfig(image_size=48)
    sides = torch.tensor([height, height]), torch.tensor([width, width])
    boxes = draw_crops(views.draw_views(ids, 1, 2, CROP_DRAWS), *sides, config.min_scale)
    expected = [
        reference.resized_crop(image, *box, size=[48, 48])
        for box in torch.stack(boxes, dim=1).tolist()
    ]
    beside = image.permute(1, 2, 0).contiguous().permute(2, 0, 1)  # as decoders leave it
    for pixels in (image, beside):
        assert torch.equal(crop_views([pixels], ids, config, 1, 2)[:, 0], torch.stack(expected))


def test_one_view_is_the_first_of_two():
    images = torch.randint(0, 255, (6, 3, 40, 40), dtype=torch.uint8)
    config, ids = DataConfig(image_size=32), torch.arange(6)
    (alone,) = make_views(images, ids, config, 0, 1, views=1)
    assert torch.equal(alone, make_views(images, ids, config, 0, 1)[0])
    crops = crop_views([images[2], images[4]], ids[2:5:2], config, 0, 1)
    assert torch.equal(crop_views([images[4]], ids[4:5], config, 0, 1, views=1)[0, 0], crops[0, 1])


def test_plain_views_are_cropped_and_flipped_and_no_more():
    images = torch.randint(0, 255, (40, 3, 32, 32), dtype=torch.uint8)
    config = DataConfig(image_size=32, augmentation="plain", min_scale=1.0)
    (views,) = make_views(images, torch.arange(40), config, 0, 0, views=1)
    mean, std = (torch.tensor(value).view(3, 1, 1) for value in channel_statistics(3))
    pixels = ((views * std + mean) * 255).round()
    whole = [
        (torch.equal(view, image.float()), torch.equal(view, image.flip(2).float()))
        for view, image in zip(pixels, images, strict=True)
    ]
    assert sum(same or flipped for same, flipped in whole) > 5  # a crop of another shape is neither
    assert any(same for same, _ in whole)
    assert any(flipped for _, flipped in whole)
