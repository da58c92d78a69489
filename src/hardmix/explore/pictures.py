"""Thumbnails, sizes and plain measures of all images, made in one pass over their files.

Files are read at their own size, or, if they are large JPEGs, decoded at a fraction of it: not as
the encoder sees them, which may be reduced to a few pixels.
"""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float32, Float64, Int64, UInt8
from PIL import Image
from torch import Tensor

from hardmix.data.image_files import UnreadableImage, fit_channels, read_image
from hardmix.data.image_set import ImageSet
from hardmix.data.thumbnails import original
from hardmix.data.workers import WorkerPool
from hardmix.runtime.console import progress

TILES = (256, 192, 128, 96, 64, 48, 32)
"""Pixels of a thumbnail's side. Multiples of 16, so that a codec's blocks hold one picture."""
ALL_PIXELS = 52_000_000
"""Most pixels of all thumbnails together: 50,000 of 32 pixels, 3,000 of 128."""
READ = 256
"""Shorter side in pixels to which images are reduced before they are measured."""
GREY = 64
"""Side in pixels of the grey pictures that are searched for copies."""
BATCH = 64
EVEN = 6.0
"""Largest deviation in grey values within a border of one colour."""
WHITE = 253
"""Grey value above which a pixel is white; it is black as far from the other end."""
WIDEST = 0.25
"""Widest border, as a share of the side."""
TAPS = 9
"""Pixels over which an image is blurred to learn how sharp it was."""
MEASURES = (
    "width",
    "height",
    "bytes",
    "blur",
    "mean",
    "low",
    "high",
    "contrast",
    "clipped",
    "border",
)


class Pictures:
    """Thumbnails and measures of images, in the order of the features."""

    def __init__(
        self,
        tiles: UInt8[np.ndarray, "n tile tile 3"],
        greys: UInt8[np.ndarray, "n side side"],
        measures: Float64[np.ndarray, "n measures"],
    ) -> None:
        self.tiles = tiles
        """Central square of each image; grey if it can no longer be read."""
        self.greys = greys
        """Each whole image in grey, as a square."""
        width, height, size = (measures[:, n].astype(np.int64) for n in range(3))
        self.width, self.height = width, height
        """Size of the image itself in pixels; 0 if it can no longer be read."""
        self.bytes = size
        """Bytes of its file; 0 if it has none."""
        self.blur, self.mean, self.low, self.high, self.contrast, self.clipped, self.border = (
            measures[:, n].astype(np.float32) for n in range(3, len(MEASURES))
        )
        """How blurred an image is, 0 to 1; mean, 5th and 95th percentile and deviation of the grey
        values; the share that is black or white; the share of a border of one colour."""

    def __len__(self) -> int:
        return len(self.tiles)

    @property
    def tile(self) -> int:
        """Side of a thumbnail in pixels."""
        return int(self.tiles.shape[1])

    @property
    def pixels(self) -> Int64[np.ndarray, " n"]:
        """Width times height of each image."""
        return self.width * self.height


def tile_for(number: int) -> int:
    """Return the largest side at which this many pictures stay within ALL_PIXELS."""
    return next((tile for tile in TILES if number * tile * tile <= ALL_PIXELS), TILES[-1])


def make_pictures(
    images: ImageSet, ids: Sequence[int], workers: int | None, tile: int | None = None
) -> Pictures:
    """Make the thumbnails of these images, and measure them."""
    side = tile or tile_for(len(ids))
    if images.tensor is not None:
        side = min(side, max(TILES[-1], *images.tensor.shape[2:]))
    pool = WorkerPool(
        partial(_read_pictures, images, side),
        0 if images.tensor is not None else workers,
        torch.device("cpu"),
    )
    jobs = [list(ids[start : start + BATCH]) for start in range(0, len(ids), BATCH)]
    tiles = np.empty((len(ids), side, side, 3), np.uint8)
    greys = np.empty((len(ids), GREY, GREY), np.uint8)
    measures = np.zeros((len(ids), len(MEASURES)))
    done = 0
    try:
        with progress("pictures", len(ids)) as meter:
            for squares, wholes, numbers in pool.run(jobs):
                part = slice(done, done + len(squares))
                tiles[part], greys[part] = squares.numpy(), wholes.numpy()
                measures[part] = numbers.numpy()
                done += len(squares)
                meter.advance(done)
    finally:
        pool.close()
    return Pictures(tiles, greys, measures)


def picture_of(file: Path, channels: int, tile: int) -> UInt8[np.ndarray, "tile tile 3"]:
    """Return the thumbnail of a file outside the set."""
    return _square(_three_bands(read_image(file, channels)), tile)


