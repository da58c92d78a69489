from itertools import combinations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from hardmix import InputError
from hardmix.data.shapes import BLOCK, CLASSES, OUTLINES, cached_shapes, draw_shapes


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "hardmix"


def knn_accuracy(bank: Tensor, labels: Tensor, asked: Tensor, wanted: Tensor, k: int = 20) -> float:
    nearest = (normalize(asked, dim=1) @ normalize(bank, dim=1).T).topk(k, dim=1).indices
    votes = one_hot(labels[nearest], len(CLASSES)).sum(dim=1)
    return float((votes.argmax(dim=1) == wanted).float().mean())


@pytest.mark.parametrize("size", [32, 48, 64])
def test_images_of_the_size_asked_for(size):
    images, labels = draw_shapes(13, size)
    assert images.dtype == torch.uint8
    assert images.shape == (13, 3, size, size)
    assert labels.tolist() == [*range(12), 0]
    assert len(CLASSES) == 12
    assert images.flatten(1).float().std(dim=1).min() > 20  # none is plain


def test_an_image_depends_on_seed_split_and_number_alone():
    images, labels = draw_shapes(BLOCK + 5)
    fewer, fewer_labels = draw_shapes(7)
    assert torch.equal(images[:7], fewer)
    assert torch.equal(labels[:7], fewer_labels)
    assert torch.equal(draw_shapes(BLOCK + 1)[0], images[:-4])
    flat = torch.cat([images, draw_shapes(9, seed=1)[0], draw_shapes(9, split="test")[0]])
    assert len(flat.flatten(1).unique(dim=0)) == len(flat)


def test_the_global_generator_is_left_alone():
    state = torch.get_rng_state()
    draw_shapes(3)
    assert torch.equal(torch.get_rng_state(), state)


def test_neither_pixels_nor_colours_give_the_class_away():
    images, labels = draw_shapes(4800)
    asked, wanted = draw_shapes(600, split="test")
    pixels = knn_accuracy(images.flatten(1).float(), labels, asked.flatten(1).float(), wanted)
    assert pixels < 0.25  # 10,000 images give 0.15 or so; chance is 0.083
    colours, asked_colours = (part.float().mean(dim=(2, 3)) for part in (images, asked))
    assert knn_accuracy(colours, labels, asked_colours, wanted) < 0.15


def grid(number: int = 400, reach: float = 1.25) -> tuple[Tensor, Tensor]:
    steps = torch.linspace(-reach, reach, number)
    y, x = torch.meshgrid(-steps, steps, indexing="ij")
    return x[None], y[None]


@pytest.mark.parametrize("name", CLASSES)
def test_a_form_fills_its_disc_and_does_not_leave_it(name):
    """A form is then seen whole, however it is turned within its cell."""
    x, y = grid()
    distance = OUTLINES[name](x, y)
    radius = torch.hypot(x, y)
    assert distance[radius > 1.01].min() > 0
    assert radius[distance < 0].max() > 0.85
    area = float((distance < 0).float().mean()) * 2.5**2
    assert 0.7 < area < 2.6


@pytest.mark.parametrize("name", CLASSES)
def test_near_its_edge_a_form_is_a_true_distance(name):
    """Otherwise its edges would be ragged or blurred."""
    x, y = grid()
    distance = OUTLINES[name](x, y)[0]
    step = float(x[0, 0, 1] - x[0, 0, 0])
    down, right = torch.gradient(distance, spacing=step)
    steepness = torch.hypot(down, right)[distance.abs() < 0.05]
    assert steepness.max() < 1.05
    assert steepness.median() == pytest.approx(1, abs=0.02)


def test_areas_known_by_heart():
    x, y = grid(1000)
    for name, area in {"square": 2.0, "disc": np.pi * 0.81, "ring": np.pi * (0.81 - 0.25)}.items():
        assert float((OUTLINES[name](x, y) < 0).float().mean()) * 2.5**2 == pytest.approx(
            area, 0.01
        )


def test_no_two_forms_are_alike():
    x, y = grid()
    masks = {name: outline(x, y) < 0 for name, outline in OUTLINES.items()}
    for one, other in combinations(masks, 2):
        for mirrored in (masks[other], masks[other].flip(2)):
            common = (masks[one] & mirrored).sum() / (masks[one] | mirrored).sum()
            assert common < 0.8, (one, other)


def test_what_was_drawn_is_kept(cache, monkeypatch):
    first = cached_shapes(20, 32, 3, "test")
    assert len(list(cache.iterdir())) == 1
    assert all(map(torch.equal, first, draw_shapes(20, 32, 3, "test")))
    monkeypatch.setattr("hardmix.data.shapes.draw_shapes", None)
    again = cached_shapes(20, 32, 3, "test")
    assert all(map(torch.equal, first, again))
    assert again[0].dtype == torch.uint8
    again[0].zero_()  # it is the caller's own
    assert torch.equal(cached_shapes(20, 32, 3, "test")[0], first[0])


@pytest.mark.parametrize("content", [b"", b"damaged", b"\x93NUMPY\x01\x00v\x00{", None])
def test_a_damaged_cache_is_drawn_again(cache, content):
    first, _ = cached_shapes(20)
    (file,) = cache.iterdir()
    file.write_bytes(file.read_bytes()[:-100] if content is None else content)
    assert torch.equal(cached_shapes(20)[0], first)
    assert torch.equal(torch.from_numpy(np.load(file)), first)
    assert list(cache.iterdir()) == [file]


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert torch.equal(cached_shapes(5)[0], draw_shapes(5)[0])


def test_a_disk_that_fills_up_leaves_nothing_behind(cache, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    assert torch.equal(cached_shapes(5)[0], draw_shapes(5)[0])
    assert list(cache.iterdir()) == []


def test_nothing_cannot_be_drawn():
    with pytest.raises(InputError, match="num_images=0 is below 1"):
        draw_shapes(0)
