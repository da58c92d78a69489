"""Sample images next to those with the most similar features, for the top of a report.

The features are the trunk's, minus their mean: the space in which `hardmix explore` and `hardmix
neighbours` search, and not the head's embedding in which negatives are compared during training.
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, Int64

from hardmix.data.datasets import open_images
from hardmix.data.image_set import ImageSet
from hardmix.data.sample_images import class_of, file_of, sample_ids
from hardmix.data.thumbnails import thumbnail_of
from hardmix.errors import InputError
from hardmix.evaluation.feature_files import add_weights, features_of, kept_file
from hardmix.evaluation.features import Features, TrainedEncoder, load_encoder
from hardmix.explore.nearest import centred, neighbours
from hardmix.runs.folder import Run, versions
from hardmix.runtime.atomic_files import write_atomically
from hardmix.settings.config import DataConfig
from hardmix.settings.saved import read_json

FILE = "neighbours.json"
"""Its name in RUN/figures."""
QUERIES = 8
NEAR = 8
TRIED = 4
"""Images drawn for each row: one that an earlier row shows is passed over."""
QUERY_PIXELS, NEAR_PIXELS = 256, 192
"""Sides of the thumbnails: twice as many pixels as on a page, for sharp screens."""
MOST_IMAGES = 20_000
"""Most images to search, unless the features of all of them are in RUN/features."""
LIVE_IMAGES = 2_000
"""Most images to search while the run is training."""


def write_feature_gallery(run: Run, *, live: bool = False) -> Path:
    """Write RUN/figures/neighbours.json, unless it is up to date.

    Raises InputError if the run has no encoder or its images cannot be read. The encoder of an
    unfinished run is that of its last checkpoint; while it trains (`live`), fewer images are
    searched.
    """
    file = run.figures / FILE
    encoder = load_encoder(run.path, or_checkpoint=True)
    config = run.config()
    mark = _mark(encoder, config.data, live)
    if _mark_of(file) == mark:
        return file
    data = _searched(run, config.data, live)
    features, images = features_of(run.path, data, encoder)
    if len(features.ids) < 2:
        raise InputError("it takes at least 2 readable images.")
    facts = {
        "title": "Sample images and their nearest neighbours",
        "caption": _caption(len(features.ids), images),
        "mark": mark,
        "numbers": {"queries": feature_gallery(features, images, config.train.seed)},
    }
    try:
        run.figures.mkdir(exist_ok=True)
        write_atomically(file, json.dumps(facts, allow_nan=False).encode())
    except OSError as error:
        raise InputError(f"{file} cannot be written: {error.strerror}.") from error
    return file


def feature_gallery(features: Features, images: ImageSet, seed: int) -> list[dict[str, Any]]:
    """Return sample images, each with its nearest ones and their cosine similarities."""
    vectors = centred(features.features)
    rows = {index: row for row, index in enumerate(features.ids.tolist())}
    drawn = [rows[index] for index in sample_ids(images, seed, TRIED * QUERIES) if index in rows]
    # One more than shown: the nearest of all is the image itself.
    near = neighbours(vectors, NEAR + 1, queries=vectors[torch.tensor(drawn)])
    chosen = _varied(drawn, near.indices)[:QUERIES]
    return [_row(features, images, drawn[n], near.indices[n], near.similarities[n]) for n in chosen]


def _varied(drawn: list[int], near: Int64[np.ndarray, "n k"]) -> list[int]:
    """Return places in `drawn`: first those that no row before them shows, then the others."""
    shown: set[int] = set()
    first, later = [], []
    for place, row in enumerate(drawn):
        if row in shown:
            later.append(place)
        else:
            first.append(place)
            shown |= set(near[place].tolist())
    return first + later


def _row(
    features: Features,
    images: ImageSet,
    row: int,
    indices: Int64[np.ndarray, " k"],
    similarities: Float32[np.ndarray, " k"],
) -> dict[str, Any]:
    ids, index = features.ids.tolist(), int(features.ids[row])
    found = [(int(i), float(s)) for i, s in zip(indices, similarities, strict=True) if i != row]
    return _image(images, index, QUERY_PIXELS) | {
        "near": [
            _image(images, ids[other], NEAR_PIXELS) | {"similarity": round(similarity, 4)}
            for other, similarity in found[:NEAR]
        ]
    }


def _image(images: ImageSet, index: int, pixels: int) -> dict[str, Any]:
    return {
        "id": index,
        "name": images.name_of(index),
        "file": file_of(images, index),
        "image": thumbnail_of(images, index, pixels),
        "label": class_of(images, index),
    }


def _caption(number: int, images: ImageSet) -> str:
    return (
        f"Images drawn at random and unlike each other, each with the nearest of {number:,}"
        f" training images of {images.name}. The number is the cosine similarity of the features"
        " after subtracting their mean: 1 for the same image, about 0 for unrelated ones."
    )


def _searched(run: Run, data: DataConfig, live: bool) -> DataConfig:
    """Return all of the data if it is small or its features are kept, otherwise a part."""
    most = LIVE_IMAGES if live else MOST_IMAGES
    if not live and kept_file(run.path, data).exists():
        return data
    return data if len(open_images(data, "train")) <= most else replace(data, num_images=most)


def _mark(encoder: TrainedEncoder, data: DataConfig, live: bool) -> str:
    """Return a hash of the encoder and of the images that are searched."""
    digest = hashlib.sha256(repr((data.name, data.root, live, versions()["hardmix"])).encode())
    add_weights(digest, encoder)
    return digest.hexdigest()[:16]


def _mark_of(file: Path) -> str:
    try:
        return str(read_json(file)["mark"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""  # missing or damaged: it is made again
