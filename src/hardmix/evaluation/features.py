"""Features of images from a frozen trunk: computed, cached in a run's folder, written to files."""

import csv
import hashlib
import io
import json
import math
import os
import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from hardmix.data.changed_data import fingerprint
from hardmix.data.image_set import ImageSet
from hardmix.data.loading import evaluation_batches
from hardmix.data.sources import data_name, open_images
from hardmix.errors import InputError
from hardmix.evaluation.trained_encoder import (
    TrainedEncoder,
    check_channels,
    load_encoder,
    weights_hash,
)
from hardmix.runs.folder import Run, versions
from hardmix.runtime.console import progress, say, visible, warn
from hardmix.runtime.device import Compute, Late, choose_compute
from hardmix.runtime.distributed import agree_on_max, gather_uneven, rank, world_size
from hardmix.runtime.files import check_file, most_weights, write_atomically
from hardmix.settings.config import DataConfig

FORMATS = (".safetensors", ".npy", ".csv")
"""Suffixes of the files of `hardmix features`."""
MOST_PIXELS = 1 << 20
"""Pixels of a batch on a CPU: larger layers leave its caches, and take a third longer."""
MOST_KEPT = 4 * 2**30
"""Most bytes of features cached in a run's folder: a million images of 1,024 features."""


class Features(NamedTuple):
    """Features of a data set, in its order, on the CPU."""

    features: Float[Tensor, "n dim"]
    """The trunk's features, in float32."""
    labels: Int[Tensor, " n"]
    """Class of each image, -1 if unknown."""
    ids: Int[Tensor, " n"]
    """Index of each image in the data set; unreadable images are missing."""


