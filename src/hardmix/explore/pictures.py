"""Thumbnails and sizes of all images, in one pass over the files."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from PIL import Image
from torch import Tensor

from hardmix.data.image_files import UnreadableImage, convert_image, read_image
from hardmix.data.image_set import ImageSet
from hardmix.data.workers import WorkerPool
from hardmix.runtime.console import progress

TILES = (128, 96, 64, 48, 32)
"""Pixels of a thumbnail's side. Multiples of 16, so that a codec's blocks hold one picture."""
ALL_PIXELS = 52_000_000
"""Most pixels of all thumbnails together: 50,000 of 32 pixels, 3,000 of 128."""
BATCH = 64


@dataclass(frozen=True, eq=False)
class Pictures:
    """Thumbnails and sizes of images, in the order of the features."""

    tiles: UInt8[np.ndarray, "n tile tile 3"]
    """Central square of each image; grey if it can no longer be read."""
    pixels: Int64[np.ndarray, " n"]
    """Width times height of the image itself."""
    bytes: Int64[np.ndarray, " n"]
    """Bytes of its file; 0 if it has none."""

    @property
    def tile(self) -> int:
        """Side of a thumbnail in pixels."""
        return int(self.tiles.shape[1])


def tile_for(number: int) -> int:
    """Return the largest side at which this many pictures stay within ALL_PIXELS."""
    return next((tile for tile in TILES if number * tile * tile <= ALL_PIXELS), TILES[-1])


def make_pictures(
    images: ImageSet, ids: Sequence[int], workers: int | None, tile: int | None = None
) -> Pictures:
    """Make the thumbnails of these images."""
    side = tile or tile_for(len(ids))
    if images.tensor is not None:
        side = min(side, max(TILES[-1], *images.tensor.shape[2:]))
    pool = WorkerPool(
        partial(_some, images, side),
        0 if images.tensor is not None else workers,
        torch.device("cpu"),
    )
    jobs = [list(ids[start : start + BATCH]) for start in range(0, len(ids), BATCH)]
    tiles = np.empty((len(ids), side, side, 3), np.uint8)
    sizes = np.zeros((len(ids), 2), np.int64)
    done = 0
    try:
        with progress("pictures", len(ids)) as meter:
            for pixels, facts in pool.run(jobs):
                some = slice(done, done + len(pixels))
                tiles[some], sizes[some] = pixels.numpy(), facts.numpy()
                done += len(pixels)
                meter.advance(done)
    finally:
        pool.close()
    return Pictures(tiles, sizes[:, 0].copy(), sizes[:, 1].copy())


def picture_of(file: Path, channels: int, tile: int) -> UInt8[np.ndarray, "tile tile 3"]:
    """Return the thumbnail of a file outside the set."""
    return _square(read_image(file, channels), tile)


def _some(images: ImageSet, tile: int, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Return a worker's part: thumbnails, and each image's pixels and file size."""
    tiles, sizes = [], []
    for index in ids:
        try:
            pixels, area = _read(images, index, tile)
            tiles.append(_square(pixels, tile))
        except UnreadableImage:
            area = 0
            tiles.append(np.full((tile, tile, 3), 128, np.uint8))
        file = images.files[index] if images.files is not None else ""
        sizes.append([area, os.path.getsize(file) if os.path.isfile(file) else 0])
    return torch.from_numpy(np.stack(tiles)), torch.tensor(sizes)


def _read(images: ImageSet, index: int, tile: int) -> tuple[UInt8[Tensor, "channels y x"], int]:
    """Return an image and its number of pixels. A JPEG is decoded at a fraction of its size."""
    if images.files is not None and images.read is read_image and images.channels == 3:
        try:
            with Image.open(images.files[index], formats=("JPEG",)) as image:
                area = math.prod(image.size)
                image.draft("RGB", (2 * tile, 2 * tile))
                return convert_image(image), area
        except Exception:  # another format, or damaged: the general reader reports it
            pass
    pixels = images.image(index)
    return pixels, math.prod(pixels.shape[1:])


def _square(image: UInt8[Tensor, "channels y x"], tile: int) -> UInt8[np.ndarray, "tile tile 3"]:
    """Return the central square; in grey unless there are three channels."""
    three = image if len(image) == 3 else image[:1].expand(3, -1, -1)
    side = min(three.shape[1:])
    top, left = (three.shape[1] - side) // 2, (three.shape[2] - side) // 2
    square = three[:, top : top + side, left : left + side].permute(1, 2, 0).contiguous().numpy()
    if side != tile:
        way = Image.Resampling.LANCZOS if side > tile else Image.Resampling.BICUBIC
        square = np.asarray(Image.fromarray(square).resize((tile, tile), way))
    return square
