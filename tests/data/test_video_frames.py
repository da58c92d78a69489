"""A frame is what the video shows at its time, in whichever order frames are read."""

import random
import shutil
import struct

import av
import numpy as np
import pytest
import torch

from hardmix import InputError
from hardmix.data import image_files, video_frames
from hardmix.data.changed_data import describe_change, fingerprint, record_data, write_list
from hardmix.data.image_files import UnreadableImage, missing_reader
from hardmix.data.loading import ViewLoader
from hardmix.data.sources import open_images
from hardmix.data.video_frames import Frame, frame_names, frame_of, read_image_or_frame, source_of
from hardmix.settings.config import DataConfig

pytestmark = pytest.mark.slow

RATE, SECONDS = 10, 12
BITS = 7


def write_video(path, codec="libx264", seconds=SECONDS, **options):
    """Frame k shows the bits of k as black and white blocks: no codec takes one for another."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=RATE)
        stream.width, stream.height, stream.pix_fmt = 16 * BITS, 32, "yuv420p"
        stream.options = {name: str(value) for name, value in options.items()}
        for number in range(RATE * seconds):
            bits = [255 * (number >> bit & 1) for bit in range(BITS)]
            pixels = np.repeat(np.repeat([bits], 32, axis=0), 16, axis=1).astype(np.uint8)
            frame = av.VideoFrame.from_ndarray(np.stack([pixels] * 3, axis=2), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def number_in(image: torch.Tensor) -> int:
    """Return the number that a frame shows."""
    blocks = image.float().mean(dim=0)[8:24].unflatten(1, (BITS, 16))[:, :, 4:12].mean(dim=(0, 2))
    return sum(1 << bit for bit, value in enumerate(blocks.tolist()) if value > 128)


KINDS = {
    "h264.mp4": {"codec": "libx264", "g": 25, "bf": 3},
    "open.mov": {"codec": "libx264", "g": 40, "bf": 3, "x264-params": "open-gop=1"},
    "mpeg4.avi": {"codec": "mpeg4", "g": 12},
    "mjpeg.mkv": {"codec": "mjpeg", "color_range": 2},
}


@pytest.mark.parametrize("name", KINDS)
def test_frames_are_those_of_their_times_in_any_order(tmp_path, name):
    options = dict(KINDS[name])
    if options["codec"] == "mjpeg":
        options["strict"] = "unofficial"
    file = write_video(tmp_path / name, **options)
    names = frame_names(str(file), 1.0)
    assert names == [f"{file}@{second}.0s" for second in range(SECONDS)]
    expected = [RATE * second for second in range(SECONDS)]
    assert [number_in(read_image_or_frame(name)) for name in names] == expected
    once = [read_image_or_frame(name) for name in names]
    order = list(range(SECONDS))
    random.Random(0).shuffle(order)
    for row in [*order, *reversed(range(SECONDS))]:
        video_frames._open.clear()  # as another process would
        assert torch.equal(read_image_or_frame(names[row]), once[row])
    for row in order:
        assert torch.equal(read_image_or_frame(names[row]), once[row])


def test_names_mean_times(tmp_path):
    assert frame_of("a/b.MP4@12.5s") == Frame("a/b.MP4", 12.5)
    for other in ("a.png", "b.mp4", "a@2x.pngs", "b.mp4@s", "b.mp4@1s", "b.txt@1.0s"):
        assert frame_of(other) is None
        assert source_of(other) == other
    file = write_video(tmp_path / "clip.mp4", seconds=2)
    names = frame_names(str(file), 3.0)
    assert [name.rpartition("@")[2] for name in names] == [
        *("0.0s", "0.333s", "0.667s", "1.0s", "1.333s", "1.667s")
    ]
    assert [number_in(read_image_or_frame(name)) for name in names] == [0, 3, 6, 10, 13, 16]
    assert len(frame_names(str(file), 0.1)) == 1
    assert len(frame_names(str(file), 100.0)) == 200


def test_a_turned_phone(tmp_path):
    """A phone held upright writes a matrix for the player into the track's header."""
    file = write_video(tmp_path / "clip.mp4", seconds=1)
    level = read_image_or_frame(f"{file}@0.0s")
    data = bytearray(file.read_bytes())
    place = data.index(b"tkhd") + 44
    assert struct.unpack_from(">9i", data, place)[:5] == (1 << 16, 0, 0, 0, 1 << 16)
    struct.pack_into(">9i", data, place, 0, 1 << 16, 0, -1 << 16, 0, 0, 32 << 16, 0, 1 << 30)
    turned = tmp_path / "turned.mp4"
    turned.write_bytes(data)
    assert torch.equal(read_image_or_frame(f"{turned}@0.0s"), torch.rot90(level, -1, (1, 2)))