@torch.no_grad()
def extract(
    trunk: nn.Module,
    images: ImageSet,
    data: DataConfig,
    *,
    compute: Compute | None = None,
    batch_size: int = 256,
    title: str = "features",
    between: Callable[[], None] = lambda: None,
    gathered: bool = True,
) -> Features:
    """Return the trunk's features (without the head: Sec. 4.3), computed in evaluation mode.

    `data` gives the size of the crops, the workers, and how many images may be unreadable.
    `compute` is where to compute; None means the trunk's own device, in float32. With several
    processes, each takes consecutive images, and all get the features of every image once; unless
    `gathered`, each keeps those of its own images. `between` is called before each batch, equally
    often on every process. The trunk's mode is restored. On a CPU, batches of large images are
    smaller than `batch_size`.
    """
    compute = compute or device_of(trunk)
    if compute.device.type == "cpu":
        batch_size = max(1, min(batch_size, MOST_PIXELS // data.image_size**2))
    training = trunk.training
    trunk.eval()
    first, share, rounds = _share_of(images, batch_size)
    rows = _Rows(len(share))
    late: tuple[Late, Tensor, Tensor] | None = None
    batches = evaluation_batches(
        share, data.image_size, batch_size, compute.device, data.workers, data.max_unreadable
    )
    try:
        with progress(title, len(share)) as meter:
            for _ in range(rounds):
                between()
                for pictures, labels, ids in islice(batches, 1):  # empty if all are unreadable
                    with compute.autocast():
                        features = trunk(pictures.to(memory_format=torch.channels_last))
                    rows.add(late)  # the previous batch, so that the device stays busy
                    late = Late(features.float()), labels, ids + first
                    meter.advance(rows.filled + len(labels))
        rows.add(late)
    finally:
        batches.close()
        trunk.train(training)
    columns = rows.columns()
    return Features(*(gather_uneven(column) for column in columns) if gathered else columns)


class _Rows:
    """Features, labels and ids in the order they arrive, in memory that is allocated once."""

    def __init__(self, number: int) -> None:
        self.number, self.filled = number, 0
        self._columns: list[Tensor] = []

    def add(self, late: tuple[Late, Tensor, Tensor] | None) -> None:
        """Copy a batch out of pinned memory, which is scarce."""
        if late is None:
            return
        batch = late[0].read(), *late[1:]
        self._columns = self._columns or [
            values.new_empty(self.number, *values.shape[1:]) for values in batch
        ]
        for column, values in zip(self._columns, batch, strict=True):
            column[self.filled : self.filled + len(values)] = values
        self.filled += len(batch[1])

    def columns(self) -> list[Tensor]:
        """Return what was added; the features are as wide as on the other processes."""
        width = agree_on_max(self._columns[0].shape[1] if self._columns else 0)
        number = torch.empty(0, dtype=torch.int64)
        columns = self._columns or [torch.empty(0, width), number, number]
        return [column[: self.filled] for column in columns]


def device_of(trunk: nn.Module) -> Compute:
    """Return the device of a network's weights, with float32."""
    device = next(trunk.parameters(), torch.empty(0)).device
    return Compute(device, False, "fp32: the network as it is")


def _share_of(images: ImageSet, batch_size: int) -> tuple[int, ImageSet, int]:
    """Return this process's first image, its images, and the largest number of batches of any."""
    number, many = len(images), world_size()
    first, end = (number * each // many for each in (rank(), rank() + 1))
    rounds = math.ceil(math.ceil(number / many) / batch_size)
    share = images if many == 1 else images.select(torch.arange(first, end))
    return first, share, rounds


def write_features(
    run: Path, data: DataConfig, out: Path, checkpoint: str | None = None
) -> list[Path]:
    """Write the features of every image; return the files written.

    The suffix of `out` sets the format: .csv (name, label, class, and a column for each feature),
    .npy (features), or .safetensors (features and labels, with the classes' names in its metadata).
    With the latter two, the images' names are written to a .names.txt of the same name.
    `checkpoint` names one of the run's checkpoints, by its step or epoch.
    """
    if out.suffix not in FORMATS:
        raise InputError(f"out={out} must end in one of {', '.join(FORMATS)}.")
    if out.exists():
        raise InputError(f"out={out} already exists: choose another name, or delete it.")
    encoder = load_encoder(run, or_checkpoint=True, checkpoint=checkpoint)
    features, images = features_of(run, data, encoder)
    names = [images.name_of(number) for number in features.ids.tolist()]
    out.parent.mkdir(parents=True, exist_ok=True)
    written = [out]
    if out.suffix == ".csv":
        write_atomically(out, _csv(features, names, images.classes or ()))
    else:
        listing = out.with_suffix(".names.txt")
        write_atomically(listing, "".join(f"{visible(name)}\n" for name in names).encode())
        content = _array(features) if out.suffix == ".npy" else _tensors(features, images)
        write_atomically(out, content)
        written.append(listing)
    say(f"{len(names)} images, {features.features.shape[1]} features each. Wrote {written[0]}")
    return written


def features_of(
    run: Path, data: DataConfig, encoder: TrainedEncoder | None = None
) -> tuple[Features, ImageSet]:
    """Return the features of a data set's training images, and the data set.

    They are computed in float32, so that they are the same on every machine. They are cached in
    RUN/features and used again as long as encoder and images are the same.
    """
    encoder = encoder or load_encoder(run, or_checkpoint=True)
    check_channels(encoder, data, run)
    images = open_images(data, "train")
    compute = choose_compute(precision="fp32")
    mark = _mark(encoder, images, data)
    file = kept_file(run, data)
    kept = _read_kept(file, mark)
    if agree_on_max(int(kept is None)) == 0 and kept is not None:
        return kept, images
    features = extract(encoder.to(compute.device), images, data, compute=compute)
    encoder.to("cpu")
    _keep(file, features, mark)
    return features, images


def kept_file(run: Path, data: DataConfig) -> Path:
    """Return RUN/features/NAME-train-PLACE.safetensors; PLACE is a hash of the images' path."""
    name = data_name(data)
    root = os.path.abspath(os.path.expanduser(data.root)) if data.root else ""
    word = re.sub(r"[^\w.-]+", "-", os.path.basename(root)) if name == "folder" else name
    place = hashlib.sha256(os.fsencode(f"{name} {root} {data.num_images}")).hexdigest()[:8]
    return Run(run).path / "features" / f"{word[:60] or name}-train-{place}.safetensors"


def _mark(encoder: TrainedEncoder, images: ImageSet, data: DataConfig) -> str:
    """Return a hash of everything that the features depend on, including the files' times."""
    digest = hashlib.sha256(fingerprint(images).encode())
    for file in images.files or ():
        try:
            digest.update(b"%d " % os.stat(file).st_mtime_ns)
        except OSError:
            digest.update(b"- ")
    digest.update(weights_hash(encoder).encode())
    rest = encoder.backbone, encoder.image_size, data.image_size, images.max_pixels
    digest.update(repr((*rest, versions()["hardmix"])).encode())
    return digest.hexdigest()


def _read_kept(file: Path, mark: str) -> Features | None:
    """Return the cached features; None if missing, damaged, or of other images."""
    try:
        check_file(file, most_weights())
        with safe_open(file, "pt") as opened:
            if (opened.metadata() or {}).get("mark") != mark:
                return None
            tensors: list[Tensor] = [opened.get_tensor(name) for name in Features._fields]
            return Features(*tensors)
    except (OSError, SafetensorError):
        return None


def _keep(file: Path, features: Features, mark: str) -> None:
    if features.features.nbytes > MOST_KEPT:
        return
    tensors = {name: each.contiguous() for name, each in features._asdict().items()}
    try:
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, save(tensors, metadata={"mark": mark}))
    except OSError as error:
        warn(f"the features are not cached: {file} cannot be written ({error.strerror}).")


def _tensors(features: Features, images: ImageSet) -> bytes:
    facts = {"classes": json.dumps(images.classes)} if images.classes else None
    tensors = {"features": features.features.contiguous(), "labels": features.labels}
    return save(tensors, metadata=facts)


def _array(features: Features) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, features.features.numpy())
    return buffer.getvalue()


def _csv(features: Features, names: list[str], classes: tuple[str, ...]) -> bytes:
    columns = [f"feature{number}" for number in range(features.features.shape[1])]
    rows: list[list[Any]] = [["name", "label", "class", *columns]]
    labels, vectors = features.labels.tolist(), features.features.tolist()
    for name, label, values in zip(names, labels, vectors, strict=True):
        title = classes[label] if 0 <= label < len(classes) else ""
        rows.append([name, label, title, *(f"{value:.9g}" for value in values)])
    return csv_bytes(rows)


def csv_bytes(rows: list[list[Any]]) -> bytes:
    """Return a table as CSV for spreadsheets, in UTF-8."""
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()
