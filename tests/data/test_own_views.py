"""Views from your own pipeline are a function of (seed, epoch, image, view) and nothing else."""

import random
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from hardmix.commands import main as cli
from hardmix.data.colours import channel_statistics
from hardmix.data.loading import open_loader
from hardmix.data.own_views import choose_pipelines, make_own_views
from hardmix.data.sources import open_images
from hardmix.errors import InputError, UnfinishedError
from hardmix.runs.folder import Run
from hardmix.settings.config import DataConfig
from hardmix.training.pretrain import pretrain
from ranks import signal_after, state_of, tiny

albumentations = pytest.importorskip("albumentations")

CPU = torch.device("cpu")


def torchvision_views():
    return v2.Compose([v2.RandomResizedCrop(32, antialias=True), v2.RandomHorizontalFlip()])


def albumentations_views():
    crop = albumentations.RandomResizedCrop((32, 32), scale=(0.2, 1.0))
    return albumentations.Compose(
        [crop, albumentations.HorizontalFlip(), albumentations.ColorJitter()]
    )


def any_function(image):
    """Draws from all three generators that a function may use."""
    shift = random.randrange(4) + int(np.random.randint(4)) + int(torch.randint(4, ()))
    return image.roll(shift, dims=2)


PIPELINES = {
    "torchvision": torchvision_views,
    "albumentations": albumentations_views,
    "function": lambda: any_function,
}


@pytest.fixture(params=PIPELINES)
def pipeline(request):
    return PIPELINES[request.param]()


def batches(config, pipeline, epoch=0, first_step=0):
    _, loader = open_loader(config.data, config.train, CPU, pipeline=pipeline)
    try:
        return list(loader.epoch(epoch, first_step))
    finally:
        loader.close()


def with_workers(config, number):
    return replace(config, data=replace(config.data, workers=number))


def test_views_have_the_same_bits_for_any_number_of_workers_and_from_any_step(pipeline):
    config = tiny()
    alone = batches(with_workers(config, 0), pipeline)
    assert len(alone) == 6
    for one, other in zip(alone, batches(with_workers(config, 2), pipeline), strict=True):
        assert torch.equal(one.ids, other.ids)
        assert torch.equal(one.query, other.query)
        assert torch.equal(one.key, other.key)
    later = batches(with_workers(config, 0), pipeline, first_step=4)
    assert torch.equal(later[0].query, alone[4].query)
    assert alone[0].query.shape == (16, 3, 32, 32)
    assert alone[0].query.dtype == torch.float32


def test_two_views_two_epochs_and_two_images_differ_and_one_repeats(pipeline):
    config = tiny()
    images = open_images(config.data, "train")
    pair = [images.image(3), images.image(3), images.image(5)]
    ids = torch.tensor([3, 4, 5])

    def made(epoch, seed=0):
        both = choose_pipelines(config.data, pipeline, 2)
        return make_own_views(pair, ids, both, config.data, seed, epoch)

    first = made(0)
    assert torch.equal(first, made(0))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, made(1))
    assert not torch.equal(first, made(0, seed=1))
    assert not torch.equal(first[:, 0], first[:, 1])  # the same picture under two numbers
    alone = make_own_views(pair[2:], ids[2:], (pipeline,) * 2, config.data, 0, 0)
    assert torch.equal(alone[:, 0], first[:, 2])  # whoever stands beside it


def test_the_programs_own_random_numbers_go_on_as_before(pipeline):
    config = tiny()
    images = open_images(config.data, "train")

    def drawn():
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        yield
        yield torch.rand(()), np.random.rand(), random.random()

    numbers = []
    for makes in (lambda image: image, pipeline):
        generator = drawn()
        next(generator)
        make_own_views([images.image(0)], torch.tensor([0]), (makes,), config.data, 0, 0)
        numbers.append([float(each) for each in next(generator)])
    assert numbers[0] == numbers[1]


def test_the_steps_of_an_albumentations_pipeline_draw_independently():
    """If each step had the same seed, both flips would always come together."""
    flips = [albumentations.HorizontalFlip(p=0.5), albumentations.VerticalFlip(p=0.5)]
    data = DataConfig(image_size=8)
    image = torch.arange(64, dtype=torch.uint8).view(1, 8, 8).expand(3, 8, 8)
    made = make_own_views(
        [image] * 64, torch.arange(64), (albumentations.Compose(flips),), data, 0, 0
    )[0, :, 0]
    corners = {int(view.argmin()) for view in made}
    assert corners == {0, 7, 56, 63}


def test_whole_numbers_are_normalised_as_evaluation_does_and_floats_are_taken_as_they_are():
    image = torch.full((3, 8, 8), 100, dtype=torch.uint8)
    data, ids = DataConfig(image_size=8), torch.tensor([0])
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in channel_statistics(3))
    for same in (
        lambda image: image,
        lambda image: Image.fromarray(image.permute(1, 2, 0).numpy()),
        lambda image: image.permute(1, 2, 0).numpy(),
    ):
        made = make_own_views([image], ids, (same,), data, 0, 0)[0, 0]
        torch.testing.assert_close(made, ((100 / 255 - mean) / std).expand(3, 8, 8))
    floats = make_own_views([image], ids, (lambda image: image.double() / 50,), data, 0, 0)
    assert torch.equal(floats[0, 0], torch.full((3, 8, 8), 2.0))


