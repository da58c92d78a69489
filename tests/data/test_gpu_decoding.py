"""data.decoder=cuda: refused without a GPU in a sentence; on one, the CPU's views to rounding."""

import pytest
import torch
from PIL import Image

from hardmix.data import gpu_decoding
from hardmix.data.image_files import read_image
from hardmix.data.loading import ViewLoader, open_loader
from hardmix.data.sources import open_images
from hardmix.errors import InputError
from hardmix.settings.config import DataConfig, PretrainConfig, TrainConfig
from hardmix.settings.saved import check_same_run
from pretended_gpu import GPU, pretended_gpu

MOST_LAUNCHES = 66  # counted: 62
"""Launches of the crops and flips of a batch of four images, beside the decoder's own."""
SIZES = [(60, 80), (90, 50), (64, 64), (48, 70), (70, 50), (52, 64), (80, 80), (66, 54)]


@pytest.fixture
def folder(tmp_path):
    generator = torch.Generator().manual_seed(0)
    for number, size in enumerate(SIZES):
        coarse = torch.randint(0, 256, (4, 5, 3), dtype=torch.uint8, generator=generator)
        picture = Image.fromarray(coarse.numpy()).resize(size, Image.Resampling.BICUBIC)
        picture.save(tmp_path / f"{number}.{'png' if number == 3 else 'jpg'}", quality=95)
    turned = Image.open(tmp_path / "1.jpg")
    exif = turned.getexif()
    exif[gpu_decoding.ORIENTATION] = 6
    turned.save(tmp_path / "1.jpg", exif=exif, quality=95)
    return tmp_path


def config_of(folder, decoder="cuda"):
    options = {"name": "folder", "root": str(folder), "image_size": 32, "augmentation": "plain"}
    return DataConfig(**options, workers=0, cache="off", decoder=decoder)


@pytest.fixture
def nvjpeg(monkeypatch, tmp_path):
    """Stands for nvJPEG: notes how many images each call decodes."""
    calls = []

    def decode(files, device):
        calls.append(len(files))
        made = []
        for data in files:
            (tmp_path / "one").write_bytes(bytes(data.tolist()))
            try:
                made.append(read_image(tmp_path / "one").to(device))
            except InputError as error:
                raise RuntimeError("nvjpeg: bad image") from error
        return made

    monkeypatch.setattr(gpu_decoding, "_decode_jpeg", lambda: decode)
    return calls


def test_few_operations_follow_the_decoder(folder, nvjpeg):
    images = open_images(config_of(folder))
    with pretended_gpu() as log:
        batches = ViewLoader(images, config_of(folder), 4, 0, GPU, decodes=True).epoch(0)
        next(batches)
        log.clear()
        next(batches)
        assert len(log.launches) <= MOST_LAUNCHES, log.by_place(log.launches)
    assert nvjpeg


def batches_of(folder, device, decoder):
    images = open_images(config_of(folder))
    options = {"decodes": decoder == "cuda"}
    return list(ViewLoader(images, config_of(folder, decoder), 4, 0, device, **options).epoch(0))


def test_a_gpu_that_decodes_makes_the_views_of_a_cpu_without_waiting(folder, nvjpeg):
    expected = batches_of(folder, torch.device("cpu"), "cpu")
    with pretended_gpu() as log:
        made = batches_of(folder, GPU, "cuda")
        assert (log.synchronisations, log.mixed_devices) == ([], [])
    assert sum(nvjpeg) == len(SIZES) - 2  # all but the PNG and the photograph that must be turned
    assert len(nvjpeg) == 2  # one call for each batch
    for here, there in zip(expected, made, strict=True):
        assert here.ids.tolist() == there.ids.held.tolist()
        for a, b in zip(here.views, there.views, strict=True):
            torch.testing.assert_close(a, b.held, rtol=0, atol=1 / 255 / 0.22)


def test_a_damaged_file_is_replaced_by_the_next_as_usual(folder, nvjpeg):
    (folder / "4.jpg").write_bytes((folder / "4.jpg").read_bytes()[:300])
    images = open_images(config_of(folder))
    with pretended_gpu():
        loader = ViewLoader(images, config_of(folder), 4, 0, GPU, decodes=True)
        ids = torch.cat([batch.ids.held for batch in loader.epoch(0)])
    assert sorted(ids.tolist()) == [0, 1, 2, 3, 5, 5, 6, 7]
    assert "4.jpg" in loader.unreadable[4]
    assert nvjpeg


def test_it_is_refused_without_a_gpu_in_a_sentence_and_is_another_run(folder, monkeypatch):
    with pytest.raises(InputError, match=r"decodes JPEGs on a GPU, but train.device=cpu is none"):
        open_loader(config_of(folder), TrainConfig(batch_size=4), torch.device("cpu"))
    monkeypatch.setattr(gpu_decoding, "_decode_jpeg", lambda: None)
    with pytest.raises(InputError, match=r"torchcodec is missing \(pip install 'hardmix\[jpeg\]'"):
        gpu_decoding.check_decoder(config_of(folder), GPU)
    with pytest.raises(InputError, match="decoder"):
        check_same_run(PretrainConfig(), PretrainConfig(data=DataConfig(decoder="cuda")))
