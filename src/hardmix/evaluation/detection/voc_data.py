"""Data in the layout of PASCAL VOC: Annotations/*.xml, ImageSets/Main/*.txt, JPEGImages/*.

A folder with VOC2007 and VOC2012 follows the paper's protocol: train on trainval of both, test on
the test images of 2007. For any other folder in this layout, splits and classes are those in its
files. Objects marked difficult are kept: the protocol trains on them.
"""

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import numpy as np

from hardmix.data.image_files import IMAGE_SUFFIXES, printable
from hardmix.errors import InputError
from hardmix.evaluation.detection.samples import (
    DetectionImage,
    DetectionSet,
    DetectionSplits,
    for_training,
)

# fmt: off
VOC_CLASSES = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat",
    "chair", "cow", "diningtable", "dog", "horse", "motorbike", "person",
    "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)
# fmt: on
"""The 20 classes of VOC, in their usual order."""

_FOLDERS = ("Annotations", "ImageSets/Main", "JPEGImages")


class _VocObject(NamedTuple):
    name: str
    corners: tuple[float, float, float, float]
    """xmin, ymin, xmax, ymax as in the file: inclusive, with pixels counted from 1."""
    difficult: bool


class _Annotation(NamedTuple):
    id: str
    path: str
    height: int
    width: int
    objects: list[_VocObject]


def open_voc(root: Path) -> DetectionSplits:
    """Open training and test images of VOC2007 and VOC2012, or of a folder in VOC's layout."""
    devkit = root / "VOCdevkit" if (root / "VOCdevkit").is_dir() else root
    if any((devkit / year).is_dir() for year in ("VOC2007", "VOC2012")):
        return _voc_07_12(devkit)
    _check_layout(root)
    train_name, test_name = _splits(root)
    train, test = _read(root, train_name), _read(root, test_name)
    classes = sorted({thing.name for file in (*train, *test) for thing in file.objects})
    return _numbered(train, test, classes)


def _voc_07_12(devkit: Path) -> DetectionSplits:
    absent = [year for year in ("VOC2007", "VOC2012") if not (devkit / year).is_dir()]
    if absent:
        present = {"VOC2007", "VOC2012"}.difference(absent).pop()
        raise InputError(
            f"data.root={printable(devkit)} has {present} but not {absent[0]}: the protocol trains"
            f" on both. Add it, or set data.root={printable(devkit / present)} to use only one."
        )
    for year in ("VOC2007", "VOC2012"):
        _check_layout(devkit / year)
    train = _read(devkit / "VOC2007", "trainval") + _read(devkit / "VOC2012", "trainval")
    return _numbered(train, _read(devkit / "VOC2007", "test"), VOC_CLASSES)


def _check_layout(root: Path) -> None:
    absent = [name for name in _FOLDERS if not (root / name).is_dir()]
    if not absent:
        return
    inside = sorted(root.glob("*/Annotations")) if root.is_dir() else []
    hint = f"set data.root={printable(inside[0].parent)}" if inside else "choose another data.root"
    what = f"has no folder {' or '.join(absent)}" if root.is_dir() else "is not a folder"
    raise InputError(
        f"data.root={printable(root)} {what}. PASCAL VOC's layout is {', '.join(_FOLDERS)}: {hint}."
    )


def _splits(root: Path) -> tuple[str, str]:
    """Return the names of the lists to train and to test on."""
    lists = {file.stem for file in (root / "ImageSets" / "Main").glob("*.txt")}
    for train, test in (("trainval", "test"), ("train", "test"), ("train", "val")):
        if {train, test} <= lists:
            return train, test
    raise InputError(
        f"data.root={printable(root)}: ImageSets/Main lacks lists to train and to test on: write"
        " the names of the images to trainval.txt and test.txt, or to train.txt and val.txt."
    )


