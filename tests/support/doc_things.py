"""Things behind the words of the documents: small folders, images, weights and runs, all real."""

import json
import pickle
import re
import shutil
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from PIL import Image
from torchvision.datasets import CIFAR10

from foreign_files import moco_file
from hardmix.data.imagenet100 import SYNSETS
from hardmix.evaluation.detection.coco import annotation_file
from hardmix.models.backbones import build_backbone
from hardmix.training.pretrain import pretrain
from places import ROOT
from ranks import tiny
from untrained_runs import run_of_backbone
from voc_folders import thing, voc_image, voc_lists


def make_photos(folder: Path) -> None:
    for number in range(24):
        file = folder / ("cats", "dogs")[number % 2] / f"{number}.png"
        paint(file, (40, 48), number)


def make_imagenet(folder: Path) -> None:
    for number, synset in enumerate(SYNSETS):
        for split in ("train", "val"):
            paint(folder / split / synset / "0.jpg", (40, 36), number)


def paint(file: Path, size: tuple[int, int], seed: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (*size, 3), generator=generator, dtype=torch.uint8)
    Image.fromarray(pixels.numpy()).save(file)


def make_cifar(folder: Path) -> None:
    """CIFAR-10's layout; `_our_cifar` makes torchvision take its md5 sums for the published."""
    batches = folder / CIFAR10.base_folder
    batches.mkdir(parents=True)
    for name, number in (("data_batch_1", 160), ("test_batch", 40)):
        pixels = torch.randint(0, 256, (number, 3072), dtype=torch.uint8).numpy()
        labels = [index % 10 for index in range(number)]
        (batches / name).write_bytes(pickle.dumps({"data": pixels, "labels": labels}))
    names = {"label_names": [f"class {number}" for number in range(10)]}
    (batches / "batches.meta").write_bytes(pickle.dumps(names))


def make_voc(root: Path) -> None:
    names = [f"{root.name}-{number}" for number in range(4)]
    for number, name in enumerate(names):
        left = 5 + 3 * number
        voc_image(root, name, thing("cat", left, 6, left + 14, 24), size=(60, 40))
    voc_lists(root, trainval=names[:3], test=names[3:])


def make_devkit(folder: Path) -> None:
    for year in ("VOC2007", "VOC2012"):
        make_voc(folder / year)


def make_coco(folder: Path) -> None:
    (folder / "annotations").mkdir(parents=True)
    categories = [{"id": 1, "name": "cat"}, {"id": 3, "name": "dog"}]
    for split in ("train", "val"):
        images, objects = [], []
        for number in range(1, 4):
            paint(folder / f"{split}2017" / f"{number}.jpg", (40, 60), number)
            images.append({"id": number, "file_name": f"{number}.jpg", "height": 40, "width": 60})
            where = {"bbox": [5, 6, 20, 18], "segmentation": [[5, 6, 25, 6, 25, 24, 5, 24]]}
            about = {"id": number, "image_id": number, "category_id": 1, "iscrowd": 0, "area": 360}
            objects.append(about | where)
        content = {"images": images, "annotations": objects, "categories": categories}
        annotation_file(folder, split).write_text(json.dumps(content))


def make_trained(folder: Path, method: str = "mochi") -> None:
    train = {"epochs": 1, "knn_every": 1}
    pretrain(tiny(method, train=train, mix={"warm_up_epochs": 0}), folder)


