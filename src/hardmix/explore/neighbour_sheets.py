"""Images next to their nearest neighbours: at the top of a report, and as a contact sheet.

A report shows sample images; `hardmix neighbours RUN IMAGE` writes a sheet of the images most
similar to one. The features are the trunk's, minus their mean in a report: the space in which
`hardmix explore` searches, and not the head's embedding, in which negatives are compared during
training.
"""

import base64
import hashlib
import io
import json
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, Int64, UInt8
from PIL import Image, ImageDraw
from torch import Tensor

from hardmix.data.crops import evaluation_crop
from hardmix.data.image_files import read_image
from hardmix.data.image_set import ImageSet
from hardmix.data.sources import open_images
from hardmix.data.thumbnails import class_of, file_of, sample_ids, thumbnail_of
from hardmix.errors import InputError
from hardmix.evaluation.features import Features, features_of, kept_file
from hardmix.evaluation.trained_encoder import TrainedEncoder, load_encoder, weights_hash
from hardmix.explore.clustering import clusters, distinct_names
from hardmix.explore.neighbourhoods import centred, neighbours
from hardmix.runs.folder import Run, versions
from hardmix.runtime.console import say
from hardmix.runtime.files import read_json, write_atomically
from hardmix.settings.config import DataConfig

FILE = "neighbours.json"
"""Name in RUN/figures of the neighbours for a report."""
QUERIES, NEAR = 8, 8
"""Sample images in a report, and neighbours of each."""
CLUSTERS = 12
"""Clusters in a report."""
TRIED = 4
"""Images drawn for each row; those that an earlier row shows are passed over."""
QUERY_PIXELS, NEAR_PIXELS = 256, 192
"""Sides of the thumbnails: twice as many pixels as on a page, for sharp screens."""
MOST_IMAGES = 20_000
"""Most images to search, unless the features of all of them are in RUN/features."""
LIVE_IMAGES = 2_000
"""Most images to search while the run is training."""
TILE, LABEL = 128, 28
"""Pixels of a picture in a contact sheet, and of the text under it."""


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
    facts: dict[str, Any] = {
        "title": "Sample images and their nearest neighbours",
        "caption": _caption(len(features.ids), images),
        "mark": mark,
        "numbers": {"queries": feature_gallery(features, images, config.train.seed)},
    }
    if config.recipe == "photos" and not live:
        facts["clusters"] = cluster_gallery(features, images)
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
    places = _varied(drawn, near.indices)[:QUERIES]
    return [_row(features, images, drawn[n], near.indices[n], near.similarities[n]) for n in places]


def cluster_gallery(features: Features, images: ImageSet) -> list[dict[str, Any]]:
    """Return the largest clusters, each with its most typical images; none without scikit-learn."""
    vectors, ids = centred(features.features), features.ids.tolist()
    try:
        grouped = clusters(vectors)
    except InputError:
        return []
    files = [images.name_of(index) for index in ids]
    names = distinct_names(grouped, files, features.labels.numpy(), images.classes or ())
    rows = []
    for cluster, name in enumerate(names[:CLUSTERS]):
        members = grouped.members(cluster)
        typical = [_image(images, ids[row], NEAR_PIXELS) for row in members[:NEAR]]
        rows.append({"name": name, "size": len(members), "images": typical})
    return rows


