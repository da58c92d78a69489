"""`hardmix neighbours RUN IMAGE`: the images most similar to one, as a contact sheet."""

import io
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from hardmix.data.augment import evaluation_crop
from hardmix.data.image_files import read_image
from hardmix.data.image_set import ImageSet
from hardmix.errors import InputError
from hardmix.evaluation.feature_files import features_of
from hardmix.evaluation.features import load_encoder
from hardmix.explore.nearest import neighbours
from hardmix.runtime.atomic_files import write_atomically
from hardmix.runtime.console import say
from hardmix.settings.config import DataConfig

TILE, LABEL = 128, 28
"""Pixels of a picture in a contact sheet, and of the text under it."""


def show_neighbours(
    run: Path, image: Path, data: DataConfig, out: Path, number: int
) -> list[tuple[str, float]]:
    """Write a contact sheet of an image and the most similar ones, which are returned."""
    if number < 1:
        raise InputError(f"number={number} must be at least 1: the number of images to show.")
    if out.is_dir():
        raise InputError(f"out={out} is a folder: name a file for the contact sheet.")
    encoder = load_encoder(run, or_checkpoint=True)
    with torch.no_grad():
        asked = encoder(encoder.preprocess(image)[None])
    features, images = features_of(run, data, encoder)
    near = neighbours(features.features, number, queries=asked)
    found = [
        (int(features.ids[row]), float(value))
        for row, value in zip(near.indices[0], near.similarities[0], strict=True)
    ]
    tiles = [_tile(read_image(image, encoder.channels), f"query: {image.name}")]
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


def _caption(images: ImageSet, index: int) -> str:
    """Return an image's class if it has one, otherwise its name."""
    if images.labels is not None and images.classes and images.labels[index] >= 0:
        return images.classes[int(images.labels[index])]
    return Path(images.name_of(index)).name


def _tile(pixels: Tensor, label: str) -> Image.Image:
    """Return a picture with text below it; in grey unless it has three channels."""
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