def _read_pictures(
    images: ImageSet, tile: int, ids: list[int]
) -> tuple[UInt8[Tensor, "m tile tile 3"], UInt8[Tensor, "m side side"], Tensor]:
    """Return the thumbnails, grey pictures and measures of a worker's part."""
    tiles = np.full((len(ids), tile, tile, 3), 128, np.uint8)
    greys = np.full((len(ids), GREY, GREY), 128, np.uint8)
    measures = np.zeros((len(ids), len(MEASURES)))
    for row, index in enumerate(ids):
        file = images.files[index] if images.files is not None else ""
        measures[row, 2] = os.path.getsize(file) if os.path.isfile(file) else 0
        try:
            image, size = _read(images, index, file)
        except UnreadableImage:
            continue
        bands = _three_bands(image)
        tiles[row] = _square(bands, tile)
        grey = Image.fromarray(bands).convert("L")
        greys[row] = np.asarray(grey.resize((GREY, GREY), Image.Resampling.LANCZOS))
        measures[row, :2] = size
        measures[row, 3:] = [*_look_of(np.asarray(grey, np.float32)), border_of(greys[row])]
    return torch.from_numpy(tiles), torch.from_numpy(greys), torch.from_numpy(measures)


def _read(
    images: ImageSet, index: int, file: str
) -> tuple[UInt8[Tensor, "channels y x"], tuple[int, int]]:
    """Return an image, and the width and height that it has in its file."""
    image = original(images, index, READ)
    size = _size_in(file) if file else None
    if size is None:
        return image, (image.shape[2], image.shape[1])
    # Turned as the camera was held: the sides may be exchanged.
    lying = (size[0] > size[1]) == (image.shape[2] > image.shape[1])
    return image, size if lying else (size[1], size[0])


def _size_in(file: str) -> tuple[int, int] | None:
    try:
        with Image.open(file) as image:
            return image.size
    except Exception:  # not a format of Pillow's, such as an array
        return None


def _three_bands(image: UInt8[Tensor, "channels y x"]) -> UInt8[np.ndarray, "y x 3"]:
    """Return an image for the eye: in grey unless there are three channels."""
    three = fit_channels(image.numpy() if len(image) == 3 else image[:1].numpy(), 3)
    return np.ascontiguousarray(three.transpose(1, 2, 0))


def _square(bands: UInt8[np.ndarray, "y x 3"], tile: int) -> UInt8[np.ndarray, "tile tile 3"]:
    """Return the central square."""
    side = min(bands.shape[:2])
    top, left = (bands.shape[0] - side) // 2, (bands.shape[1] - side) // 2
    square = np.ascontiguousarray(bands[top : top + side, left : left + side])
    if side != tile:
        way = Image.Resampling.LANCZOS if side > tile else Image.Resampling.BICUBIC
        square = np.asarray(Image.fromarray(square).resize((tile, tile), way))
    return square


def _look_of(grey: Float32[np.ndarray, "y x"]) -> tuple[float, ...]:
    """Return the measures from blur to clipped."""
    low, high = np.percentile(grey, (5, 95))
    clipped = ((grey > WHITE) | (grey < 255 - WHITE)).mean()
    return (
        blur_of(grey),
        *map(float, (grey.mean(), low, high, grey.std(), clipped)),
    )


def blur_of(grey: Float32[np.ndarray, "y x"]) -> float:
    """Return how little of the steps between neighbouring pixels is lost by blurring: 0 to 1.

    A sharp image loses most of them, one that is blurred already keeps them (Crete et al. 2007).
    """
    results = []
    for values in (grey, grey.T):
        if values.shape[1] <= TAPS:
            continue
        sums = np.cumsum(np.pad(values, ((0, 0), (1, 0))), axis=1, dtype=np.float64)
        blurred = (sums[:, TAPS:] - sums[:, :-TAPS]) / TAPS
        steps = np.abs(np.diff(values[:, TAPS // 2 : -(TAPS // 2)], axis=1))
        lost = np.maximum(0, steps - np.abs(np.diff(blurred, axis=1)))
        total = float(steps.sum())
        results.append(1 - float(lost.sum()) / total if total > 0 else 0.0)
    return max(results, default=0.0)


def border_of(grey: UInt8[np.ndarray, "side side"]) -> float:
    """Return the share of a picture that is a border of one colour on opposite sides; or 0."""
    values = grey.astype(np.float32)
    left = 1.0
    for lines in (values, values.T):
        most = int(WIDEST * len(lines))
        before, behind = (_even_lines(side, most) for side in (lines, lines[::-1]))
        if before and behind and abs(float(lines[0].mean() - lines[-1].mean())) < 2 * EVEN:
            left *= 1 - (before + behind) / len(lines)
    return 1 - left


def _even_lines(lines: Float32[np.ndarray, "side side"], most: int) -> int:
    """Return how many lines from the first on have its one colour; 0 if that is most of them."""
    first = float(lines[0].mean())
    uneven = np.abs(lines - first).max(axis=1) > 2 * EVEN
    number = int(uneven.argmax()) if uneven.any() else len(lines)
    return number if number <= most else 0
