"""Shards on a disk are images by number, and never silently other ones; names as arrays."""

import os
import pickle
import sys
import tarfile

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from hardmix import InputError
from hardmix.data import shards as archives
from hardmix.data.image_files import UnreadableImage
from hardmix.data.image_set import FileNames
from hardmix.data.loading import BLOCK, TOGETHER, ViewLoader, epoch_order, open_loader
from hardmix.data.shards import expand, index_file, is_indexed
from hardmix.data.sources import has_test, open_images
from hardmix.settings.config import DataConfig, TrainConfig
from shard_files import png, write_shard

CPU = torch.device("cpu")
NAMES = st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(archives, "_open", {})


def config(place, **options):
    return DataConfig(**({"root": place, "image_size": 8, "workers": 0} | options))


def reds(images):
    return [int(images.image(number)[0, 0, 0]) for number in range(len(images))]


# -- names


@given(NAMES, st.randoms())
def test_names_are_a_sequence(names, random):
    made = FileNames(names)
    assert (len(made), list(made), made == names) == (len(names), names, True)
    assert [made[k] for k in range(-len(names), len(names))] == names + names
    start, step = random.randint(-3, 5), random.choice([-2, -1, 1, 3])
    assert made[start::step] == names[start::step]
    chosen = [random.randrange(len(names)) for _ in range(5)] if names else []
    assert made.select(np.array(chosen, dtype=np.int64)) == [names[k] for k in chosen]
    assert pickle.loads(pickle.dumps(made)) == made
    assert made != [*names, "more"]


def test_names_may_hold_any_bytes():
    name = os.fsdecode(b"caf\xe9.jpg")
    assert FileNames([name])[0] == name
    with pytest.raises(IndexError):
        FileNames([name])[1]


# -- shards


def test_what_is_indexed_and_what_is_a_stream():
    assert expand("a-{08..11}.tar::{x,y}.tar") == [
        *(f"a-{number}.tar" for number in ("08", "09", "10", "11")),
        *("x.tar", "y.tar"),
    ]
    for name in ("a.tar", "a-{0..9}.tar"):
        assert is_indexed(name)
    for name in ("a.tar.gz", "pipe:cat a.tar", "https://x/a.tar", "s3://a/{1..2}.tar"):
        assert not is_indexed(name)


def test_shards_are_images_by_number(root, monkeypatch):
    monkeypatch.setitem(sys.modules, "webdataset", None)  # not needed
    images = open_images(config(root))
    assert reds(images) == list(range(12))
    assert images.labels.tolist() == [number % 3 for number in range(12)]
    assert images.classes == ("0", "1", "2")
    assert images.name_of(5).startswith("a-01.tar!001.png@1:")
    some = open_images(config(root, num_images=5), seed=3)
    assert len(set(reds(some))) == len(some) == 5


def test_the_index_is_made_once_and_anew_when_a_shard_changes(root, monkeypatch):
    made = []
    indexed = archives._indexed
    monkeypatch.setattr(archives, "_indexed", lambda shards: made.append(1) or indexed(shards))
    first = open_images(config(root))
    assert (reds(open_images(config(root))), len(made)) == (list(range(12)), 1)
    file = index_file(archives._states(expand(root)))
    for damage in (file.read_bytes()[:-40], b"", b"other"):
        file.write_bytes(damage)
        assert reds(open_images(config(root))) == list(range(12))
    assert len(made) == 4
    # Re-packed in place while training: named, never other images.
    shard = expand(root)[1]
    members = {f"{key:03}.png": png(200 + key) for key in range(4)}
    write_shard(shard, members)
    os.utime(shard, ns=(1, 1))
    with pytest.raises(UnreadableImage, match=r"a-01\.tar has changed since it was indexed"):
        first.image(4)
    assert int(first.image(0)[0, 0, 0]) == 0
    again = open_images(config(root))
    assert (reds(again), len(made)) == ([*range(4), *range(200, 204), *range(8, 12)], 5)
    assert again.labels.tolist()[4:8] == [-1] * 4


def test_an_index_with_any_bit_flipped_is_made_anew(root):
    shards = archives._states(expand(root))
    made = archives.make_index(shards)
    file = index_file(shards)
    good = file.read_bytes()
    assert list(archives.read_index(shards).names) == list(made.names)
    for place in range(0, len(good), 3):
        damaged = bytearray(good)
        damaged[place] ^= 1 << place % 8
        file.write_bytes(damaged)
        assert archives.read_index(shards) is None


