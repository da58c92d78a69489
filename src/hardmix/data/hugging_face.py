"""Image sets of Hugging Face's `datasets`: --data.root hf:FOLDER or hf:NAME.

A folder may have been written by `save_to_disk`, contain parquet files with the bytes of images, or
anything else that `load_dataset` reads. Images are decoded as those of any file (image_files.py).
"train[7]" is the name of the eighth image. Needs the extra `hf`.
"""

import io
import os
import re
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor

from hardmix.data.image_files import UnreadableImage, printable, read_image
from hardmix.data.image_set import UNKNOWN, FileNames, ImageSet, Split
from hardmix.errors import InputError
from hardmix.settings.config import DataConfig

PREFIX = "hf:"
TESTS = ("test", "validation", "valid", "val")
"""Names of the split of test images; the first that exists is taken."""

LABELS = ("label", "labels", "class", "fine_label", "coarse_label")
"""Names of the column of classes if no column has their type; the first that exists is taken."""
_ROW = re.compile(r"\[(\d+)\]$")


def is_hugging_face(root: str | None) -> bool:
    """Return whether a root names a set of `datasets`."""
    return root is not None and root.startswith(PREFIX)


def open_hugging_face(config: DataConfig, split: Split, seed: int) -> ImageSet:
    """Open the training or the test images of a set."""
    splits = _load(config.root or "")
    name = _split(splits, split)
    if name is None:
        raise InputError(
            f"data.root={config.root} has no test split: it has {', '.join(splits)}; set data.test"
            " to a folder of test images, or leave it to the command to hold images out."
        )
    table = splits[name]
    column = _image_column(table, config)
    labels, classes = _labels(table)
    reduce = 2 * config.image_size if config.reduce else None
    return ImageSet(
        printable(config.root or ""),
        labels,
        classes,
        files=FileNames(f"{name}[{row}]" for row in range(len(table))),
        channels=config.channels,
        max_pixels=config.max_pixels,
        read=partial(read_row, _undecoded(table, column), column, reduce=reduce),
        state=str(getattr(table, "_fingerprint", "")),
    )


def has_tests_on_hugging_face(config: DataConfig) -> bool:
    """Return whether the set has test images."""
    return _split(_load(config.root or ""), "test") is not None


def read_row(
    table: Any, column: str, name: str, channels: int, max_pixels: int, reduce: int | None = None
) -> UInt8[Tensor, "channels height width"]:
    """Decode the image of a row; raise `UnreadableImage` if that fails."""
    row = _ROW.search(name)
    assert row is not None, f"{name} is not a row"
    value = table[int(row[1])][column]
    content = value.get("bytes") if isinstance(value, Mapping) else value
    path = value.get("path") if isinstance(value, Mapping) else None
    if content is None and path is None:
        raise UnreadableImage(f"{name}: the row has no image")
    if content is None:
        return read_image(str(path), channels, max_pixels, reduce=reduce)
    return read_image(io.BytesIO(content), channels, max_pixels, name, reduce)


def _load(root: str) -> Mapping[str, Any]:
    """Return the splits by name."""
    place = os.path.expanduser(root.removeprefix(PREFIX))
    datasets = _datasets()
    try:
        saved = any((Path(place) / file).exists() for file in ("dataset_dict.json", "state.json"))
        loaded = datasets.load_from_disk(place) if saved else datasets.load_dataset(place)
    except Exception as error:  # its readers can raise anything on damage or without a network
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise InputError(
            f"data.root={printable(root)} cannot be opened by datasets: {reason}"
        ) from error
    return loaded if isinstance(loaded, Mapping) else {"train": loaded}


def _datasets() -> Any:
    try:
        return import_module("datasets")
    except ImportError as error:
        raise InputError(
            "data.root=hf:... needs the package datasets: pip install 'hardmix[hf]'."
        ) from error


def _split(splits: Mapping[str, Any], split: str) -> str | None:
    if split == "train":
        return "train" if "train" in splits else next(iter(splits))
    return next((name for name in TESTS if name in splits and len(splits) > 1), None)


def _image_column(table: Any, config: DataConfig) -> str:
    """Return the first column of images or, in plain parquet files, of bytes."""
    image, value = _datasets().Image, _datasets().Value
    for kind in (image, value, dict):
        for name, feature in table.features.items():
            bytes_of = feature.get("bytes") if kind is dict and isinstance(feature, dict) else None
            binary = getattr(feature if kind is value else bytes_of, "dtype", "")
            if isinstance(feature, image) if kind is image else "binary" in binary:
                return str(name)
    columns = ", ".join(f"{name} ({feature})" for name, feature in table.features.items())
    raise InputError(
        f"data.root={config.root} has no column of images: it has {columns}; cast one to"
        " datasets.Image."
    )


def _undecoded(table: Any, column: str) -> Any:
    """Return a table of only this column, with its images as bytes."""
    table = table.select_columns([column])
    datasets = _datasets()
    if isinstance(table.features[column], datasets.Image):
        table = table.cast_column(column, datasets.Image(decode=False))
    return table


def _labels(table: Any) -> tuple[Tensor | None, tuple[str, ...] | None]:
    """Return class numbers and names; numbers without names are their own names."""
    named = [n for n, f in table.features.items() if isinstance(f, _datasets().ClassLabel)]
    columns = named or [name for name in LABELS if name in table.column_names]
    if not columns:
        return None, None
    values = list(table.with_format(None)[columns[0]])
    if named:
        names = tuple(map(str, table.features[columns[0]].names))
        return torch.tensor([UNKNOWN if v is None else int(v) for v in values]), names
    classes = sorted({value for value in values if value is not None})
    number = {value: place for place, value in enumerate(classes)}
    labels = [UNKNOWN if value is None else number[value] for value in values]
    return torch.tensor(labels), tuple(printable(str(value)) for value in classes)
