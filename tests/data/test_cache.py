"""Decoded once: the same bits with and without, whatever happens to files and processes."""

import errno
import json
import multiprocessing
import os
import pickle
import resource
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from hardmix.commands import main as cli
from hardmix.data import cache
from hardmix.data.cache import Forecast, ImageCache, cache_folder, open_images_file
from hardmix.data.image_files import read_image
from hardmix.data.loading import ViewLoader, evaluation_batches
from hardmix.data.sources import open_images
from hardmix.runs.folder import Run
from hardmix.settings.config import DataConfig

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
COUNT = 24


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_held", {})


def make_folder(root: Path, sides=(20,)) -> Path:
    """PNGs of these sizes, some of them grey, whose channels are decoded one after another."""
    root.mkdir(parents=True)
    for number in range(COUNT):
        side = sides[number % len(sides)]
        pixels = torch.randint(256, (side, side + number % len(sides), 3), dtype=torch.uint8)
        image = Image.fromarray(pixels.numpy())
        (image.convert("L") if number % 5 == 4 else image).save(root / f"{number:02}.png")
    return root


@pytest.fixture(params=[(20,), (18, 31, 25)], ids=["one size", "many sizes"])
def folder(tmp_path, request):
    return make_folder(tmp_path / "images", request.param)


@pytest.fixture
def small(tmp_path):
    return make_folder(tmp_path / "images")


def config(root: Path, **options) -> DataConfig:
    return DataConfig(**{"root": str(root), "image_size": 16, "workers": 0, **options})


def epoch(options: DataConfig, batch_size: int = 8, **more):
    loader = ViewLoader(open_images(options), options, batch_size, 1, CPU, **more)
    try:
        return [(*b.views, b.labels, b.ids) for b in loader.epoch(1)], loader.unreadable
    finally:
        loader.close()


def assert_same(one, other):
    assert len(one) == len(other) > 0
    for batch, expected in zip(one, other, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(batch, expected, strict=True))


def forbid_decoding(monkeypatch):
    def fail(*_):
        raise AssertionError("an image was decoded again")

    monkeypatch.setattr(cache, "_decode", fail)


def cache_files() -> list[str]:
    return sorted(file.name for file in cache_folder().glob("*.pixels"))


# -- the same bits


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", ["memory", "file"])
def test_a_cache_changes_no_bit(folder, mode, workers):
    (folder / "07.png").write_bytes(b"<html>")
    without, unreadable = epoch(config(folder, cache="off"))
    kept, also = epoch(config(folder, cache=mode, workers=workers))
    assert_same(kept, without)
    assert also == unreadable
    assert list(unreadable) == [7]
    assert len(cache_files()) == (mode == "file")


@pytest.mark.parametrize("mode", ["memory", "file"])
def test_every_image_comes_back_with_its_pixels_and_their_layout(folder, mode):
    images = open_images(config(folder, cache=mode))
    images.decode_once()
    for index, file in enumerate(images.files):
        decoded, kept = read_image(file), images.cache.image(index)
        assert torch.equal(kept, decoded)
        assert kept.stride() == decoded.stride()


def test_evaluation_reads_the_same(folder):
    def pictures(mode):
        images = open_images(config(folder, cache=mode))
        return list(evaluation_batches(images, 16, 5, CPU)), images

    without, _ = pictures("off")
    kept, images = pictures("memory")
    assert images.cache.kept is not None
    assert_same(kept, without)


def test_channels_other_than_three(tmp_path):
    (tmp_path / "bands").mkdir()
    for number in range(4):
        pixels = np.random.default_rng(number).integers(256, size=(5, 9, 12), dtype=np.uint8)
        np.save(tmp_path / "bands" / f"{number}.npy", pixels)
    without, _ = epoch(config(tmp_path / "bands", cache="off", channels=5), 2)
    kept, _ = epoch(config(tmp_path / "bands", cache="file", channels=5), 2)
    assert_same(kept, without)


def test_selections_share_what_is_kept(folder):
    images = open_images(config(folder, cache="memory"))
    before = images.select(torch.tensor([5, 2, 9]))
    images.decode_once()
    after = images.subset(10, 0).select(torch.tensor([3, 1]))
    pixels = [read_image(file) for file in images.files]
    for file in images.files:
        Path(file).unlink()
    for some in (before, after):
        assert some.cache is images.cache
        for index, file in enumerate(some.files):
            assert torch.equal(some.image(index), pixels[images.files.index(file)])