def _varied(drawn: list[int], near: Int64[np.ndarray, "n k"]) -> list[int]:
    """Return places in `drawn`: first those of images that no row before them shows."""
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
    pairs = zip(indices.tolist(), similarities.tolist(), strict=True)
    others = [(other, similarity) for other, similarity in pairs if other != row]
    return _image(images, index, QUERY_PIXELS) | {
        "near": [
            _image(images, ids[other], NEAR_PIXELS) | {"similarity": round(similarity, 4)}
            for other, similarity in others[:NEAR]
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
    """Return all of the data if it is small or its features are cached, otherwise a part."""
    most = LIVE_IMAGES if live else MOST_IMAGES
    if not live and kept_file(run.path, data).exists():
        return data
    return data if len(open_images(data, "train")) <= most else replace(data, num_images=most)


def _mark(encoder: TrainedEncoder, data: DataConfig, live: bool) -> str:
    """Return a hash of the encoder and of the images that are searched."""
    digest = hashlib.sha256(repr((data.name, data.root, live, versions()["hardmix"])).encode())
    digest.update(weights_hash(encoder).encode())
    return digest.hexdigest()[:16]


def _mark_of(file: Path) -> str:
    try:
        return str(read_json(file)["mark"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""  # missing or damaged, so it is made again


def show_neighbours(
    run: Path, image: Path, data: DataConfig, out: Path, number: int
) -> list[tuple[str, float]]:
    """Write a contact sheet of an image and the most similar ones; return their names."""
    if number < 1:
        raise InputError(f"number={number} must be at least 1: the number of images to show.")
    if out.is_dir():
        raise InputError(f"out={out} is a folder: name a file for the contact sheet.")
    encoder = load_encoder(run, or_checkpoint=True)
    with torch.no_grad():
        asked = encoder(encoder.preprocess(image)[None])
    features, images = features_of(run, data, encoder)
    near = neighbours(features.features, number, queries=asked)
    similar = [
        (int(features.ids[row]), float(value))
        for row, value in zip(near.indices[0], near.similarities[0], strict=True)
    ]
    tiles = [tile_of(read_image(image, encoder.channels), f"query: {image.name}")]
    tiles += [
        tile_of(images.image(index), f"{value:.3f} {_class_or_name(images, index)}")
        for index, value in similar
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    sheet_of(tiles).save(buffer, "PNG")
    write_atomically(out, buffer.getvalue())
    for index, value in similar:
        say(f"{value:.3f}  {images.name_of(index)}")
    say(f"Wrote {out}")
    return [(images.name_of(index), value) for index, value in similar]


def _class_or_name(images: ImageSet, index: int) -> str:
    """Return an image's class if it has one, otherwise its name."""
    if images.labels is not None and images.classes and images.labels[index] >= 0:
        return images.classes[int(images.labels[index])]
    return Path(images.name_of(index)).name


def tile_of(pixels: UInt8[Tensor, "channels y x"], label: str) -> Image.Image:
    """Return a picture with text below it, in grey unless it has three channels."""
    shown = pixels if len(pixels) == 3 else pixels[:1].expand(3, -1, -1)
    square = evaluation_crop(shown, TILE).permute(1, 2, 0).contiguous().numpy()
    tile = Image.new("RGB", (TILE, TILE + LABEL), "white")
    tile.paste(Image.fromarray(square), (0, 0))
    ImageDraw.Draw(tile).text((2, TILE + 6), label[:20], fill="black")
    return tile


def sheet_of(tiles: list[Image.Image], columns: int = 6) -> Image.Image:
    """Return a contact sheet, row by row."""
    rows = -(-len(tiles) // columns)
    gap = 6
    width = min(len(tiles), columns) * (TILE + gap) + gap
    sheet = Image.new("RGB", (width, rows * (TILE + LABEL + gap) + gap), "white")
    for number, tile in enumerate(tiles):
        row, column = divmod(number, columns)
        sheet.paste(tile, (gap + column * (TILE + gap), gap + row * (TILE + LABEL + gap)))
    return sheet


def sheet_html(title: str, tiles: list[Image.Image], columns: int = 6) -> str:
    """Return a title and a contact sheet for a notebook; empty without tiles."""
    if not tiles:
        return ""
    buffer = io.BytesIO()
    sheet_of(tiles, columns).save(buffer, "WEBP", quality=80)
    source = "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()
    return f"<p>{escape(title)}</p><img alt='{escape(title)}' src='{source}'>"
