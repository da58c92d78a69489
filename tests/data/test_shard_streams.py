import io
import sys
import tarfile
from dataclasses import replace

import numpy as np
import pytest
import torch

from hardmix import InputError
from hardmix.data import shard_streams
from hardmix.data.image_files import UnreadableImage, read_image
from hardmix.data.shard_streams import (
    ShardLoader,
    StreamLayout,
    archives_of,
    is_shards,
    number_of_lanes,
    open_lane,
)
from hardmix.data.shards import expand, open_shard_set
from hardmix.settings.config import DataConfig
from shard_files import png, write_shard

needs_webdataset = pytest.mark.usefixtures("webdataset")


@pytest.fixture
def webdataset():
    return pytest.importorskip("webdataset", reason="webdataset is not installed: hardmix[shards]")


def config(root: str, **options) -> DataConfig:
    return DataConfig(**({"name": "shards", "root": root, "num_images": 12} | options))


def reds(stream) -> list[int]:
    return [int(image[0, 0, 0]) for image, _, _ in stream]


def samples_of(data: DataConfig, seed=0, epoch=0, unreadable=None, lane=0, lanes=1) -> list:
    """Return one pass over a lane, without its unreadable images."""
    opened = open_lane(archives_of(data), data, seed, epoch, lane, lanes)
    samples, found = [], {} if unreadable is None else unreadable
    while opened.size is None:
        before = len(found)
        sample = opened.image(0, found, data.max_unreadable * data.num_images)
        if opened.size is None:  # the last look was into the next pass
            samples.append(sample)
        opened.skip(1 + len(found) - before)
    return samples


def loader_of(data: DataConfig, batch_size=4, **options) -> ShardLoader:
    return ShardLoader(data, batch_size, 0, torch.device("cpu"), **options)


def steps_of(loader: ShardLoader, epoch=0, first_step=0) -> list:
    batches = list(loader.epoch(epoch, first_step))
    loader.close()
    return batches


def assert_same(one, other) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert torch.equal(mine.ids, theirs.ids)
        assert torch.equal(mine.labels, theirs.labels)
        assert torch.equal(torch.stack(mine.views), torch.stack(theirs.views))


def test_what_names_shards(tmp_path):
    for root in ("a.tar", "a.tar.gz", "a-{000..099}.tar", "pipe:cat a", "s3://a/{1..2}"):
        assert is_shards(root), root
    for root in ("photos", "list.txt", "a{b}"):
        assert not is_shards(root), root
    (tmp_path / "my.target").mkdir()
    assert not is_shards(str(tmp_path / "my.target"))


@needs_webdataset
def test_every_image_once_with_its_label_and_an_id_of_its_own(root):
    samples = samples_of(config(root))
    assert sorted(reds(samples)) == list(range(12))
    for image, label, number in samples:
        assert image.dtype == torch.uint8
        assert image.shape == (3, 4, 4)
        assert label == int(image[0, 0, 0]) % 3
        assert 0 <= number < 2**63
    assert len({number for _, _, number in samples}) == 12


@needs_webdataset
def test_the_order_depends_on_seed_and_epoch_alone_and_ids_on_neither(root):
    first, again = samples_of(config(root), 1, 2), samples_of(config(root), 1, 2)
    assert reds(first) == reds(again)
    later = samples_of(config(root), 1, 3)
    assert reds(first) != reds(later)
    ids = [{int(image[0, 0, 0]): number for image, _, number in part} for part in (first, later)]
    assert ids[0] == ids[1]


@needs_webdataset
def test_images_without_labels_and_other_kinds_of_files(tmp_path):
    array = io.BytesIO()
    np.save(array, np.full((5, 4, 4), 9, dtype=np.uint8))
    write_shard(tmp_path / "b.tar", {"x.json": b"{}", "x.npy": array.getvalue()})
    ((image, label, _),) = samples_of(config(str(tmp_path / "b.tar"), channels=5))
    assert image.shape == (5, 4, 4)
    assert label == -1


@needs_webdataset
def test_a_command_can_give_the_shard(root):
    shard = root.replace("{00..02}", "01")
    assert sorted(reds(samples_of(config(f"pipe:cat {shard}")))) == [4, 5, 6, 7]