def test_few_of_many_are_not_worth_decoding_all(folder):
    options = config(folder, cache="file")
    some = open_images(options).select(torch.arange(5))
    some.decode_once()
    assert some.cache.kept is None
    open_images(options).decode_once()
    some.decode_once()
    assert some.cache.kept is not None


def test_for_epochs_a_few_of_many_are_kept_alone(folder):
    options = config(folder, cache="memory")
    some = open_images(options).select(torch.tensor([9, 2, 11, 3]))
    loader = ViewLoader(some, options, 2, 1, CPU)
    kept = [(*b.views, b.ids) for b in loader.epoch(0)]
    assert len(loader.images.cache.kept) == 4
    assert some.cache.kept is None
    off = replace(some, cache=None)
    without = ViewLoader(off, options, 2, 1, CPU).epoch(0)
    assert_same(kept, [(*b.views, b.ids) for b in without])


# -- kept for others


def test_a_set_that_is_opened_again_is_not_decoded_again(small, monkeypatch):
    for mode in ("memory", "file"):
        first = open_images(config(small, cache=mode))
        first.decode_once()
        with monkeypatch.context() as patch:
            forbid_decoding(patch)
            again = open_images(config(small, cache="auto"))
            again.decode_once()
            assert torch.equal(again.cache.image(3), first.cache.image(3))
        cache._held.clear()


