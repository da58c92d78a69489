import io
import sys
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from hardmix import InputError
from hardmix.data.shards import is_shards, open_shards
from hardmix.settings.config import DataConfig

needs_webdataset = pytest.mark.usefixtures("webdataset")


@pytest.fixture
def webdataset():
    return pytest.importorskip("webdataset", reason="webdataset is not installed: hardmix[shards]")


def png(value: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4, 4), (value, 0, 0)).save(file, "PNG")
    return file.getvalue()


def write_shard(path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


@pytest.fixture
def root(tmp_path) -> str:
    """Three shards of four images; the red of an image is its number, its class that modulo 3."""
    for shard in range(3):
        members = {}
        for key in range(4):
            number = 4 * shard + key
            members |= {f"{key:03}.png": png(number), f"{key:03}.cls": str(number % 3).encode()}
        write_shard(tmp_path / f"a-{shard:02}.tar", members)
    return str(tmp_path / "a-{00..02}.tar")


def config(root: str, **options) -> DataConfig:
    return DataConfig(**({"name": "shards", "root": root, "num_images": 12} | options))


def reds(stream) -> list[int]:
    return [int(image[0, 0, 0]) for image, _, _ in stream]


def test_what_names_shards(tmp_path):
    for root in ("a.tar", "a.tar.gz", "a-{000..099}.tar", "pipe:cat a", "s3://a/{1..2}"):
        assert is_shards(root), root
    for root in ("photos", "list.txt", "a{b}"):
        assert not is_shards(root), root
    (tmp_path / "my.target").mkdir()
    assert not is_shards(str(tmp_path / "my.target"))


@needs_webdataset
def test_every_image_once_with_its_label_and_an_id_of_its_own(root):
    samples = list(open_shards(config(root)))
    assert sorted(reds(samples)) == list(range(12))
    for image, label, number in samples:
        assert image.dtype == torch.uint8
        assert image.shape == (3, 4, 4)
        assert label == int(image[0, 0, 0]) % 3
        assert 0 <= number < 2**63
    assert len({number for _, _, number in samples}) == 12


@needs_webdataset
def test_the_order_depends_on_seed_and_epoch_alone_and_ids_on_neither(root):
    first, again = list(open_shards(config(root), 1, 2)), list(open_shards(config(root), 1, 2))
    assert reds(first) == reds(again)
    later = list(open_shards(config(root), 1, 3))
    assert reds(first) != reds(later)
    ids = [{int(image[0, 0, 0]): number for image, _, number in part} for part in (first, later)]
    assert ids[0] == ids[1]


@needs_webdataset
def test_images_without_labels_and_other_kinds_of_files(tmp_path):
    array = io.BytesIO()
    np.save(array, np.full((5, 4, 4), 9, dtype=np.uint8))
    write_shard(tmp_path / "b.tar", {"x.json": b"{}", "x.npy": array.getvalue()})
    ((image, label, _),) = open_shards(config(str(tmp_path / "b.tar"), channels=5))
    assert image.shape == (5, 4, 4)
    assert label == -1


@needs_webdataset
def test_a_command_can_give_the_shard(root):
    shard = root.replace("{00..02}", "01")
    assert sorted(reds(open_shards(config(f"pipe:cat {shard}")))) == [4, 5, 6, 7]


@needs_webdataset
def test_unreadable_images_are_left_out_up_to_a_share(tmp_path):
    members = {f"{n}.png": png(n) for n in range(9)} | {"9.png": b"", "10.txt": b"no image"}
    write_shard(tmp_path / "c.tar", members)
    shard, reported = str(tmp_path / "c.tar"), {}
    stream = open_shards(config(shard, max_unreadable=0.2), on_unreadable=reported.__setitem__)
    assert sorted(reds(stream)) == list(range(9))
    assert sorted(reported.values()) == [
        "c.tar/10: no image among its files (txt)",
        "c.tar/9.png: the file is empty (0 bytes)",
    ]
    assert len(list(open_shards(config(shard, max_unreadable=0.2)))) == 9
    with pytest.raises(InputError, match=r"2 unreadable images are more than data\.max_unreadable"):
        list(open_shards(config(shard, max_unreadable=0.1)))


@needs_webdataset
def test_damaged_and_missing_shards_are_named(tmp_path, root):
    with pytest.raises(InputError, match=r"the shard .*none\.tar cannot be read"):
        list(open_shards(config(str(tmp_path / "none.tar"))))
    (tmp_path / "text.tar").write_text("<html>")
    with pytest.raises(InputError, match=r"the shard .*text\.tar cannot be read"):
        list(open_shards(config(str(tmp_path / "text.tar"))))
    write_shard(tmp_path / "label.tar", {"a.png": png(1), "a.cls": b"dog"})
    with pytest.raises(InputError, match=r"label\.tar/a\.cls holds b'dog'"):
        list(open_shards(config(str(tmp_path / "label.tar"))))


@needs_webdataset
def test_the_number_of_images_must_be_given(root):
    with pytest.raises(InputError, match=r"data\.num_images is not set"):
        open_shards(config(root, num_images=None))


def test_without_the_package_the_extra_is_named(root, monkeypatch):
    monkeypatch.setitem(sys.modules, "webdataset", None)
    with pytest.raises(InputError, match=r"pip install 'hardmix\[shards\]'"):
        open_shards(config(root))