def _read(root: Path, split: str) -> list[_Annotation]:
    """Read all annotations of a split; one error reports all that are missing or broken."""
    names = _names(root / "ImageSets" / "Main" / f"{split}.txt")
    images = {
        Path(file).stem: file
        for file in sorted(os.listdir(root / "JPEGImages"))
        if Path(file).suffix.lower() in IMAGE_SUFFIXES
    }
    read, faults = [], []
    for name in names:
        try:
            if name not in images:
                raise ValueError(f"no image JPEGImages/{name}.jpg")
            read.append(_annotation(root, name, images[name]))
        except (OSError, ValueError, ElementTree.ParseError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            faults.append(f"{name}: {reason}")
    if faults:
        raise InputError(
            f"data.root={printable(root)}: {len(faults)} of {len(names)} images of the split"
            f" {split} cannot be used ({'; '.join(faults[:3])}): fix them, or remove them from"
            f" ImageSets/Main/{split}.txt."
        )
    return read


def _names(file: Path) -> list[str]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"data.root: {printable(file)} cannot be read: {error}.") from error
    # The lists of one class have a second word on each line.
    names = [line.split()[0] for line in lines if line.strip()]
    if len(set(names)) < max(1, len(names)):
        what = "lists an image twice" if names else "lists no images"
        raise InputError(f"data.root: {printable(file)} {what}: write each name on its own line.")
    return names


def _annotation(root: Path, name: str, image: str) -> _Annotation:
    tree = ElementTree.parse(root / "Annotations" / f"{name}.xml").getroot()
    height, width = (int(_text(tree, f"size/{side}")) for side in ("height", "width"))
    if height < 1 or width < 1:
        raise ValueError(f"<size> is {width} x {height}")
    objects = [_object(element) for element in tree.findall("object")]
    return _Annotation(name, str(root / "JPEGImages" / image), height, width, objects)


def _object(element: ElementTree.Element) -> _VocObject:
    corners = [float(_text(element, f"bndbox/{key}")) for key in ("xmin", "ymin", "xmax", "ymax")]
    difficult = (element.findtext("difficult") or "0").strip()
    return _VocObject(
        _text(element, "name"),
        (corners[0], corners[1], corners[2], corners[3]),
        difficult not in ("", "0"),
    )


def _text(element: ElementTree.Element, path: str) -> str:
    text = (element.findtext(path) or "").strip()
    if not text:
        raise ValueError(f"no <{path.replace('/', '><')}> in <{element.tag}>")
    return text


def _numbered(
    train: list[_Annotation], test: list[_Annotation], classes: Iterable[str]
) -> DetectionSplits:
    names = tuple(classes)
    return DetectionSplits(for_training(_convert(train, names)), _convert(test, names, tested=True))


def _convert(
    annotations: list[_Annotation], classes: tuple[str, ...], tested: bool = False
) -> DetectionSet:
    """Number the classes; `tested`: objects with an invalid box still count, as in detectron2."""
    numbers = {name: number for number, name in enumerate(classes)}
    images, dropped = [], []
    for file in annotations:
        valid, lost = [], []
        for thing in file.objects:
            if thing.name not in numbers:
                raise InputError(
                    f"{printable(file.path)}: the class {thing.name!r} in its annotation is not"
                    " one of VOC's 20: correct it."
                )
            fault = _fault(thing, file)
            if fault is None:
                valid.append(thing)
                continue
            counts = tested and not thing.difficult
            lost += [numbers[thing.name]] if counts else []
            end = "; it counts as not found" if counts else ""
            dropped.append(f"{file.id}: {thing.name} {fault}{end}")
        images.append(_image(file, valid, numbers, lost))
    return DetectionSet(tuple(images), classes, tuple(dropped))


def _fault(thing: _VocObject, file: _Annotation) -> str | None:
    """Return why a box cannot be used, if so; a box that is partly outside can."""
    left, top, right, bottom = thing.corners
    box = f"[{', '.join(f'{value:g}' for value in thing.corners)}]"
    if not all(map(math.isfinite, thing.corners)):
        return f"{box} contains NaN or infinity"
    if right < left or bottom < top:  # both ends belong to the box: one pixel is a box
        return f"{box} has no size"
    if right < 1 or bottom < 1 or left > file.width or top > file.height:
        return f"{box} is outside the image of {file.width} x {file.height}"
    return None


def _image(
    file: _Annotation, things: list[_VocObject], numbers: dict[str, int], lost: list[int]
) -> DetectionImage:
    boxes = np.array([thing.corners for thing in things], dtype=np.float64).reshape(-1, 4)
    boxes[:, :2] -= 1  # the left edge of pixel 1 is 0, the right edge of pixel n is n
    return DetectionImage(
        file.id,
        file.path,
        file.height,
        file.width,
        boxes,
        np.array([numbers[thing.name] for thing in things], dtype=np.int64),
        np.array([thing.difficult for thing in things], dtype=np.bool_),
        np.zeros(len(things), dtype=np.bool_),
        unfindable=np.array(lost, dtype=np.int64),
    )