def test_a_folder_with_videos(tmp_path):
    for kind, name in (("cat", "b.mp4"), ("dog", "a.mp4")):
        (tmp_path / kind).mkdir()
        write_video(tmp_path / kind / name, seconds=3 if kind == "cat" else 11)
    images = open_images(DataConfig(root=str(tmp_path), image_size=16, workers=0))
    assert images.classes == ("cat", "dog")
    assert images.labels is not None
    assert images.labels.tolist() == [0] * 3 + [1] * 11
    assert images.name_of(13) == f"{tmp_path}/dog/a.mp4@10.0s", "in the order of time"
    assert number_in(images.image(13)) == 100
    more = open_images(DataConfig(root=str(tmp_path), image_size=16, frames_per_second=2.0))
    assert len(more) == 28
    mark = fingerprint(images)
    write_list(tmp_path / "images.txt.gz", record_data(images, DataConfig()))
    shutil.copy(tmp_path / "cat" / "b.mp4", tmp_path / "dog" / "a.mp4")
    assert fingerprint(images) != mark
    assert "11 changed in size" in describe_change(
        tmp_path / "images.txt.gz", record_data(images, DataConfig())
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_frames_with_and_without_a_cache(tmp_path, workers, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_video(tmp_path / "a.mp4", seconds=9)
    batches = {}
    for mode in ("off", "file"):
        config = DataConfig(root=str(tmp_path), image_size=16, workers=workers, cache=mode)
        loader = ViewLoader(open_images(config), config, 4, 0, torch.device("cpu"))
        batches[mode] = list(loader.epoch(0))
        loader.close()
    for one, other in zip(batches["off"], batches["file"], strict=True):
        assert torch.equal(one.ids, other.ids)
        assert all(torch.equal(a, b) for a, b in zip(one.views, other.views, strict=True))


def test_videos_that_cannot_be_read_are_named(tmp_path):
    write_video(tmp_path / "a.mp4", seconds=4)
    whole = (tmp_path / "a.mp4").read_bytes()
    (tmp_path / "b.mp4").write_bytes(b"no video")
    (tmp_path / "c.mp4").write_bytes(b"")
    images = open_images(DataConfig(root=str(tmp_path), image_size=16))
    assert [name.rpartition("/")[2] for name in images.files][4:] == ["b.mp4@0.0s", "c.mp4@0.0s"]
    for index in (4, 5):
        with pytest.raises(UnreadableImage, match=r"[bc]\.mp4@0\.0s: \w+"):
            images.image(index)
    with pytest.raises(UnreadableImage, match=r"112 x 32 pixels are more than data\.max_pixels"):
        read_image_or_frame(f"{tmp_path}/a.mp4@1.0s", max_pixels=100)
    for cut in range(0, len(whole), len(whole) // 20):
        (tmp_path / "d.mp4").write_bytes(whole[:cut])
        for name in frame_names(str(tmp_path / "d.mp4"), 1.0):
            try:
                image = read_image_or_frame(name)
            except UnreadableImage as error:
                image, message = None, str(error)
            assert "d.mp4@" in message if image is None else image.shape == (3, 32, 112)


@pytest.fixture
def without_av(monkeypatch):
    missing_reader.cache_clear()
    for module in (image_files, video_frames):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    yield
    monkeypatch.undo()
    missing_reader.cache_clear()


def test_without_the_extra_videos_are_counted(tmp_path, without_av, capsys):
    for name in ("a.mp4", "b.MP4", "c.mov"):
        (tmp_path / name).write_bytes(b"video")
    with pytest.raises(InputError, match=r"holds 2 \.mp4 files: pip install 'hardmix\[video\]' to"):
        open_images(DataConfig(root=str(tmp_path), image_size=16))
    for name in ("1.npy", "2.npy"):
        np.save(tmp_path / name, np.zeros((8, 8), dtype=np.uint8))
    assert len(open_images(DataConfig(root=str(tmp_path), image_size=16))) == 2
    said = capsys.readouterr().err
    assert "ignored: 2 .mp4 files (pip install 'hardmix[video]')\n" in said
    assert "ignored: 1 .mov file (pip install 'hardmix[video]')\n" in said
    with pytest.raises(UnreadableImage, match=r"a video: pip install 'hardmix\[video\]'"):
        read_image_or_frame(f"{tmp_path}/a.mp4@0.0s")


def test_frames_without_end_are_refused(tmp_path, monkeypatch):
    with pytest.raises(
        InputError, match=r"data\.frames_per_second=1000000000\.0 .*between 0 and 1000"
    ):
        DataConfig(frames_per_second=1e9)
    monkeypatch.setattr(video_frames, "_duration", lambda *_: 1e12)
    (tmp_path / "clip.mp4").write_bytes(b"")
    with pytest.raises(InputError, match=r"clip\.mp4 claims to last 1000000000000 s.*10,000,000"):
        frame_names(str(tmp_path / "clip.mp4"), 1.0)