def test_a_pipeline_for_each_view():
    config = tiny(data={"workers": 0})
    zero, one = (lambda image, v=value: torch.full((3, 32, 32), v) for value in (0.0, 1.0))
    batch = batches(config, [zero, one])[0]
    assert torch.equal(batch.query, torch.zeros(16, 3, 32, 32))
    assert torch.equal(batch.key, torch.ones(16, 3, 32, 32))
    with pytest.raises(InputError, match="a list of 2, one for each view"):
        batches(config, [zero])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torchvision", "albumentations"])
def test_a_run_with_own_views_repeats_and_resumes_bit_equal(kind, tmp_path, monkeypatch):
    config = tiny(train={"knn_every": 0, "epochs": 1}, mix={"warm_up_epochs": 0})
    views = PIPELINES[kind]()
    whole = pretrain(with_workers(config, 0), tmp_path / "whole", views=views)
    assert whole.config().data.views == "own"
    signal_after(monkeypatch, {4})
    with pytest.raises(UnfinishedError):
        pretrain(with_workers(config, 2), tmp_path / "run", views=views)
    with pytest.raises(InputError, match=r"data\.views=own .* pass it again"):
        pretrain(Run(tmp_path / "run").config(), tmp_path / "run", resume=True)
    pretrain(with_workers(config, 1), tmp_path / "run", views=views, resume=True)
    assert state_of(tmp_path / "run") == state_of(whole.path)


MY_VIEWS = """
from torchvision.transforms import v2

def make_views(image_size):
    return v2.Compose([v2.RandomCrop(image_size), v2.RandomHorizontalFlip()])

def too_small():
    return v2.CenterCrop(7)

def no_pipeline():
    return 3

def breaks():
    return v2.Lambda(lambda image: 1 / 0)

def breaks_on_some():
    return v2.Lambda(lambda image: image if image[0, 0, 0] != 3 else 1 / 0)
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of the user's, in the folder where the command is started."""
    (tmp_path / "my_views.py").write_text(MY_VIEWS)
    monkeypatch.chdir(tmp_path)
    yield "my_views"
    sys.modules.pop("my_views", None)


SMALL = "--data.num-images 48 --train.batch-size 16 --train.queue-size 32 --mix.num-hardest 16"
SMALL += " --train.knn-every 0 --train.epochs 1 --data.workers 0 --out run"


def command(capfd, words):
    with pytest.raises(SystemExit) as ended:
        cli.main(words.split())
    shown = capfd.readouterr()
    assert "Traceback" not in shown.err
    return ended.value.code, shown.err.replace("\n", " ")


@pytest.mark.slow
def test_the_command_line_names_a_function_that_makes_the_pipeline(package, tmp_path, capfd):
    code, shown = command(capfd, f"pretrain demo --data.views my_views:make_views {SMALL}")
    assert code == 0, shown
    assert Run(tmp_path / "run").config().data.views == "my_views:make_views"
    again = "pretrain --out run --resume --train.epochs 2"
    code, shown = command(capfd, again)
    assert code == 2
    assert f"run hardmix {again} --allow-code my_views:make_views." in shown
    code, shown = command(capfd, f"{again} --data.views my_views:make_views")
    assert code == 0, shown
    assert command(capfd, "knn run --data.num-images 48 --k 5")[0] == 0


@pytest.mark.parametrize(
    ("views", "words"),
    [
        ("own", ["data.views=own", "pass it again"]),
        ("mine", ["data.views='mine'", "mypackage.module:function"]),
        ("no_such:thing", ["no_such cannot be imported", "ModuleNotFoundError"]),
        ("my_views:missing", ["defines no function 'missing'", "make_views"]),
        ("my_views:too_small", ["CenterCrop makes views of shape (3, 7, 7)", "(3, 32, 32)"]),
        ("my_views:no_pipeline", ["data.views gives 3", "a callable"]),
        ("my_views:breaks", ["Lambda failed", "ZeroDivisionError"]),
        ("os:getcwd", ["standard library"]),
    ],
)
def test_what_is_no_pipeline_is_refused_in_a_sentence(views, words, package, tmp_path, capfd):
    code, shown = command(capfd, f"pretrain demo --data.views {views} {SMALL}")
    assert code == 2
    assert all(word in shown for word in words), shown
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_pipeline_that_breaks_later_is_one_sentence_too(workers, package, tmp_path, capfd):
    for number in range(16):
        file = tmp_path / "images" / f"{number:02}.png"
        file.parent.mkdir(exist_ok=True)
        Image.new("RGB", (32, 32), (3 if number == 11 else 200, 0, 0)).save(file)
    size = "--train.batch-size 4 --train.queue-size 8 --mix.num-hardest 4 --train.knn-every 0"
    words = f"pretrain demo --data.root images --data.views my_views:breaks_on_some {size}"
    code, shown = command(capfd, f"{words} --data.workers {workers} --out run")
    assert code == 2
    assert "data.views: Lambda failed on an image of shape (3, 32, 32)" in shown
    assert "ZeroDivisionError: division by zero" in shown
