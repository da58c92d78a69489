"""`hardmix check-data`: layouts that are right or wrong, and counts that are published or not."""

from dataclasses import replace
from pathlib import Path

import pytest

from doc_things import make_coco, make_devkit, make_imagenet
from hardmix.commands import main as cli
from hardmix.sweep import data_roots
from hardmix.sweep.data_roots import EXPECTED, check_data

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def roots(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("roots")
    make_imagenet(folder / "imagenet")
    make_devkit(folder / "voc")
    make_coco(folder / "coco")
    (folder / "empty").mkdir()
    return folder


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as done:
        cli.main(["check-data", *words])
    return done.value.code


@pytest.mark.parametrize(
    ("name", "root", "counts", "objects"),
    [
        ("imagenet", "imagenet", [(100, 100), (100, 100)], None),
        ("imagenet100", "imagenet", [(100, 100), (100, 100)], None),
        ("voc", "voc", [(6, 20), (1, 20)], [6, 1]),
        ("coco", "coco", [(3, 2), (3, 2)], [3, 3]),
    ],
)
def test_counts_are_shown_and_compared_with_the_published_ones(
    roots, monkeypatch, capfd, name, root, counts, objects
):
    assert run(name, "--data.root", str(roots / root)) == 2
    shown = capfd.readouterr()
    assert "differs" in shown.out
    published = EXPECTED[name][0]
    assert f"instead of {published.images:,} of {published.classes}" in " ".join(shown.err.split())
    assert "Traceback" not in shown.err
    assert run(name, "--data.root", str(roots / root), "--any-counts") == 0
    found = check_data(name, roots / root, any_counts=True)
    assert [(split.images, split.classes) for split in found] == counts
    assert objects is None or [split.objects for split in found] == objects
    same = tuple(
        replace(split, images=images, classes=classes)
        for split, (images, classes) in zip(EXPECTED[name], counts, strict=True)
    )
    monkeypatch.setitem(data_roots.EXPECTED, name, same)
    capfd.readouterr()
    assert run(name, "--data.root", str(roots / root)) == 0
    assert f"{name}: complete." in capfd.readouterr().out


@pytest.mark.parametrize(
    ("name", "root", "words"),
    [
        ("imagenet", "empty", "torchvision's layout"),
        ("imagenet100", "voc", "torchvision's layout"),
        ("voc", "empty", "PASCAL VOC's layout"),
        ("voc", "voc/VOC2012/Annotations", "PASCAL VOC's layout"),
        ("coco", "imagenet", "COCO's layout"),
        ("coco", "nowhere", "COCO's layout"),
    ],
)
def test_another_layout_is_refused_with_the_right_one(roots, capfd, name, root, words):
    assert run(name, "--data.root", str(roots / root), "--any-counts") == 2
    shown = " ".join(capfd.readouterr().err.split())
    assert words in shown
    assert "Traceback" not in shown