def test_a_changed_file_is_noticed(small):
    options = config(small, cache="file")
    open_images(options).decode_once()
    name = small / "03.png"
    picture = Image.new("RGB", (20, 20), (9, 8, 7))
    picture.save(name)
    images = open_images(options)
    images.decode_once()
    assert images.cache.image(3)[:, 0, 0].tolist() == [9, 8, 7]
    before = name.stat()
    Image.new("RGB", (20, 20), (7, 8, 9)).save(name)
    assert name.stat().st_size == before.st_size, "for this test to mean something"
    os.utime(name, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    images = open_images(options)
    images.decode_once()
    assert images.cache.image(3)[:, 0, 0].tolist() == [7, 8, 9]
    assert len(cache_files()) == 1, "the new one takes the place of the old"


def test_a_file_that_can_be_read_later_is_kept_later(small):
    good = (small / "03.png").read_bytes()
    (small / "03.png").write_bytes(b"")
    options = config(small, cache="file")
    for content in (b"", good):
        (small / "03.png").write_bytes(content)
        images = open_images(options)
        images.decode_once()
        assert (images.cache.image(3) is None) == (content == b"")


def test_other_settings_are_other_pixels(small):
    for options in ({}, {"channels": 1}, {"max_pixels": 20 * 20}):
        images = open_images(config(small, cache="file", **options))
        images.decode_once()
        assert images.cache.image(0).shape[0] == options.get("channels", 3)
    assert len(cache_files()) == 3


def test_worker_processes_that_are_not_forked_open_it_again(small):
    for mode in ("memory", "file"):
        images = open_images(config(small, cache=mode))
        images.decode_once()
        sent = pickle.dumps(images.cache.kept)
        assert len(sent) < 20 * 20 * 3 * COUNT / 4, "the pixels stay where they are"
        assert torch.equal(pickle.loads(sent).image(5), images.image(5))


def test_what_nobody_uses_is_deleted(small):
    open_images(config(small, cache="file", channels=1)).decode_once()
    (old,) = cache_folder().glob("*.pixels")
    left = cache_folder() / ".images-0.pixels.99.tmp"
    shapes = cache_folder() / "shapes-0.npy"
    for file in (left, shapes):
        file.write_bytes(b"half")
    for file, days in ((old, 31), (left, 0.1), (shapes, 99)):
        os.utime(file, (time.time() - days * 86400,) * 2)
    open_images(config(small, cache="file")).decode_once()
    assert not old.exists()
    assert not left.exists()
    assert shapes.exists()
    assert len(cache_files()) == 1


# -- where


@pytest.mark.parametrize(
    ("size", "seconds", "place"),
    [
        (0.1e9, 5.0, "memory"),  # 50,000 images of 32 pixels
        (0.4e9, 60.0, "file"),  # 2,500 photographs, reduced
        (3.0e9, 100.0, "file"),  # a million images of 32 pixels
        (1.0e9, 9.0, "memory"),
        (20e9, 80.0, None),  # 50,000 photographs as they are: decoded as fast as read
        (50e9, 5000.0, None),  # too large to be a surprise
    ],
)
def test_auto_does_what_pays(small, size, seconds, place):
    images = open_images(config(small))
    assert images.cache._place(Forecast(size, seconds)) == place


def test_processes_that_train_together_share_a_file(small, monkeypatch):
    monkeypatch.setattr(cache, "world_size", lambda: 2)
    images = open_images(config(small))
    images.decode_once()
    assert images.cache.kept is not None
    assert cache_files() == [], "so few may be held by each"
    monkeypatch.setattr(cache, "LITTLE", 1e3)
    cache._held.clear()
    images = open_images(config(small))
    images.decode_once()
    assert images.cache.kept is not None
    assert len(cache_files()) == 1


def test_too_much_for_the_memory_is_said_and_not_kept(small, capsys):
    images = open_images(config(small, cache="memory", cache_gb=1e-6))
    images.decode_once()
    assert images.cache.kept is None
    assert "exceed data.cache_gb=1e-06" in capsys.readouterr().err
    images.cache.limit, images.cache._looked = 1.5e4, False  # more than foreseen
    images.cache._forecast = lambda: Forecast(1e4, 1.0)
    images.decode_once()
    assert images.cache.kept is None
    assert "not cached: they exceed data.cache_gb" in capsys.readouterr().err
    assert images.image(0).shape == (3, 20, 20)


def test_the_limit_is_for_all_sets_together(small):
    whole = open_images(config(small, cache="memory"))
    whole.decode_once()
    size = whole.cache.kept.bytes
    other = open_images(config(small, cache="memory", num_images=20, cache_gb=1.2 * size / 1e9))
    other.decode_once()
    assert list(cache._held.values()) == [other.cache.kept]
    assert torch.equal(whole.image(1), read_image(whole.files[1]))


# -- what may go wrong


@pytest.mark.parametrize("when", ["open", "write", "fsync", "replace"])
def test_without_room_it_works_without_and_says_so(small, when, monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if when == "open":
            patch.setattr(Path, "mkdir", full)
        elif when == "write":
            patch.setattr(cache, "write_images", full)
        elif when == "fsync":
            patch.setattr(os, "fsync", full)
        else:
            patch.setattr(Path, "replace", full)
        kept, _ = epoch(config(small, cache="file"))
    without, _ = epoch(config(small, cache="off"))
    assert_same(kept, without)
    said = capsys.readouterr().err
    assert said.count("decoded images are not cached (No space left on device") == 1
    assert not list(cache_folder().glob("*.pixels"))
    assert not list(cache_folder().glob(".*.tmp"))


@pytest.mark.parametrize("mode", ["auto", "file"])
def test_a_cache_folder_that_cannot_be_looked_at_is_not_used(small, mode, monkeypatch):
    # A name that is too long fails as a folder without permissions does, for root as well.
    monkeypatch.setenv("XDG_CACHE_HOME", str(small / ("x" * 300)))
    kept, _ = epoch(config(small, cache=mode))
    without, _ = epoch(config(small, cache="off"))
    assert_same(kept, without)


def test_a_damaged_file_is_never_other_images(small):
    options = config(small, cache="file")
    images = open_images(options)
    images.decode_once()
    (file,) = cache_folder().glob("*.pixels")
    whole, mark = file.read_bytes(), images.cache.mark
    pixels = [read_image(name) for name in images.files]
    damages = [whole[:cut] for cut in range(0, len(whole), len(whole) // 60)]
    for place in [*range(0, len(whole), 997), *range(len(whole) - 700, len(whole), 13)]:
        damages.append(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
    for damaged in damages:
        file.write_bytes(damaged)
        kept = open_images_file(file, mark, 3)
        found = [] if kept is None else [kept.image(row) for row in range(COUNT)]
        assert kept is None or sum(image is None for image in found) == 1
        for image, expected in zip(found, pixels, strict=False):
            assert image is None or torch.equal(image, expected)
        if kept is not None:
            several = kept.images([0, 1, 2])
            assert several is None or torch.equal(several, torch.stack(pixels[:3]))


def test_a_file_cut_while_it_is_read_is_decoded_again(small):
    images = open_images(config(small, cache="file"))
    images.decode_once()
    (file,) = cache_folder().glob("*.pixels")
    os.truncate(file, 100)
    assert all(torch.equal(images.image(i), read_image(images.files[i])) for i in range(COUNT))
    assert images.together([0, 1]) is None


def forked(function, *arguments):
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    return process


def test_a_kill_while_it_is_written_leaves_nothing_false(small):
    reading, written = multiprocessing.Pipe(duplex=False)

    def decode():
        images = open_images(config(small, cache="file"))
        images.cache._forecast = lambda: Forecast(1e9, 1.0)  # parts of one image each

        def slow(file):
            written.send(file)
            time.sleep(0.02)
            return read_image(file)

        images.cache.read = slow
        images.decode_once()

    for number in (1, 6, 13):
        process = forked(decode)
        for _ in range(number):
            reading.recv()
        process.kill()
        process.join()
        while reading.poll():
            reading.recv()
    assert cache_files() == []
    assert len(list(cache_folder().glob(".*.tmp"))) == 1, "each has removed that of the one before"
    without, _ = epoch(config(small, cache="off"))
    kept, _ = epoch(config(small, cache="file"))
    assert_same(kept, without)
    assert not list(cache_folder().glob(".*.tmp"))
    assert len(cache_files()) == 1


def test_two_processes_decode_once(small, tmp_path):
    """Both want the file at once: one makes it, the other waits for it."""
    log = tmp_path / "decoded"

    def want():
        images = open_images(config(small, cache="file"))

        def logged(file):
            with log.open("a") as out:
                out.write("x\n")
            time.sleep(0.01)
            return read_image(file)

        images.cache.read = logged
        images.cache._forecast = lambda: Forecast(1e4, 0.1)
        images.decode_once()
        os._exit(0 if images.cache.kept is not None else 1)

    for process in [forked(want), forked(want)]:
        process.join()
        assert process.exitcode == 0
    assert len(log.read_text().split()) == COUNT


@pytest.mark.parametrize("mode", ["memory", "file"])
def test_a_signal_stops_the_decoding_and_reaches_who_listens(small, mode):
    images = open_images(config(small, cache=mode))
    images.cache._forecast = lambda: Forecast(1e9, 1.0)  # parts of one image each

    def interrupted(file):
        if file.endswith("11.png"):
            os.kill(os.getpid(), signal.SIGTERM)
        assert not file.endswith("14.png"), "it went on"
        return read_image(file)

    images.cache.read = interrupted
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        images.decode_once()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]
    assert images.cache.kept is None
    assert cache_files() == []


def test_images_of_ones_own_are_left_alone(small):
    images = replace(open_images(config(small)), cache=None)
    images.decode_once()
    assert images.together([0, 1]) is None
    assert isinstance(open_images(config(small)).cache, ImageCache)
    assert cache.cache_folder().name == "hardmix"


def test_a_disk_that_is_full_in_the_middle(small):
    """A real one: no file of this process may grow beyond 5 kB."""

    def run():
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
        kept, _ = epoch(config(small, cache="file"))
        without, _ = epoch(config(small, cache="off"))
        assert_same(kept, without)
        assert list(cache_folder().glob("*.pixels")) == []
        assert list(cache_folder().glob(".*.tmp")) == []
        os._exit(0)

    process = forked(run)
    process.join()
    assert process.exitcode == 0


def test_a_run_and_its_evaluation_have_the_same_bits(tmp_path, monkeypatch, capfd):
    for kind in ("cat", "dog"):
        make_folder(tmp_path / "images" / kind)
    options = "--data.name folder --train.batch-size 8 --train.queue-size 16 --train.epochs 2"
    options += " --mix.num-hardest 8 --mix.num-pairs 8 --mix.num-with-query 2 --data.workers 0"
    results = {}
    for mode in ("off", "file"):
        out = tmp_path / mode
        where = f"--data.root {tmp_path}/images --data.cache {mode} --out {out}"
        command(f"pretrain demo {options} {where}")
        if mode == "file":
            assert len(cache_files()) == 1
            forbid_decoding(monkeypatch)
        command(f"knn {out} --k 5")
        results[mode] = (load_file(out / "encoder.safetensors"), Run(out).results / "knn.json")
    weights, others = results["off"][0], results["file"][0]
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    first, second = (json.loads(result[1].read_text()) for result in results.values())
    assert first["top1"] == second["top1"]
    command(f"pretrain --out {tmp_path}/off --resume --train.epochs 3 --data.cache memory")


def command(words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words.split())
    assert ended.value.code == 0
