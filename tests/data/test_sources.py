import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from PIL import Image

from hardmix import InputError
from hardmix.data import folders
from hardmix.data.changed_data import fingerprint
from hardmix.data.image_files import UnreadableImage
from hardmix.data.image_set import ImageSet
from hardmix.data.imagenet100 import SYNSETS
from hardmix.data.shapes import CLASSES
from hardmix.data.sources import SOURCES, data_name, has_test, open_images
from hardmix.settings.config import DataConfig
from hardmix.settings.named_choices import DataName
from places import SHARED


@pytest.fixture(autouse=True)
def _cache_of_our_own(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def picture(path: Path, value: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (6, 4), (value, 0, 0)).save(path)
    return path


def pictures(root: Path, *names: str) -> Path:
    for value, name in enumerate(names):
        picture(root / name, value)
    return root


def at(root: Path, **options) -> DataConfig:
    return DataConfig(root=str(root), **options)


def names(images: ImageSet, root: Path) -> list[str]:
    assert images.files is not None
    return [os.path.relpath(file, root) for file in images.files]


# -- folders: what is found


def test_a_folder_of_class_folders(tmp_path):
    root = pictures(tmp_path, "dog/b.png", "cat/a.png", "dog/deep/er/a.JPG", "cat/B.jpeg")
    images = open_images(at(root))
    assert names(images, root) == ["cat/B.jpeg", "cat/a.png", "dog/b.png", "dog/deep/er/a.JPG"]
    assert images.labels is not None
    assert images.labels.tolist() == [0, 0, 1, 1]
    assert images.classes == ("cat", "dog")
    assert len(images) == 4
    assert images.image(2)[:, 0, 0].tolist() == [0, 0, 0]
    assert images.image(1).shape == (3, 4, 6)
    assert images.name_of(1) == str(root / "cat/a.png")
    assert images.tensor is None


@pytest.mark.parametrize(
    "files",
    [
        ("a.png", "b.png"),
        ("cat/a.png", "dog/b.png", "c.png"),
        ("photos/a.png", "photos/b.png"),
        ("photos/cat/a.png", "photos/dog/b.png"),
        ("train/a.png", "train/b.png", "test/c.png", "test/d.png"),
    ],
)
def test_images_without_a_level_of_classes_have_no_labels(tmp_path, files):
    images = open_images(at(pictures(tmp_path, *files)))
    assert images.labels is None
    assert images.classes is None
    with pytest.raises(InputError, match="has no labels"):
        images.labelled()


def test_hidden_and_other_files_are_left_out(tmp_path):
    root = pictures(tmp_path, "cat/a.png", "dog/b.png", ".git/x.png", "cat/._a.png")
    (root / "cat" / "notes.txt").write_text("no image")
    (root / "readme").write_text("no image")
    assert names(open_images(at(root)), root) == ["cat/a.png", "dog/b.png"]


def test_ignored_files_are_counted_one_kind_on_a_line(tmp_path, capsys, monkeypatch):
    root = pictures(tmp_path, "cat/a.png", "dog/b.png")
    kinds = {".heic": 3, ".txt": 2, ".xml": 5, "": 1, ".a": 1, ".b": 1, ".c": 1, ".d": 2}
    for kind, number in kinds.items():
        for each in range(number):
            (root / "cat" / f"file{each}{kind.upper()}").write_text("no image")
    missing = {".heic": "pip install 'hardmix[heif]'"}
    monkeypatch.setattr(folders, "missing_reader", missing.get)
    for _ in range(2):
        assert len(open_images(at(root))) == 2
    said = capsys.readouterr()
    assert said.err == "warning: ignored: 3 .heic files (pip install 'hardmix[heif]')\n"
    assert said.out.split("\n") == [
        "ignored: 5 .xml files",
        "ignored: 2 .txt files",
        "ignored: 2 .d files",
        *sorted(said.out.split("\n")[3:5]),
        "ignored: 2 files of 2 other kinds",
        "",
    ]


def test_images_that_need_more_are_not_an_empty_folder(tmp_path, monkeypatch):
    (tmp_path / "a.heic").write_text("an image")
    monkeypatch.setattr(folders, "missing_reader", lambda _: "pip install 'hardmix[heif]'")
    with pytest.raises(InputError, match=r"holds 1 \.heic file: pip install 'hardmix\[heif\]' to"):
        open_images(at(tmp_path))


def test_reduced_images_are_another_set_of_pixels(tmp_path):
    for name in "ab":
        Image.new("RGB", (100, 60), (9, 8, 7)).save(tmp_path / f"{name}.png")
    small = open_images(at(tmp_path, reduce=True, image_size=16))
    whole = open_images(at(tmp_path, image_size=16))
    assert small.image(0).shape == (3, 32, 53)
    assert whole.image(0).shape == (3, 60, 100)
    assert small.cache is not None
    assert whole.cache is not None
    assert small.cache.file != whole.cache.file
    for images, shape in ((small, (3, 32, 53)), (whole, (3, 60, 100))):
        images.decode_once()
        assert images.image(1).shape == shape


def test_links_are_followed_and_loops_are_not(tmp_path):
    root = pictures(tmp_path / "data", "cat/a.png", "dog/b.png")
    elsewhere = pictures(tmp_path / "elsewhere", "c.png", "d.png")
    (root / "emu").symlink_to(elsewhere)
    (root / "cat" / "loop").symlink_to(root)
    (root / "cat" / "other").symlink_to(root / "dog")
    (root / "cat" / "self").symlink_to(root / "cat" / "self")
    (root / "dog" / "one.png").symlink_to(elsewhere / "c.png")
    images = open_images(at(root))
    assert names(images, root) == [
        "cat/a.png",
        "dog/b.png",
        "dog/one.png",
        "emu/c.png",
        "emu/d.png",
    ]
    assert images.classes == ("cat", "dog", "emu")


def test_a_link_to_nowhere_is_listed_and_unreadable(tmp_path):
    root = pictures(tmp_path, "a.png", "b.png")
    (root / "c.png").symlink_to(root / "none.png")
    images = open_images(at(root))
    assert len(images) == 3
    with pytest.raises(UnreadableImage, match="No such file"):
        images.image(2)


def test_a_pipe_is_no_image(tmp_path):
    root = pictures(tmp_path, "a.png", "b.png")
    os.mkfifo(root / "c.png")
    assert len(open_images(at(root))) == 2


def test_names_that_are_no_utf8(tmp_path):
    root = pictures(tmp_path, "caf/a.png", "dog/b.png")
    try:
        os.rename(os.fsencode(root / "caf"), os.fsencode(root) + b"/caf\xe9")
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    images = open_images(at(root))
    assert images.classes == ("caf\\udce9", "dog")
    assert images.image(0).shape == (3, 4, 6)
    images.name_of(0).encode()
    assert len(fingerprint(images)) == 16


# -- folders: splits


def test_train_and_test_share_their_numbering_of_classes(tmp_path):
    files = ["train/ant/a.png", "train/bee/b.png", "train/cat/c.png", "val/cat/d.png"]
    root = pictures(tmp_path, *files, "val/bee/e.png")
    assert has_test(at(root))
    train, test = open_images(at(root)), open_images(at(root), "test")
    assert names(train, root) == files[:3]
    assert train.classes == test.classes == ("ant", "bee", "cat")
    assert test.labels is not None
    assert test.labels.tolist() == [1, 2]


def test_numbers_as_classes_mean_the_same_in_both_splits(tmp_path):
    """Classes are numbered in the order of their names, as by torchvision's ImageFolder."""
    root = pictures(
        tmp_path, *(f"{split}/{n}/a.png" for split in ("train", "test") for n in (9, 10))
    )
    train, test = open_images(at(root)), open_images(at(root), "test")
    assert train.classes == test.classes == ("10", "9")
    assert train.labels is not None
    assert test.labels is not None
    assert train.labels.tolist() == test.labels.tolist() == [0, 1]


def test_test_goes_before_validation(tmp_path):
    root = pictures(
        tmp_path, *(f"{s}/{n}.png" for s in ("train", "validation", "test") for n in "ab")
    )
    assert names(open_images(at(root), "test"), root) == ["test/a.png", "test/b.png"]


def test_a_class_that_only_tests_have_is_refused(tmp_path):
    root = pictures(tmp_path, "train/a/1.png", "train/b/1.png", "test/a/1.png", "test/zoo/1.png")
    with pytest.raises(InputError, match=r"1 classes among its test images .*\(zoo\)"):
        open_images(at(root), "test")


def test_train_may_be_a_class_among_others(tmp_path):
    root = pictures(tmp_path, "train/a.png", "boat/b.png", "car/c.png")
    assert open_images(at(root)).classes == ("boat", "car", "train")
    assert not has_test(at(root))


def test_train_alone_is_the_training_split(tmp_path):
    root = pictures(tmp_path, "train/a/1.png", "train/b/1.png")
    assert open_images(at(root)).classes == ("a", "b")
    assert not has_test(at(root))


def test_without_a_test_split_asking_for_one_is_an_error(tmp_path):
    root = pictures(tmp_path, "cat/a.png", "dog/b.png")
    assert not has_test(at(root))
    with pytest.raises(InputError, match=r"has no test images: put them into .*/test"):
        open_images(at(root), "test")


# -- folders: what is refused


def test_bad_folders_each_in_one_sentence(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.doc").write_text("no image")
    pictures(tmp_path / "one", "a.png")
    pictures(tmp_path / "hole", "cat/a.png", "dog/b.png")
    (tmp_path / "hole" / "emu").mkdir()
    for root, message in {
        "none": "does not exist",
        "empty": "is an empty folder",
        "text": "contains no images: none of its files ends in",
        "one": "has 1 image: contrastive learning needs 2",
        "hole": r"1 of 3 class folders hold no image of their own \(emu\)",
    }.items():
        with pytest.raises(InputError, match=message) as caught:
            open_images(at(tmp_path / root))
        assert root in str(caught.value)


def test_a_folder_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    root = pictures(tmp_path, "cat/a.png", "dog/b.png")
    scandir = os.scandir

    def guarded(path):
        if str(path).endswith("dog"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    with pytest.raises(InputError, match=r"dog cannot be read \(Permission denied\)"):
        open_images(at(root))


def test_some_of_the_first_files_must_be_readable(tmp_path):
    for number in range(25):
        (tmp_path / f"{number:02}.png").write_bytes(b"<html>")
    with pytest.raises(InputError, match=r"no readable image among its first 20: .*00\.png"):
        open_images(at(tmp_path))
    picture(tmp_path / "19.png")
    images = open_images(at(tmp_path))
    assert len(images) == 25
    with pytest.raises(UnreadableImage, match=r"00\.png"):
        images.image(0)


def test_a_wrong_number_of_channels_is_found_at_opening(tmp_path):
    with pytest.raises(InputError, match=r"data\.channels=5"):
        open_images(at(pictures(tmp_path, "a.png", "b.png"), channels=5))


def test_channels_and_max_pixels_are_passed_on(tmp_path):
    for name in "ab":
        np.save(tmp_path / f"{name}.npy", np.zeros((5, 8, 8), dtype=np.uint8))
    assert open_images(at(tmp_path, channels=5)).image(0).shape == (5, 8, 8)
    with pytest.raises(InputError, match=r"8 x 8 pixels are more than data\.max_pixels=63"):
        open_images(at(tmp_path, channels=5, max_pixels=63))


# -- lists


def test_a_list_of_paths_with_labels(tmp_path):
    pictures(tmp_path / "data", "a.png", "b.png", "c.png", "d d.png")
    (tmp_path / "data" / "list.txt").write_bytes(
        b"\xef\xbb\xbfa.png\t10\r\nb.png\t9\n\n  \nc.png\n" + f"{tmp_path}/data/d d.png\t9".encode()
    )
    config = at(tmp_path / "data" / "list.txt")
    images = open_images(config)
    assert names(images, tmp_path / "data") == ["a.png", "b.png", "c.png", "d d.png"]
    assert images.classes == ("9", "10")
    assert images.labels is not None
    assert images.labels.tolist() == [1, 0, -1, 0]
    assert names(images.labelled(), tmp_path / "data") == ["a.png", "b.png", "d d.png"]
    assert images.image(3).shape == (3, 4, 6)
    assert not has_test(config)
    with pytest.raises(InputError, match="without a test split"):
        open_images(config, "test")


def test_a_list_without_labels(tmp_path):
    pictures(tmp_path, "a.png", "b.png")
    (tmp_path / "list.txt").write_text("a.png\nb.png\n")
    assert open_images(at(tmp_path / "list.txt")).labels is None


def test_a_list_with_splits(tmp_path):
    pictures(tmp_path, *(f"{name}.png" for name in "abcdef"))
    (tmp_path / "list.txt").write_text(
        "a.png\t10\ttrain\nb.png\t9\nc.png\t10\ttest\nd.png\t\tTest\ne.png\t9\tval\nf.png\n"
    )
    config = at(tmp_path / "list.txt")
    assert has_test(config)
    train, test = open_images(config), open_images(config, "test")
    assert names(train, tmp_path) == ["a.png", "b.png", "f.png"]
    assert names(test, tmp_path) == ["c.png", "d.png"], "test goes before validation"
    assert train.classes == test.classes == ("9", "10")
    assert train.labels is not None
    assert test.labels is not None
    assert train.labels.tolist() == [1, 0, -1]
    assert test.labels.tolist() == [1, -1]


@pytest.mark.parametrize("line", ["a.png\tcat\ttesting", "a.png\tcat\ttest\tmore"])
def test_a_line_that_is_none_is_named(tmp_path, line):
    (tmp_path / "list.txt").write_text(f"a.png\n{line}\n")
    with pytest.raises(InputError, match=r"list\.txt, line 2: 'a\.png.* is not a path, a class"):
        open_images(at(tmp_path / "list.txt"))


@pytest.mark.parametrize("kind", ["list", "folder"])
@pytest.mark.parametrize("test_kind", ["list", "list with splits", "folder"])
def test_test_images_from_elsewhere(tmp_path, kind, test_kind):
    root = pictures(tmp_path / "data", "cat/a.png", "dog/b.png", "emu/c.png")
    (root / "list.txt").write_text("cat/a.png\tcat\ndog/b.png\tdog\nemu/c.png\temu\n")
    other = pictures(tmp_path / "other", "dog/x.png", "emu/y.png")
    column = "\ttest\nz.png\tcat\ttrain" if test_kind == "list with splits" else ""
    (tmp_path / "other.txt").write_text(
        f"other/dog/x.png\tdog{column[:5]}\nother/emu/y.png\temu{column}"
    )
    test = other if test_kind == "folder" else tmp_path / "other.txt"
    config = at(root / "list.txt" if kind == "list" else root, test=str(test))
    assert has_test(config)
    train, tests = open_images(config), open_images(config, "test")
    assert names(tests, other) == ["dog/x.png", "emu/y.png"]
    assert train.classes == tests.classes == ("cat", "dog", "emu")
    assert tests.labels is not None
    assert tests.labels.tolist() == [1, 2]
    assert len(train) == 3


def test_bad_test_images(tmp_path):
    root = pictures(tmp_path / "data", "cat/a.png", "dog/b.png")
    with pytest.raises(InputError, match=r"data\.test=/none does not exist"):
        open_images(at(root, test="/none"), "test")
    other = pictures(tmp_path / "other", "cat/a.png", "yak/b.png")
    with pytest.raises(InputError, match=r"other has 1 classes among its test images .*\(yak\)"):
        open_images(at(root, test=str(other)), "test")
    with pytest.raises(InputError, match=r"data\.test=.* with data\.name=shapes"):
        open_images(DataConfig(name="shapes", image_size=32, test=str(other)), "test")


@pytest.mark.parametrize("name", ["a.png", "a.mp4", "a"])
def test_one_image_is_not_a_list(tmp_path, name):
    (tmp_path / name).write_bytes(b"\x89PNG\r\n\x00\xff")
    with pytest.raises(InputError, match="is not a list of images but one binary file") as caught:
        open_images(at(tmp_path / name))
    assert "udc" not in str(caught.value)


def test_bad_lists(tmp_path):
    (tmp_path / "blank.txt").write_text("\n\n")
    with pytest.raises(InputError, match=r"blank\.txt names no images"):
        open_images(at(tmp_path / "blank.txt"))
    (tmp_path / "gone.txt").write_text("x.png\ny.png\n")
    with pytest.raises(InputError, match=r"no readable image .*x\.png: No such file"):
        open_images(at(tmp_path / "gone.txt"))
    with pytest.raises(InputError, match="Is a directory"):
        open_images(at(tmp_path, name="list"))


# -- ImageNet


def imagenet(root: Path, classes, splits=("train", "val")) -> Path:
    return pictures(root, *(f"{split}/{c}/1.png" for split in splits for c in classes))


def test_imagenet_keeps_all_classes_and_imagenet100_the_papers(tmp_path):
    root = imagenet(tmp_path, [*SYNSETS, "n00000001"])
    assert data_name(at(root)) == "imagenet"
    everything = open_images(at(root))
    assert (everything.name, len(everything)) == ("imagenet", 101)
    for split in ("train", "test"):
        hundred = open_images(at(root, name="imagenet100"), split)
        assert (hundred.name, len(hundred)) == ("imagenet100", 100)
        assert hundred.classes == tuple(sorted(SYNSETS))
        assert hundred.labels is not None
        assert hundred.labels.tolist() == list(range(100))
    assert has_test(at(root, name="imagenet100"))


def test_imagenet100_is_recognised_by_its_classes(tmp_path):
    root = imagenet(tmp_path, SYNSETS, splits=["train"])
    assert data_name(at(root)) == "imagenet100"
    assert not has_test(at(root))
    with pytest.raises(InputError, match="val does not exist"):
        open_images(at(root), "test")


def test_what_imagenet_lacks_is_counted(tmp_path):
    root = imagenet(tmp_path, SYNSETS[1:])
    with pytest.raises(InputError, match=rf"lacks 1 of its 100 class folders \({SYNSETS[0]}\)"):
        open_images(at(root, name="imagenet100"))
    with pytest.raises(InputError, match="train does not exist"):
        open_images(at(pictures(tmp_path / "b", "a.png", "b.png"), name="imagenet"))
    flat = pictures(tmp_path / "c", "train/n00000001/a.png", "train/n00000002/b.png", "val/c.png")
    with pytest.raises(InputError, match=r"lacks 2 of its 2 class folders .* torchvision's layout"):
        open_images(at(flat), "test")
    with pytest.raises(InputError, match="lacks all of its"):
        open_images(at(pictures(tmp_path / "d", "train/a.png"), name="imagenet"))


# -- sets in memory


def test_shapes_are_drawn_at_the_size_asked_for():
    config = DataConfig(name="shapes", image_size=40, num_images=30)
    assert has_test(config)
    train, test = open_images(config, seed=1), open_images(config, "test", seed=1)
    assert train.tensor is not None
    assert train.tensor.shape == (30, 3, 40, 40)
    assert train.classes == CLASSES
    assert not torch.equal(train.image(3), test.image(3))
    assert torch.equal(train.image(3), train.tensor[3])
    assert train.name_of(3) == "shapes[3]"
    assert fingerprint(train) == fingerprint(open_images(config, seed=1))
    assert fingerprint(train) != fingerprint(open_images(config, seed=2))


def test_what_shapes_cannot_be():
    for size in (31, 65, 224):
        with pytest.raises(InputError, match=rf"data\.image_size={size} .* 32 to 64"):
            open_images(DataConfig(name="shapes", image_size=size, num_images=4))
    with pytest.raises(InputError, match=r"data\.channels=1 with data\.name=shapes"):
        open_images(DataConfig(name="shapes", image_size=32, num_images=4, channels=1))


@pytest.fixture(scope="module")
def real_cifar10(tmp_path_factory) -> Path:
    if not (SHARED / "unpack.py").exists():
        pytest.skip(f"CIFAR-10 is not here: {SHARED}/unpack.py")
    out = tmp_path_factory.mktemp("cifar")
    subprocess.run([sys.executable, SHARED / "unpack.py", out, "cifar10"], check=True)
    return out


def test_real_cifar10(real_cifar10):
    config = at(real_cifar10, num_images=1000)
    assert data_name(config) == "cifar10"
    test = open_images(at(real_cifar10), "test")
    assert test.tensor is not None
    assert test.labels is not None
    assert test.tensor.shape == (10_000, 3, 32, 32)
    assert test.labels.bincount().tolist() == [1000] * 10
    assert test.classes is not None
    assert test.classes[3] == "cat"
    assert test.labels[:4].tolist() == [3, 8, 8, 0]
    assert test.image(0)[:, 0, 0].tolist() == [158, 112, 49]
    train = open_images(at(real_cifar10 / "cifar-10-batches-py", num_images=1000))
    assert len(train) == 1000
    assert has_test(config)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_a_cifar_that_is_not_the_published_one_is_never_unpickled(tmp_path, name):
    folder = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}[name]
    (tmp_path / folder).mkdir()
    for file in ("data_batch_1", "train", "test", "test_batch"):
        code = f"cos\nsystem\n(S'touch {tmp_path}/ran'\ntR."
        (tmp_path / folder / file).write_text(code)
    assert data_name(at(tmp_path)) == name
    for split in ("train", "test"):
        with pytest.raises(InputError, match=rf"lacks a complete {name}.*download=True"):
            open_images(at(tmp_path), split)
    assert not (tmp_path / "ran").exists()


def stl10(root: Path, unlabelled: int = 3) -> Path:
    folder = root / "stl10_binary"
    folder.mkdir(parents=True)
    for split, labels in {"train": [1, 10], "test": [3, 4, 5]}.items():
        pixels = np.zeros((len(labels), 3, 96, 96), dtype=np.uint8)
        pixels[:, 0, 7, 2] = labels  # the file goes down the columns: row 2, column 7
        pixels.tofile(folder / f"{split}_X.bin")
        np.array(labels, dtype=np.uint8).tofile(folder / f"{split}_y.bin")
    if unlabelled:
        np.full((unlabelled, 3, 96, 96), 77, dtype=np.uint8).tofile(folder / "unlabeled_X.bin")
    return root


def test_stl10_trains_on_labelled_and_unlabelled_images(tmp_path):
    root = stl10(tmp_path)
    assert data_name(at(root)) == "stl10"
    train, test = open_images(at(root)), open_images(at(root), "test")
    assert train.labels is not None
    assert train.labels.tolist() == [0, 9, -1, -1, -1]
    assert train.image(1)[0, 2, 7] == 10
    assert train.image(4).unique().tolist() == [77]
    assert len(train.labelled()) == 2
    assert test.labels is not None
    assert test.labels.tolist() == [2, 3, 4]
    assert test.labelled() is test
    assert test.image(0)[0, 2, 7] == 3
    assert len(open_images(at(stl10(tmp_path / "b", unlabelled=0)))) == 2


def test_damaged_stl10(tmp_path):
    folder = stl10(tmp_path) / "stl10_binary"
    (folder / "train_X.bin").write_bytes(b"123")
    with pytest.raises(
        InputError, match=r"train_X\.bin has 3 bytes, not a multiple of 3 x 96 x 96"
    ):
        open_images(at(tmp_path))
    (folder / "test_y.bin").write_bytes(b"\1\2\13")
    with pytest.raises(InputError, match=r"test_y\.bin has labels outside 1 to 10"):
        open_images(at(tmp_path), "test")
    (folder / "test_y.bin").write_bytes(b"\1\2")
    with pytest.raises(InputError, match="3 test images but 2 labels"):
        open_images(at(tmp_path), "test")
    (folder / "test_X.bin").unlink()
    with pytest.raises(InputError, match=r"test_X\.bin: No such file.*stl10_binary\.tar\.gz"):
        open_images(at(tmp_path), "test")


# -- names


def test_neither_name_nor_root():
    with pytest.raises(InputError, match=r"neither data\.name nor data\.root"):
        open_images(DataConfig())


@pytest.mark.parametrize(
    "name", sorted(set(get_args(DataName)) - {"shapes", "shards", "hf", "own"})
)
def test_files_need_a_root(name):
    with pytest.raises(InputError, match=rf"data\.name={name} needs data\.root"):
        open_images(DataConfig(name=name))
    with pytest.raises(InputError, match=r"/none does not exist"):
        open_images(DataConfig(name=name, root="/none"))


def test_shards_are_recognised_and_streams_have_no_numbers():
    for root in ("a-{000..099}.tar", "pipe:cat a.tar", "a.tar.gz"):
        config = DataConfig(root=root)
        assert data_name(config) == "shards"
        assert not has_test(config)
    with pytest.raises(InputError, match="compressed archives are a stream"):
        open_images(config)


def test_the_home_folder_is_understood(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    pictures(tmp_path / "data", "a.png", "b.png")
    assert len(open_images(DataConfig(root="~/data"))) == 2


# -- limits and fingerprints


def test_a_limit_takes_a_sample_that_the_seed_decides(tmp_path):
    root = pictures(tmp_path, *(f"{c}/{n}.png" for c in "ab" for n in range(10)))
    everything = open_images(at(root))
    some = open_images(at(root, num_images=8), seed=1)
    assert names(some, root) == names(open_images(at(root, num_images=8), seed=1), root)
    assert names(some, root) != names(open_images(at(root, num_images=8), seed=2), root)
    assert names(some, root) == sorted(names(some, root))
    assert some.labels is not None
    assert some.labels.tolist() == [int(name[0] == "b") for name in names(some, root)]
    assert some.classes == ("a", "b")
    assert len(open_images(at(root, num_images=99))) == len(everything) == 20
    assert everything.subset(None, 0) is everything
    assert len(everything.subset(5, 0)) == 5


def test_a_fingerprint_follows_the_images_and_not_their_folder(tmp_path):
    root = pictures(tmp_path / "one", "a/1.png", "b/2.png")
    mark = fingerprint(open_images(at(root)))
    root.rename(tmp_path / "two")
    root = tmp_path / "two"
    assert fingerprint(open_images(at(root))) == mark
    picture(root / "b" / "3.png")
    larger = fingerprint(open_images(at(root)))
    (root / "b" / "3.png").write_bytes(b"shorter")
    resized = fingerprint(open_images(at(root)))
    (root / "b" / "3.png").rename(root / "a" / "3.png")
    moved = fingerprint(open_images(at(root)))
    assert len({mark, larger, resized, moved}) == 4


def test_a_fingerprint_of_images_in_memory():
    pixels = torch.zeros(10, 3, 4, 4, dtype=torch.uint8)
    images = ImageSet("x", torch.arange(10), None, tensor=pixels)
    other = pixels.clone()
    other[9, 0, 0, 0] = 1
    marks = {
        fingerprint(images),
        fingerprint(ImageSet("x", None, None, tensor=pixels)),
        fingerprint(ImageSet("x", torch.arange(10), None, tensor=other)),
        fingerprint(images.subset(9, 0)),
    }
    assert len(marks) == 4


def test_a_file_that_has_gone_changes_the_fingerprint(tmp_path):
    root = pictures(tmp_path, "a.png", "b.png")
    images = open_images(at(root))
    mark = fingerprint(images)
    (root / "b.png").unlink()
    assert fingerprint(images) != mark


def test_every_name_of_a_data_set_has_its_line():
    assert tuple(SOURCES) == get_args(DataName)
