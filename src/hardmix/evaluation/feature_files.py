"""`hardmix features` and `hardmix neighbours`: what an encoder makes of any folder of images."""

import csv
import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from safetensors.torch import save
from torch import Tensor
from torch.nn.functional import normalize

from hardmix.data.augment import evaluation_crop
from hardmix.data.datasets import ImageSet, open_images
from hardmix.data.image_files import read_image
from hardmix.errors import InputError
from hardmix.evaluation.features import Features, TrainedEncoder, extract, load_encoder
from hardmix.runtime.atomic_files import write_atomically
from hardmix.runtime.console import say
from hardmix.runtime.device import choose_compute
from hardmix.settings.config import DataConfig

FORMATS = (".safetensors", ".npy", ".csv")
TILE, LABEL = 128, 28
"""Pixels of a picture in a contact sheet, and of the text under it."""


def write_features(run: Path, data: DataConfig, out: Path) -> list[Path]:
    """Features of every image, in the order of their names, which stand in a file beside them.

    By the ending of `out`: .safetensors (features, labels), .npy (features), .csv (name, label,
    and a column for each feature).
    """
    if out.suffix not in FORMATS:
        raise InputError(f"--out {out}: its ending must be one of {', '.join(FORMATS)}.")
    if out.exists():
        raise InputError(f"--out {out} exists already: choose another name, or delete it.")
    features, images = _features_of(load_encoder(run), data)
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


def show_neighbours(
    run: Path, image: Path, data: DataConfig, out: Path, number: int
) -> list[tuple[str, float]]:
    """The images nearest to one, as a contact sheet: it comes first, then the most similar."""
    if number < 1:
        raise InputError(f"--number {number} is below 1: it counts the images to show.")
    encoder = load_encoder(run)
    with torch.no_grad():
        asked = encoder(encoder.preprocess(image)[None])
    features, images = _features_of(encoder, data)
    similarity = (normalize(features.features, dim=1) @ normalize(asked, dim=1).T)[:, 0]
    near = similarity.topk(min(number, len(similarity)))
    found = [
        (int(features.ids[row]), float(value))
        for row, value in zip(near.indices.tolist(), near.values.tolist(), strict=True)
    ]
    tiles = [_tile(read_image(image, encoder.channels), f"asked: {image.name}")]
    tiles += [
        _tile(images.image(index), f"{value:.3f} {_caption(images, index)}")
        for index, value in found
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    _sheet(tiles).save(buffer, "PNG")
    write_atomically(out, buffer.getvalue())
    for index, value in found:
        say(f"{value:.3f}  {images.name_of(index)}")
    say(f"Wrote {out}")
    return [(images.name_of(index), value) for index, value in found]


def _features_of(encoder: TrainedEncoder, data: DataConfig) -> tuple[Features, ImageSet]:
    images = open_images(data, "train")
    compute = choose_compute()
    encoder.to(compute.device)
    size = encoder.image_size
    features = extract(encoder, images, image_size=size, compute=compute, workers=data.workers)
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


def _caption(images: ImageSet, index: int) -> str:
    """Its class where it has one, else its name."""
    if images.labels is not None and images.classes and images.labels[index] >= 0:
        return images.classes[int(images.labels[index])]
    return Path(images.name_of(index)).name


def _tile(pixels: Tensor, label: str) -> Image.Image:
    """A picture with its text under it; of other than three channels the first one, in grey."""
    shown = pixels if len(pixels) == 3 else pixels[:1].expand(3, -1, -1)
    square = evaluation_crop(shown, TILE).permute(1, 2, 0).contiguous().numpy()
    tile = Image.new("RGB", (TILE, TILE + LABEL), "white")
    tile.paste(Image.fromarray(square), (0, 0))
    ImageDraw.Draw(tile).text((2, TILE + 6), label[:20], fill="black")
    return tile


def _sheet(tiles: list[Image.Image], columns: int = 6) -> Image.Image:
    rows = -(-len(tiles) // columns)
    gap = 6
    width = min(len(tiles), columns) * (TILE + gap) + gap
    sheet = Image.new("RGB", (width, rows * (TILE + LABEL + gap) + gap), "white")
    for number, tile in enumerate(tiles):
        row, column = divmod(number, columns)
        sheet.paste(tile, (gap + column * (TILE + gap), gap + row * (TILE + LABEL + gap)))
    return sheet
