"""CIFAR-10, CIFAR-100 and STL-10, as published, into memory."""

from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor
from torchvision.datasets import CIFAR10, CIFAR100

from hardmix.data.image_files import printable
from hardmix.errors import InputError

CifarName = Literal["cifar10", "cifar100"]

STL10_CLASSES = (
    "airplane",
    "bird",
    "car",
    "cat",
    "deer",
    "dog",
    "horse",
    "monkey",
    "ship",
    "truck",
)
STL10_FOLDER = "stl10_binary"
_STL10_SHAPE = (3, 96, 96)


class InMemory(NamedTuple):
    """A whole data set."""

    images: UInt8[Tensor, "n channels height width"]
    labels: Int[Tensor, " n"]
    """-1 where unknown."""
    classes: tuple[str, ...]


def read_cifar(root: Path, name: CifarName, split: str) -> InMemory:
    """CIFAR in torchvision's layout; `root` holds the folder of batches or is that folder.

    The batches are pickles, and a pickle can run code: torchvision first compares their md5 with
    the published ones.
    """
    kind = {"cifar10": CIFAR10, "cifar100": CIFAR100}[name]
    if root.name == kind.base_folder:
        root = root.parent
    try:
        data = kind(root, train=split == "train", download=False)
    except RuntimeError as error:
        raise InputError(
            f"data.root={printable(root)} lacks a complete {name} ({kind.base_folder} with the"
            ' published md5 sums): fetch it with python -c "from torchvision.datasets import'
            f" {kind.__name__}; {kind.__name__}('{printable(root)}', download=True)\"."
        ) from error
    images = torch.from_numpy(data.data).permute(0, 3, 1, 2).contiguous()
    return InMemory(images, torch.tensor(data.targets), tuple(data.classes))


def read_stl10(root: Path, split: str) -> InMemory:
    """STL-10. For "train" the labelled images, then the unlabelled ones where the file exists.

    Pre-training may use all of them (105,000), evaluations keep the 5,000 whose label is not -1.
    """
    folder = root if root.name == STL10_FOLDER else root / STL10_FOLDER
    images, labels = _stl10_images(folder / f"{split}_X.bin"), _stl10_labels(folder, split)
    if len(images) != len(labels):
        raise InputError(
            f"data.root={printable(folder)}: {len(images)} {split} images but {len(labels)} labels:"
            " unpack stl10_binary.tar.gz again."
        )
    unlabelled = folder / "unlabeled_X.bin"
    if split == "train" and unlabelled.exists():
        images = torch.cat([images, _stl10_images(unlabelled)])
        labels = torch.cat([labels, torch.full((len(images) - len(labels),), -1)])
    return InMemory(images, labels, STL10_CLASSES)


def _stl10_images(file: Path) -> UInt8[Tensor, "n 3 96 96"]:
    values = _stl10_bytes(file)
    if values.size == 0 or values.size % np.prod(_STL10_SHAPE):
        raise InputError(
            f"data.root: {printable(file)} has {values.size} bytes, not a multiple of 3 x 96 x 96:"
            " unpack stl10_binary.tar.gz again."
        )
    # The file goes down the columns.
    return torch.from_numpy(values.reshape(-1, *_STL10_SHAPE).transpose(0, 1, 3, 2).copy())


def _stl10_labels(folder: Path, split: str) -> Int[Tensor, " n"]:
    labels = torch.from_numpy(_stl10_bytes(folder / f"{split}_y.bin")).long() - 1
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(STL10_CLASSES):
        raise InputError(
            f"data.root: {printable(folder / f'{split}_y.bin')} has labels outside 1 to 10: unpack"
            " stl10_binary.tar.gz again."
        )
    return labels


def _stl10_bytes(file: Path) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    try:
        return np.fromfile(file, dtype=np.uint8)
    except OSError as error:
        raise InputError(
            f"data.root: {printable(file)}: {error.strerror}; stl10 needs the files of"
            " stl10_binary.tar.gz, which torchvision.datasets.STL10(ROOT, download=True) fetches."
        ) from error