@needs_webdataset
def test_an_unreadable_image_is_replaced_by_the_next_up_to_a_share(tmp_path):
    members = {f"{n}.png": png(n) for n in range(9)} | {"9.png": b"", "10.txt": b"no image"}
    write_shard(tmp_path / "c.tar", members)
    root = f"pipe:cat {tmp_path / 'c.tar'}"
    options = {"num_images": 11, "image_size": 8, "workers": 0}
    loader = loader_of(config(root, max_unreadable=0.2, **options), batch_size=11)
    (batch,) = steps_of(loader)
    assert len(batch.ids) == 11
    assert len(batch.ids.unique()) == 9
    assert sorted(loader.unreadable.values()) == [
        "c.tar/10: no image among its files (txt)",
        "c.tar/9.png: the file is empty (0 bytes)",
    ]
    for workers in (0, 1):
        strict = config(root, max_unreadable=0.1, **options | {"workers": workers})
        with pytest.raises(InputError, match=r"2 unreadable images are more than data\.max_unr"):
            steps_of(loader_of(strict, batch_size=11))


@needs_webdataset
def test_damaged_and_missing_shards_are_named(tmp_path, root):
    with pytest.raises(InputError, match=r"the shard .*none\.tar cannot be read"):
        samples_of(config(str(tmp_path / "none.tar")))
    (tmp_path / "text.tar").write_text("<html>")
    with pytest.raises(InputError, match=r"the shard .*text\.tar cannot be read"):
        samples_of(config(str(tmp_path / "text.tar")))
    write_shard(tmp_path / "label.tar", {"a.png": png(1), "a.cls": b"dog"})
    with pytest.raises(InputError, match=r"label\.tar/a\.cls holds b'dog'"):
        samples_of(config(str(tmp_path / "label.tar")))


@needs_webdataset
def test_the_number_of_images_must_be_given(root):
    with pytest.raises(InputError, match=r"data\.num_images is not set"):
        archives_of(config(root, num_images=None))


def test_without_the_package_the_extra_is_named(root, monkeypatch):
    monkeypatch.setitem(sys.modules, "webdataset", None)
    with pytest.raises(InputError, match=r"pip install 'hardmix\[shards\]'"):
        archives_of(config(root))


@pytest.mark.parametrize(
    ("archives", "rows", "lanes"),
    [
        *((1, 256, 1), (10, 256, 2), (12, 128, 4), (64, 128, 32), (100, 256, 4)),
        *((1282, 256, 32), (1282, 100, 25), (8, 3, 1), (33, 32, 2), (7, 7, 7)),
    ],
)
def test_lanes_hold_about_as_many_archives(archives, rows, lanes):
    assert number_of_lanes(archives, rows) == lanes
    assert rows % lanes == 0


@pytest.mark.parametrize(("size", "lanes", "parts"), [(12, 4, 1), (12, 2, 3), (8, 4, 2), (6, 1, 2)])
def test_every_place_of_every_lane_is_one_row(size, lanes, parts):
    layout = StreamLayout([], lanes, size, parts)
    places = layout.places(range(size))
    assert sorted(places) == [
        (lane, at) for lane in range(lanes) for at in range(layout.lane_images)
    ]
    for number in range(1, lanes + 1):  # workers: lanes of their own, every row once
        shares = layout.shares(range(size), number)
        owned = [{lane for lane, _ in layout.places(share)} for share in shares]
        assert all(owned)
        assert sum(map(len, owned)) == lanes
        assert sorted(row for share in shares for row in share) == list(range(size))
    part = size // parts
    for start in range(0, size, part):  # what is encoded at once is a mixture of all lanes
        assert {lane for lane, _ in places[start : start + part]} == set(range(lanes))


@pytest.fixture
def stream(tmp_path) -> DataConfig:
    """Eight archives of six images behind a command that notes what it reads."""
    for shard in range(8):
        numbers = range(6 * shard, 6 * shard + 6)
        members = {}
        for number in numbers:
            members |= {f"{number}.png": png(number), f"{number}.cls": str(number % 3).encode()}
        write_shard(tmp_path / f"s-{shard}.tar", members)
    (tmp_path / "read.sh").write_text('echo "$1" >> "$(dirname "$0")/read.txt"; cat "$1"')
    root = f"pipe:sh {tmp_path}/read.sh {tmp_path}/s-{{0..7}}.tar"
    return config(root, num_images=48, image_size=8, workers=0)


