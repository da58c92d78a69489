import os
import re

import pytest

from hardmix import InputError
from hardmix.data.imagenet100 import SYNSETS, link_imagenet100


@pytest.fixture
def imagenet(tmp_path):
    for split in ("train", "val"):
        for synset in (*SYNSETS, "n00000001"):
            (tmp_path / "imagenet" / split / synset).mkdir(parents=True)
    return tmp_path / "imagenet"


def test_there_are_100_classes_as_in_the_paper():
    assert len(set(SYNSETS)) == len(SYNSETS) == 100
    assert all(re.fullmatch(r"n\d{8}", synset) for synset in SYNSETS)
    assert (SYNSETS[0], SYNSETS[-1]) == ("n02869837", "n02090622")


def test_links_lead_to_the_class_folders(imagenet, tmp_path):
    (imagenet / "train" / SYNSETS[3] / "a.jpg").write_bytes(b"image")
    out = tmp_path / "out"
    assert link_imagenet100(imagenet, out) == {"train": 100, "val": 100}
    assert sorted(os.listdir(out / "val")) == sorted(SYNSETS)
    assert (out / "train" / SYNSETS[3] / "a.jpg").read_bytes() == b"image"
    out.rename(tmp_path / "moved")
    assert (tmp_path / "moved" / "train" / SYNSETS[3] / "a.jpg").exists()


def test_a_second_call_changes_nothing_and_a_broken_off_one_is_finished(imagenet, tmp_path):
    out = tmp_path / "out"
    link_imagenet100(imagenet, out)
    (out / "val" / SYNSETS[5]).unlink()
    before = {path: path.lstat().st_ino for path in out.glob("*/*")}
    assert link_imagenet100(imagenet, out) == {"train": 100, "val": 100}
    after = {path: path.lstat().st_ino for path in out.glob("*/*")}
    assert after.keys() - before.keys() == {out / "val" / SYNSETS[5]}
    assert all(after[path] == inode for path, inode in before.items())


def test_relative_paths(imagenet, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    link_imagenet100(imagenet.relative_to(tmp_path), (tmp_path / "out").relative_to(tmp_path))
    assert (tmp_path / "out" / "val" / SYNSETS[0]).is_dir()


def test_missing_classes_are_counted_and_named(imagenet, tmp_path):
    (imagenet / "val" / SYNSETS[7]).rmdir()
    (imagenet / "train" / SYNSETS[2]).rmdir()
    with pytest.raises(InputError, match=rf"lacks 2 of 200 .*train/{SYNSETS[2]}, val/{SYNSETS[7]}"):
        link_imagenet100(imagenet, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match="lacks 200 of 200"):
        link_imagenet100(tmp_path / "nowhere", tmp_path / "out")


def test_other_content_is_refused_and_left(imagenet, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"already contains 1 other .*notes\.txt"):
        link_imagenet100(imagenet, out)
    assert os.listdir(out) == ["notes.txt"]
    with pytest.raises(InputError, match="is a file"):
        link_imagenet100(imagenet, out / "notes.txt")


def test_links_to_elsewhere_are_refused(imagenet, tmp_path):
    out = tmp_path / "out"
    (out / "train").mkdir(parents=True)
    (out / "train" / SYNSETS[0]).symlink_to(imagenet / "val" / SYNSETS[0])
    with pytest.raises(InputError, match="already contains 1 other"):
        link_imagenet100(imagenet, out)
    with pytest.raises(InputError, match="already contains"):
        link_imagenet100(imagenet, imagenet)


def test_a_folder_that_cannot_be_written(imagenet, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="links cannot be made here"):
        link_imagenet100(imagenet, tmp_path / "file" / "out")
