"""Features as files: those of `hardmix features`, and those cached in a run's folder."""

import csv
import hashlib
import io
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from hardmix.data.changed_data import fingerprint
from hardmix.data.datasets import data_name, open_images
from hardmix.data.image_set import ImageSet
from hardmix.errors import InputError
from hardmix.evaluation.features import Features, TrainedEncoder, extract, load_encoder
from hardmix.runs.folder import Run, versions
from hardmix.runtime.atomic_files import write_atomically
from hardmix.runtime.console import say, visible, warn
from hardmix.runtime.device import choose_compute
from hardmix.runtime.distributed import agree_on_max
from hardmix.settings.bounded_files import check_file, most_weights
from hardmix.settings.config import DataConfig

FORMATS = (".safetensors", ".npy", ".csv")
MOST_KEPT = 4 * 2**30
"""Most bytes of features cached in a run's folder: a million images of 1,024 features."""


def write_features(run: Path, data: DataConfig, out: Path) -> list[Path]:
    """Write the features of every image; returns the files written.

    The suffix of `out` sets the format: .csv (name, label, class, and a column for each feature),
    .npy (features), or .safetensors (features and labels, with the classes' names in its metadata).
    For the latter two, the images' names go to a .names.txt of the same name.
    """
    if out.suffix not in FORMATS:
        raise InputError(f"out={out} must end in one of {', '.join(FORMATS)}.")
    if out.exists():
        raise InputError(f"out={out} already exists: choose another name, or delete it.")
    features, images = features_of(run, data)
    names = [images.name_of(number) for number in features.ids.tolist()]
    out.parent.mkdir(parents=True, exist_ok=True)
    written = [out]
    if out.suffix == ".csv":
        write_atomically(out, _csv(features, names, images.classes or ()))
    else:
        listing = out.with_suffix(".names.txt")
        write_atomically(listing, "".join(f"{visible(name)}\n" for name in names).encode())
        made = _array(features) if out.suffix == ".npy" else _tensors(features, images)
        write_atomically(out, made)
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
    if data.channels != encoder.channels:
        raise InputError(
            f"data.channels={data.channels}, but {run} was trained on images of"
            f" {encoder.channels} channels: use such images."
        )
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
    """Return a hash of everything that features depend on, including the files' times."""
    digest = hashlib.sha256(fingerprint(images).encode())
    for file in images.files or ():
        try:
            digest.update(b"%d " % os.stat(file).st_mtime_ns)
        except OSError:
            digest.update(b"- ")
    add_weights(digest, encoder)
    rest = encoder.backbone, encoder.image_size, data.image_size, images.max_pixels
    digest.update(repr((*rest, versions()["hardmix"])).encode())
    return digest.hexdigest()


def add_weights(digest: "hashlib._Hash", encoder: TrainedEncoder) -> None:
    """Add the encoder's weights to a hash."""
    for name, tensor in encoder.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().numpy().tobytes())


def _read_kept(file: Path, mark: str) -> Features | None:
    """Return the cached features; None if missing, damaged, or of other images."""
    try:
        check_file(file, most_weights())
        with safe_open(file, "pt") as opened:
            if (opened.metadata() or {}).get("mark") != mark:
                return None
            found: list[Tensor] = [opened.get_tensor(name) for name in Features._fields]
            return Features(*found)
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
    found = zip(names, features.labels.tolist(), features.features.tolist(), strict=True)
    for name, label, values in found:
        known = classes[label] if 0 <= label < len(classes) else ""
        rows.append([name, label, known, *(f"{value:.9g}" for value in values)])
    return csv_bytes(rows)


def csv_bytes(rows: list[list[Any]]) -> bytes:
    """Return a table as CSV for spreadsheets, in UTF-8."""
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()