@needs_webdataset
def test_a_stream_is_the_same_for_any_number_of_processes_and_workers_and_after_a_resume(stream):
    whole = steps_of(loader_of(stream, 16), epoch=1)
    assert len(torch.cat([batch.ids for batch in whole]).unique()) == 48
    assert_same(steps_of(loader_of(stream, 16), 1, first_step=2), whole[2:])
    parted = steps_of(loader_of(stream, 16, parts=2), epoch=1)
    assert_same(steps_of(loader_of(replace(stream, workers=2), 16, parts=2), 1), parted)
    for workers in (1, 3):
        with_workers = loader_of(replace(stream, workers=workers), 16)
        assert_same(with_workers.epoch(1), whole)
        assert_same(with_workers.epoch(1, 1), whole[1:])  # the same workers, elsewhere
        with_workers.close()
    for processes in (2, 16):  # as many as have lanes of their own, and more
        options = [{"rank": rank, "world_size": processes} for rank in range(processes)]
        parts = [steps_of(loader_of(stream, 16, **each), 1) for each in options]
        for batch, *own in zip(whole, *parts, strict=True):
            assert torch.equal(torch.cat([each.ids for each in own]), batch.ids)
            assert torch.equal(torch.cat([each.query for each in own]), batch.query)
    assert not torch.equal(steps_of(loader_of(stream, 16), epoch=2)[0].ids, whole[0].ids)


@needs_webdataset
def test_a_process_reads_and_decodes_only_its_share(stream, tmp_path, monkeypatch):
    decoded = []
    monkeypatch.setattr(
        shard_streams, "read_image", lambda *options: decoded.append(1) or read_image(*options)
    )
    for processes, archives, images in [(1, 8, 48), (2, 4, 24), (8, 1, 6), (16, 1, 3)]:
        decoded.clear()
        (tmp_path / "read.txt").unlink(missing_ok=True)
        steps_of(loader_of(stream, 16, world_size=processes))
        assert len((tmp_path / "read.txt").read_text().split()) == archives
        assert len(decoded) == images
    decoded.clear()
    steps_of(loader_of(stream, 16), first_step=2)
    assert len(decoded) == 16  # what a resumed run skips is read, not decoded


@needs_webdataset
def test_workers_are_at_most_the_lanes_and_the_limits_are_said(stream, capfd):
    loader = loader_of(replace(stream, workers=40), 16)
    assert loader.reading() == "8 workers: one for each lane of the stream"
    loader.prepare()
    steps_of(loader_of(stream, 16), first_step=1)
    said = " ".join(capfd.readouterr().out.split())
    assert "data.root is a stream: 8 archives in 8 lanes, 8 read by each process." in said
    assert "An epoch is not exact" in said
    assert "a resumed run reads again what it skips" in said
    assert "Reading 16 images of the stream again" in said


@needs_webdataset
def test_archives_of_unequal_size_repeat_images_with_a_warning(stream, tmp_path, capfd):
    write_shard(tmp_path / "s-3.tar", {f"x{n}.png": png(n) for n in range(3)})
    write_shard(tmp_path / "s-4.tar", {f"y{n}.png": png(n) for n in range(9)})
    batches = steps_of(loader_of(stream, 16))
    assert len(torch.cat([batch.ids for batch in batches]).unique()) == 45
    assert "after 3 images: it repeats some of them" in " ".join(capfd.readouterr().err.split())


@needs_webdataset
def test_too_few_images_are_noticed_by_all_processes_together_and_by_one(stream):
    more = replace(stream, num_images=64)
    with pytest.raises(InputError, match=r"num_images=64, but .* holds 48: correct"):
        steps_of(loader_of(more, 16))
    with pytest.raises(InputError, match=r"num_images=64, but .* holds about 48: correct"):
        steps_of(loader_of(more, 16, rank=1, world_size=2))


@needs_webdataset
def test_a_lane_of_nothing_but_damage_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_streams, "MOST_TRIED", 5)
    write_shard(tmp_path / "d.tar", {"a.png": b"", "b.png": b"x"})
    broken = config(str(tmp_path / "d.tar"), num_images=2, max_unreadable=1.0, workers=0)
    with pytest.raises(InputError, match="5 images one after another cannot be read"):
        steps_of(loader_of(broken, 2))
    write_shard(tmp_path / "e.tar", {})
    with pytest.raises(InputError, match=r"e\.tar hold no images"):
        steps_of(loader_of(replace(broken, root=str(tmp_path / "e.tar")), 2))


# -- archives from elsewhere: limits, each with a sentence


def sized_member(name: str, size: int) -> bytes:
    """Return a header that claims a size, without the bytes."""
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize(
    "root",
    [
        "a-{000000000..999999999}.tar",
        "a-{00000000000000000000..99999999999999999999}.tar",
        "{0..999}{0..999}{0..999}.tar",
        "{{0..99999},{0..99999}}{0..99}.tar",
        "{a,b}" * 40 + ".tar",
        "{" * 3000 + "a" + "}" * 3000 + ".tar",
        "{a..z}" * 9 + ".tar",
    ],
)
@pytest.mark.parametrize("start", ["", "https://example.org/"])
@needs_webdataset
def test_braces_that_name_a_billion_shards_are_refused(start, root):
    with pytest.raises(InputError, match=r"data\.root=.* more than 1,000,000 shards") as refused:
        archives_of(config(f"{start}{root}")) if start else expand(root)
    assert len(str(refused.value)) < 250