def test_a_shard_that_changes_while_it_is_read_is_named(root, monkeypatch):
    images = open_images(config(root))
    pread = os.pread

    def overwritten(*arguments):
        write_shard(expand(root)[0], {f"{key:03}.png": png(99) for key in range(4)})
        return pread(*arguments)

    monkeypatch.setattr(os, "pread", overwritten)
    with pytest.raises(UnreadableImage, match=r"a-00\.tar has changed since it was indexed"):
        images.image(0)


def test_a_shard_that_is_replaced_is_still_read_as_it_was(root, tmp_path):
    images = open_images(config(root))
    assert int(images.image(0)[0, 0, 0]) == 0  # opens it
    write_shard(tmp_path / "new.tar", {f"{key:03}.png": png(99) for key in range(4)})
    (tmp_path / "new.tar").replace(expand(root)[0])
    assert int(images.image(1)[0, 0, 0]) == 1


def test_cut_damaged_and_missing_shards_are_named(root, tmp_path):
    shard = expand(root)[2]
    whole = open(shard, "rb").read()  # noqa: SIM115
    with tarfile.open(shard) as tar:
        last = tar.getmembers()[-2]
    open(shard, "wb").write(whole[: last.offset_data + 10])  # noqa: SIM115
    with pytest.raises(InputError, match=r"the shard .*a-02\.tar (is cut off|cannot be read)"):
        open_images(config(root))
    os.remove(shard)
    with pytest.raises(InputError, match=r"the shard .*a-02\.tar cannot be read: No such file"):
        open_images(config(root))
    (tmp_path / "text.tar").write_text("<html>")
    with pytest.raises(InputError, match=r"the shard .*text\.tar cannot be read"):
        open_images(config(str(tmp_path / "text.tar")))
    write_shard(tmp_path / "label.tar", {"a.png": png(1), "a.cls": b"dog"})
    with pytest.raises(InputError, match=r"label\.tar/a\.cls holds b'dog'"):
        open_images(config(str(tmp_path / "label.tar")))


def test_decoded_images_of_other_shards_are_not_used(root):
    data = config(root, cache="file")
    images = open_images(data).decode_once(epochs=True)
    assert reds(images) == list(range(12))
    shard = expand(root)[0]
    members = {}
    for key in range(4):
        members |= {f"{key:03}.png": png(100 + key), f"{key:03}.cls": b"0"}
    write_shard(shard, members)
    os.utime(shard, ns=(1, 1))
    again = open_images(data).decode_once(epochs=True)
    assert reds(again)[:4] == [100, 101, 102, 103]


def test_test_shards_have_the_classes_of_the_training_shards(root, tmp_path):
    write_shard(tmp_path / "val.tar", {"a.png": png(7), "a.cls": b"1"})
    write_shard(tmp_path / "val-2.tar", {"b.png": png(8), "b.cls": b"0"})
    data = config(root, test=str(tmp_path / "{val,val-2}.tar"))
    assert has_test(data)
    test = open_images(data, "test")
    assert (test.classes, test.labels.tolist()) == (("0", "1", "2"), [1, 0])
    assert not has_test(config(root))


def test_ranks_and_workers_read_their_rows_and_resume_anywhere(root):
    train = TrainConfig(batch_size=4, seed=5)
    whole = [batch.ids for batch in open_loader(config(root), train, CPU)[1].epoch(2)]
    with_workers = open_loader(config(root, workers=2), train, CPU)[1]
    for first in (0, 1):
        rest = list(with_workers.epoch(2, first))
        assert [batch.ids.tolist() for batch in rest] == [ids.tolist() for ids in whole[first:]]
    with_workers.close()
    images = open_images(config(root))
    ranks = [
        [batch.ids for batch in ViewLoader(images, config(root), 4, 5, CPU, rank, 2).epoch(2)]
        for rank in range(2)
    ]
    for step, ids in enumerate(whole):
        assert torch.cat([ranks[0][step], ranks[1][step]]).tolist() == ids.tolist()


# -- the order of an epoch


@given(st.integers(0, 5), st.integers(1, 5 * BLOCK))
def test_an_order_in_blocks_has_every_image_once(epoch, number):
    order = epoch_order(3, epoch, number, "blocks")
    assert order.sort().values.tolist() == list(range(number))
    assert order.tolist() == epoch_order(3, epoch, number, "blocks").tolist()


def test_in_blocks_few_places_of_the_disk_are_read_at_a_time():
    number = 50 * BLOCK
    order = epoch_order(0, 0, number, "blocks")
    for window in order.split(BLOCK * TOGETHER):
        assert len((window // BLOCK).unique()) <= TOGETHER
    assert not torch.equal(order, epoch_order(0, 1, number, "blocks"))
    within = (order[1:] - order[:-1]).abs()
    assert within.float().median() > BLOCK  # and yet neighbours do not meet in a batch
