"""`hardmix features`: what an encoder makes of any folder of images, as a file."""

import csv
import io
from pathlib import Path

import numpy as np
from safetensors.torch import save

from hardmix.data.datasets import ImageSet, open_images
from hardmix.errors import InputError
from hardmix.evaluation.features import Features, TrainedEncoder, extract, load_encoder
from hardmix.runtime.atomic_files import write_atomically
from hardmix.runtime.console import say
from hardmix.runtime.device import choose_compute
from hardmix.settings.config import DataConfig

FORMATS = (".safetensors", ".npy", ".csv")


def write_features(run: Path, data: DataConfig, out: Path) -> list[Path]:
    """Features of every image, in the order of their names, which stand in a file beside them.

    By the ending of `out`: .safetensors (features, labels), .npy (features), .csv (name, label,
    and a column for each feature).
    """
    if out.suffix not in FORMATS:
        raise InputError(f"--out {out}: its ending must be one of {', '.join(FORMATS)}.")
    if out.exists():
        raise InputError(f"--out {out} exists already: choose another name, or delete it.")
    features, images = features_of(load_encoder(run), data)
    names = [images.name_of(number) for number in features.ids.tolist()]
    out.parent.mkdir(parents=True, exist_ok=True)
    written = [out]
    if out.suffix == ".csv":
        write_atomically(out, _csv(features, names))
    else:
        listing = out.with_suffix(".names.txt")
        write_atomically(listing, "".join(f"{name}\n" for name in names).encode())
        write_atomically(out, _tensors(features) if out.suffix != ".npy" else _array(features))
        written.append(listing)
    say(f"{len(names)} images, {features.features.shape[1]} features each. Wrote {written[0]}")
    return written


def features_of(encoder: TrainedEncoder, data: DataConfig) -> tuple[Features, ImageSet]:
    """Features of every training image of a data set, and the set."""
    images = open_images(data, "train")
    compute = choose_compute(precision="fp32")
    features = extract(encoder.to(compute.device), images, data, compute=compute)
    encoder.to("cpu")
    return features, images


def _tensors(features: Features) -> bytes:
    return save({"features": features.features.contiguous(), "labels": features.labels})


def _array(features: Features) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, features.features.numpy())
    return buffer.getvalue()


def _csv(features: Features, names: list[str]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text)
    columns = [f"feature{number}" for number in range(features.features.shape[1])]
    writer.writerow(["name", "label", *columns])
    rows = zip(names, features.labels.tolist(), features.features.tolist(), strict=True)
    for name, label, values in rows:
        writer.writerow([name, label, *(f"{value:.9g}" for value in values)])
    return text.getvalue().encode()