@pytest.mark.parametrize("text", [b"9" * 20, b"2000000000", b"1000000", b"-2", b"7" * 5000, b"x"])
@needs_webdataset
def test_a_label_that_no_class_can_have_is_refused_with_its_limit(text, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_shard(tmp_path / "a.tar", {"x.png": png(1), "x.cls": text})
    words = r"a\.tar/x\.cls holds b'.*: a label must be an integer from 0 to 999999\."
    with pytest.raises(InputError, match=words) as refused:
        samples_of(config(str(tmp_path / "a.tar")))
    assert len(str(refused.value)) < 250
    with pytest.raises(InputError, match=words):
        open_shard_set(str(tmp_path / "a.tar"), config(str(tmp_path / "a.tar")))


def pax(name: str, size: bytes) -> bytes:
    """Return a member whose size is in an extended header."""
    record = b"size=" + size + b"\n"
    record = b"%d %s" % (len(record) + 3, record)
    info = tarfile.TarInfo("pax")
    info.size, info.type = len(record), tarfile.XHDTYPE
    body = record + b"\0" * (-len(record) % 512)
    return info.tobuf(tarfile.USTAR_FORMAT) + body + sized_member(name, 0)


HUGE = {
    "size": lambda: sized_member("x.png", 2**60),
    "negative": lambda: sized_member("x.png", -512),
    "extended": lambda: pax("x.png", b"9999999999999"),
    "extended and negative": lambda: pax("x.png", b"-1024"),
}


@pytest.mark.parametrize("kind", HUGE)
@needs_webdataset
def test_a_false_size_is_refused_by_name(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a.tar").write_bytes(HUGE[kind]() + b"\0" * 10240)
    where = config(str(tmp_path / "a.tar"))
    with pytest.raises(
        InputError,
        match=r"the shard .*a\.tar (cannot be read: .* bytes|is cut off, or claims a false size)",
    ):
        open_shard_set(str(tmp_path / "a.tar"), where)
    with pytest.raises(InputError, match=r"the shard .*a\.tar cannot be read: .*x\.png claims"):
        samples_of(where)


@needs_webdataset
def test_a_header_of_a_gigabyte_is_not_read(tmp_path):
    info = tarfile.TarInfo("long")
    info.size, info.type = 2**30, tarfile.GNUTYPE_LONGNAME
    (tmp_path / "a.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + b"\0" * 10240)
    with pytest.raises(InputError, match=r"a header claims 1,073,741,824 bytes"):
        samples_of(config(str(tmp_path / "a.tar")))


@pytest.mark.parametrize("members", [{"x.png": 2**20}, {f"x.{k}.png": 2**19 for k in range(5)}])
@needs_webdataset
def test_a_compressed_archive_that_unpacks_to_too_much_is_refused(members, tmp_path, monkeypatch):
    """The limit is lowered from half a gigabyte to a megabyte."""
    monkeypatch.setattr(shard_streams, "MOST_BYTES", 2**20 - 1)
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        for name, size in members.items():
            info = tarfile.TarInfo(name)
            info.size = size
            tar.addfile(info, io.BytesIO(bytes(size)))
    assert (tmp_path / "a.tar.gz").stat().st_size < 2**16
    with pytest.raises(
        InputError, match=r"a\.tar\.gz cannot be read: its member x.*at most .* are"
    ):
        samples_of(config(str(tmp_path / "a.tar.gz")))


@needs_webdataset
def test_large_images_are_drawn_from_fewer(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_streams, "MOST_HELD", 1)
    write_shard(tmp_path / "a.tar", {f"{n}.png": png(n) for n in range(6)})
    assert reds(samples_of(config(str(tmp_path / "a.tar")))) == list(range(6))


def test_a_member_that_claims_much_is_named_when_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "a.tar"
    with file.open("wb") as out:  # sparse: it takes no room
        out.write(sized_member("x.png", 2**33))
        out.truncate(512 + 2**33 + 10240)
    images = open_shard_set(str(file), config(str(file)))
    with pytest.raises(UnreadableImage, match=r"a member of 8,589,934,592 bytes: at most"):
        images.image(0)
