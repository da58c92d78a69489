"""`hardmix check-data`: whether a folder of images lies on the disk as the paper's tables need it.

Images are listed and annotations read, but no image is decoded, except for the first few of
ImageNet.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from hardmix.data.sources import open_images
from hardmix.errors import InputError
from hardmix.evaluation.detection.coco import open_coco
from hardmix.evaluation.detection.samples import DetectionSplits
from hardmix.evaluation.detection.voc import open_voc
from hardmix.runtime.console import say, table, warn
from hardmix.settings.config import DataConfig
from hardmix.settings.facts import check_choice
from hardmix.settings.named_choices import DataName

DataSet = Literal["imagenet", "imagenet100", "voc", "coco"]
"""The data sets of the paper's tables."""


@dataclass(frozen=True)
class Split:
    """A part of a data set as it is on the disk."""

    title: str
    images: int
    classes: int
    objects: int | None = None
    """Number of boxes; None without boxes."""


EXPECTED: dict[DataSet, tuple[Split, Split]] = {
    "imagenet": (Split("train", 1_281_167, 1000), Split("val", 50_000, 1000)),
    "imagenet100": (Split("train", 126_689, 100), Split("val", 5_000, 100)),
    "voc": (Split("trainval07+12", 16_551, 20), Split("test2007", 4_952, 20)),
    "coco": (Split("train2017, with objects", 117_266, 80), Split("val2017", 5_000, 80)),
}
"""Training and test images of the published data sets. Of COCO's 118,287 training images, 1,021
have no object to train on, and detectors skip them."""


def check_data(data: DataSet, root: Path, *, any_counts: bool = False) -> tuple[Split, Split]:
    """Show how many images and classes a data set has, and compare them with the published counts.

    Raises InputError if the layout is another one, or if counts differ and `any_counts` is false.
    """
    check_choice("data", data, get_args(DataSet))
    found = READERS[data](root.expanduser())
    rows, other = [], []
    for split, wanted in zip(found, EXPECTED[data], strict=True):
        right = (split.images, split.classes) == (wanted.images, wanted.classes)
        counts = f"{wanted.images:,} of {wanted.classes}"
        boxes = "-" if split.objects is None else f"{split.objects:,}"
        verdict = "as published" if right else "differs"
        images = f"{split.images:,}", f"{split.classes:,}"
        rows.append([wanted.title, *images, boxes, counts, verdict])
        if not right:
            other.append(
                f"{wanted.title} has {split.images:,} images of {split.classes:,} classes instead"
                f" of {counts}"
            )
    columns = ["", "images", "classes", "objects", "published", ""]
    table(f"{data} in {root}", columns, rows)
    if other and not any_counts:
        raise InputError(
            f"data.root={root}: {'; '.join(other)}. Unpack it again, or use --any-counts for a part"
            " of it on purpose; results are then not comparable with the paper's."
        )
    if other:
        warn("These are not the published images: results are not comparable with the paper's.")
    else:
        say(f"{data}: complete.")
    return found


def _images(name: DataName, root: Path) -> tuple[Split, Split]:
    absent = [split for split in ("train", "val") if not (root / split).is_dir()]
    if absent:
        raise InputError(
            f"data.root={root} has no folder {' or '.join(absent)}: ImageNet is read in"
            " torchvision's layout, train/SYNSET and val/SYNSET."
        )
    config = DataConfig(name=name, root=str(root))
    train, test = (open_images(config, split) for split in ("train", "test"))
    return (
        Split("train", len(train), len(train.classes or ())),
        Split("val", len(test), len(test.classes or ())),
    )


def _objects(read: Callable[[Path], DetectionSplits], root: Path) -> tuple[Split, Split]:
    splits = read(root)
    for part in splits:
        if part.dropped:
            warn(f"{len(part.dropped)} invalid objects are skipped, such as {part.dropped[0]}.")
    train, test = (
        Split("", len(part.images), len(part.classes), sum(len(each.boxes) for each in part.images))
        for part in splits
    )
    return train, test


READERS: dict[DataSet, Callable[[Path], tuple[Split, Split]]] = {
    "imagenet": partial(_images, "imagenet"),
    "imagenet100": partial(_images, "imagenet100"),
    "voc": partial(_objects, open_voc),
    "coco": partial(_objects, open_coco),
}