def make_grid(file: Path) -> None:
    """Write the grid that docs/sweeps.md shows."""
    page = (ROOT / "docs" / "sweeps.md").read_text()
    (block,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    file.write_text(block)


MAKERS: dict[str, Callable[[Path], object]] = {
    "photos": make_photos,
    "imagenet": make_imagenet,
    "cifar": make_cifar,
    "voc": make_voc,
    "devkit": make_devkit,
    "coco": make_coco,
    "grid.toml": make_grid,
    "image.png": partial(paint, size=(40, 48), seed=0),
    "moco.pth.tar": moco_file,
    "weights.pth": lambda file: torch.save(
        build_backbone("resnet18-narrow").trunk.state_dict(), file
    ),
    "new-run": lambda _: None,
    "run": make_trained,
    "other-run": partial(make_trained, method="moco-v2"),
    "narrow-run": partial(run_of_backbone, backbone="resnet18-narrow"),
    "resnet-run": partial(run_of_backbone, backbone="resnet18"),
}

OWN_CODE = {
    "my_net:make_net": "my_net.py",
    "my_views:make_views": "my_views.py",
}
"""Functions by name, and the files of docs/extending.md that define them."""

MEASURES = {"my_parts:centroids": "my_parts.py", "mypackage:measure": "mypackage.py"}
"""Evaluations by name, and the files that define them."""

THINGS: dict[str, dict[str, str]] = {
    "RUN": {
        r"pretrain imagenet.* --resume auto": "new-run",
        r"detect": "narrow-run",
        r"export .*(torchvision|timm|detectron2)": "resnet-run",
        r"": "run",
    },
    "RUN-2": {r"": "other-run"},
    "runs/photos": {r"": "run"},
    "runs/photos-moco": {r"": "other-run"},
    "runs/moco-v2": {r"detect": "narrow-run", r"": "run"},
    "photos": {r"": "photos"},
    "RUN/config.json": {r"": "run/config.json"},
    "DIR/configs/NAME.json": {r"": "run/config.json"},
    "DIR": {
        r"pretrain imagenet|imagenet100": "imagenet",
        r"pretrain cifar10": "cifar",
        r"detect": "voc",
    },
    "FOLDER": {r"": "photos"},
    "GRID.toml": {r"": "grid.toml"},
    "imagenette-96/train": {r"": "photos"},
    "IMAGENET": {r"": "imagenet"},
    "CIFAR": {r"": "cifar"},
    "VOCdevkit": {r"": "devkit"},
    "BCCD": {r"": "voc"},
    "COCO": {r"": "coco"},
    "IMAGE": {r"": "image.png"},
    "photo.jpg": {r"": "image.png"},
    "moco_v2.pth.tar": {r"": "moco.pth.tar"},
    "moco_v2_200ep_pretrain.pth.tar": {r"": "moco.pth.tar"},
    "resnet50.pth": {r"": "weights.pth"},
    "WEIGHTS.pth": {r"": "weights.pth"},
}
"""A word of the documents, and by the beginning of its command which of MAKERS lies under it."""


def thing_of(word: str, words: list[str]) -> str | None:
    """Return the kind of thing that a word stands for in a command; None if it is unknown."""
    kinds = THINGS.get(word, {})
    return next((kind for start, kind in kinds.items() if re.match(start, " ".join(words))), None)


def own_file(name: str) -> str:
    """Return a file that docs/extending.md shows, for the folder where commands are started."""
    page = (ROOT / "docs" / "extending.md").read_text()
    found = re.search(rf"File `{name}`[^:]*:\n\n```python\n(.*?)```", page, re.DOTALL)
    assert found, f"docs/extending.md has no {name}"
    return found[1]


def measure_file(name: str) -> str:
    """Return a file with the evaluation of docs/extending.md, as a function of this name."""
    page = (ROOT / "docs" / "extending.md").read_text()
    found = re.search(r"^train, labels, .*?(?=^evaluated\.run\.write)", page, re.S | re.M)
    assert found, "docs/extending.md has no evaluation"
    body = textwrap.indent(f"{found[0]}return accuracy\n", "    ")
    return f"import torch\n\nimport hardmix\n\n\ndef {name}(evaluated):\n{body}"


def lay_out(words: list[str], things: Callable[[str], Path]) -> None:
    """Put everything that a command reads into the folder where it is run."""
    for word in words:
        if word in OWN_CODE:
            Path(OWN_CODE[word]).write_text(own_file(OWN_CODE[word]))
        if word in MEASURES:
            Path(MEASURES[word]).write_text(measure_file(word.partition(":")[2]))
    goes_on = "--resume" in words and "auto" not in words
    for before, word in zip(["", *words], words, strict=False):
        name = thing_of(word, words)
        if name is None or Path(word).exists() or (before == "--out" and not goes_on):
            continue
        Path(word).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("run"):  # results are written into it
            shutil.copytree(things(name), word)
        else:
            Path(word).symlink_to(things(name))
