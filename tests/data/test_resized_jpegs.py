"""data.resized_jpegs: made once, continued after a stop, never mixed with the images themselves."""

import os
import pickle
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2.functional import resize

from hardmix.data import resized_jpegs
from hardmix.data.cache import cache_folder
from hardmix.data.image_files import UnreadableImage, read_image
from hardmix.data.loading import open_loader
from hardmix.data.sources import open_images
from hardmix.errors import InputError, UnfinishedError
from hardmix.runtime import signals
from hardmix.settings.config import DataConfig, PretrainConfig, TrainConfig
from hardmix.settings.saved import check_same_run

SIZES = [(300, 400), (500, 280), (256, 256), (90, 120), (700, 257)]


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(resized_jpegs, "PART", 2)


@pytest.fixture
def folder(tmp_path):
    """Photographs of several sizes, one of them grey, and a file that is no image."""
    generator, folder = np.random.default_rng(0), tmp_path / "images"
    folder.mkdir()
    for number, (width, height) in enumerate(SIZES):
        coarse = generator.integers(0, 256, (5, 6, 3), dtype=np.uint8)
        picture = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        (picture.convert("L") if number == 1 else picture).save(folder / f"{number}.png")
    (folder / "broken.jpg").write_bytes(b"\xff\xd8 not an image")
    return folder


def opened(folder, **more):
    options = {"name": "folder", "root": str(folder), "workers": 0, "cache": "off"}
    return open_images(DataConfig(resized_jpegs=True, **options, **more))


def the_file():
    (file,) = cache_folder().glob("jpegs-*.pixels")
    return file


def test_images_have_a_shorter_side_of_256_and_nearly_their_own_pixels(folder, capfd):
    images = opened(folder)
    assert "Resized 6 images" in capfd.readouterr().out
    for index in range(len(SIZES)):
        own = read_image(folder / f"{index}.png")
        wanted = own if min(own.shape[1:]) <= 256 else resize(own, [256], antialias=True)
        made = images.image(index)
        assert made.shape == wanted.shape
        assert float((made.float() - wanted.float()).abs().mean()) < 4
    with pytest.raises(UnreadableImage, match=r"broken\.jpg"):
        images.image(len(SIZES))
    assert min(images.image(3).shape[1:]) == 90  # a small image stays small


def test_the_file_is_made_once_and_read_by_any_process(folder, monkeypatch):
    first = opened(folder)
    monkeypatch.setattr(resized_jpegs, "_encode", None)
    again = pickle.loads(pickle.dumps(opened(folder)))
    assert all(torch.equal(first.image(i), again.image(i)) for i in range(len(SIZES)))
    part = opened(folder).select(torch.tensor([4, 1]))
    assert torch.equal(part.image(0), first.image(4))


class Stop(signals.StopRequest):
    """A request to stop that comes after some parts."""

    left = 2

    def __bool__(self):
        self.left -= 1
        return self.left < 0


def test_what_was_made_before_a_stop_is_not_made_again(folder, monkeypatch):
    whole = opened(folder)
    expected = [whole.image(i) for i in range(len(SIZES))]
    the_file().unlink()
    encode, made = resized_jpegs._encode, []

    def noted(read, files):
        made.extend(files)
        return encode(read, files)

    monkeypatch.setattr(resized_jpegs, "_encode", noted)
    images = whole.files
    names = resized_jpegs.ImageCache(images, lambda file: read_image(file), 3, (), "file", 0.0, 0)
    file = cache_folder() / "jpegs-test.pixels"
    resized_jpegs._make(file, names, Stop())
    assert not file.exists()
    assert len(made) == 4
    with file.with_name(f"{file.name}.part").open("ab") as part:
        part.write(b"half a JPEG")  # written, but not listed
    resized_jpegs._make(file, names, signals.StopRequest())
    assert len(made) == 6
    index = resized_jpegs._read_index(file, names.mark)
    reader = resized_jpegs.ResizedJpegs(str(file), index, read_image)
    for name, wanted in zip(images, expected, strict=False):
        assert torch.equal(reader(name, 3, 10**9), wanted)
    assert not list(cache_folder().glob("*.part")) + list(cache_folder().glob("*.list"))


@pytest.mark.parametrize("lost", [1, 100, 10**6])
def test_a_part_that_did_not_reach_the_disk_is_made_again(lost, folder):
    names = opened(folder).files
    cache = resized_jpegs.ImageCache(names, lambda file: read_image(file), 3, (), "file", 0.0, 0)
    file = cache_folder() / "jpegs-test.pixels"
    resized_jpegs._make(file, cache, Stop())
    part = file.with_name(f"{file.name}.part")
    os.truncate(part, max(0, part.stat().st_size - lost))
    resized_jpegs._make(file, cache, signals.StopRequest())
    index = resized_jpegs._read_index(file, cache.mark)
    reader = resized_jpegs.ResizedJpegs(str(file), index, read_image)
    shapes = [min(reader(name, 3, 10**9).shape[1:]) for name in names[: len(SIZES)]]
    assert shapes == [256, 256, 256, 90, 256]


def test_a_changed_image_is_resized_anew_and_a_damaged_copy_is_never_replaced_by_the_image(folder):
    opened(folder)
    Image.new("RGB", (300, 300), "red").save(folder / "0.png")
    images = opened(folder)
    assert images.image(0)[0].float().mean() > 250
    file = the_file()
    content = bytearray(file.read_bytes())
    content[5] ^= 255
    file.write_bytes(content)
    with pytest.raises(UnreadableImage, match=r"0\.png: its copy in .* is damaged; delete"):
        images.image(0)


def test_a_run_with_other_pixels_is_another_run_and_sets_without_files_are_refused(folder):
    usual = PretrainConfig()
    other = PretrainConfig(data=DataConfig(resized_jpegs=True))
    with pytest.raises(InputError, match="resized_jpegs"):
        check_same_run(usual, other)
    with pytest.raises(InputError, match="shapes is held in memory"):
        open_images(DataConfig(name="shapes", num_images=8, image_size=32, resized_jpegs=True))
    for name in ("a", "b"):
        np.save(folder / f"{name}.npy", np.zeros((2, 9, 9), dtype=np.uint8))
    with pytest.raises(InputError, match="channels=2: a JPEG has 1 or 3"):
        opened(folder, channels=2)
    stream = DataConfig(root="pipe:cat a.tar", num_images=8, resized_jpegs=True)
    with pytest.raises(InputError, match="a stream has no files to read"):
        open_loader(stream, TrainConfig(batch_size=4), torch.device("cpu"))


def test_a_full_disk_and_a_stop_are_told_in_a_sentence(folder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patches:
        patches.setattr(resized_jpegs._Parts, "add", full)
        with pytest.raises(InputError, match=r"No space left on device.*XDG_CACHE_HOME"):
            opened(folder)

    class Stopped(signals.StopRequest):
        name = "SIGUSR2"

        def __bool__(self):
            return True

    monkeypatch.setattr(resized_jpegs, "listening", lambda: nullcontext(Stopped()))
    monkeypatch.setattr(resized_jpegs.signal, "raise_signal", lambda _: None)
    with pytest.raises(UnfinishedError, match=r"stopped by SIGUSR2 .* the same command continues"):
        opened(folder)
