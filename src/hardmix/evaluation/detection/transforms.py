"""From an image file and its objects to a detector's input, and from many to batches.

In detectron2's order: shortest side to a random length, by Pillow's bilinear filter, then a flip.
Every random choice is a function of (seed, epoch, image).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64, Int64, UInt8
from PIL import Image
from torch import Tensor

from hardmix.data.image_files import UnreadableImage, printable, read_image
from hardmix.data.workers import WorkerPool
from hardmix.errors import InputError
from hardmix.evaluation.detection.samples import (
    Bitmap,
    DetectionImage,
    Mask,
    Rle,
    decode_mask,
)
from hardmix.runtime.console import progress
from hardmix.runtime.random_numbers import permutation, seed_of, uniform

LONGEST = 1333
"""Limit of the longest side in pixels; both sides shrink to meet it."""

_SMALLEST = 1e-5
"""Boxes of smaller width or height count as empty."""


class Geometry(NamedTuple):
    """How one image is transformed: its new size, and whether it is mirrored."""

    height: int
    width: int
    flip: bool


@dataclass(frozen=True, eq=False)
class DetectorInput:
    """One image as a detector gets it, and the objects in it."""

    sample: DetectionImage
    """The original image, whose size detections refer to."""
    image: UInt8[Tensor, "3 height width"]
    boxes: Float32[Tensor, "objects 4"]
    classes: Int64[Tensor, " objects"]
    masks: Bool[Tensor, "objects height width"] | None = None


def training_input(
    sample: DetectionImage, sides: Sequence[int], seed: int, epoch: int, with_masks: bool = False
) -> DetectorInput:
    """Return an image resized and perhaps mirrored, without crowds and vanished objects.

    Masks are bitmaps of the resized image. A polygon too thin for any pixel has an empty one and
    keeps its box, as in detectron2's MASK_FORMAT "polygon".
    """
    geometry = draw_geometry(sample, sides, seed, epoch)
    image, kept = _image(sample, geometry), ~sample.crowd
    boxes = move_boxes(sample, geometry)
    kept &= ((boxes[:, 2:] - boxes[:, :2]) > _SMALLEST).all(axis=1)
    masks = None
    if with_masks:
        bitmaps = np.zeros((len(boxes), geometry.height, geometry.width), dtype=np.bool_)
        for number in np.flatnonzero(kept):
            mask = _masks_of(sample)[number]
            bitmaps[number] = move_mask(mask, sample, geometry)
            kept[number] = bitmaps[number].any() or not isinstance(mask, Rle)
        masks = torch.from_numpy(bitmaps[kept])
    return DetectorInput(
        sample,
        image,
        torch.from_numpy(boxes[kept].astype(np.float32)),
        torch.from_numpy(sample.classes[kept]),
        masks,
    )


def plain_input(sample: DetectionImage, side: int) -> DetectorInput:
    """Return a test image: resized only, and without objects."""
    geometry = Geometry(*resized(sample.height, sample.width, side), flip=False)
    nothing = torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)
    return DetectorInput(sample, _image(sample, geometry), *nothing)


def draw_geometry(sample: DetectionImage, sides: Sequence[int], seed: int, epoch: int) -> Geometry:
    """Draw one of `sides` for the shortest side, and a flip with probability 1/2."""
    numbers = torch.tensor([sample.number])
    side, flip = uniform(seed_of("detection", seed), epoch, numbers, 0, 2)[0].tolist()
    size = resized(sample.height, sample.width, sides[int(side * len(sides))])
    return Geometry(*size, flip=flip < 0.5)


def resized(height: int, width: int, side: int, longest: int = LONGEST) -> tuple[int, int]:
    """Return height and width for a shortest side and a limit of the longest, rounded."""
    scale = side / min(height, width)
    sizes = [side if value == min(height, width) else value * scale for value in (height, width)]
    shrink = min(1.0, longest / max(sizes))
    return int(sizes[0] * shrink + 0.5), int(sizes[1] * shrink + 0.5)


def move_boxes(sample: DetectionImage, geometry: Geometry) -> Float64[np.ndarray, "objects 4"]:
    """Return the boxes in the resized image, clipped to it."""
    size = np.array([geometry.width, geometry.height], dtype=np.float64)
    corners = sample.boxes.reshape(-1, 2, 2) * (size / (sample.width, sample.height))
    if geometry.flip:
        corners[:, :, 0] = geometry.width - corners[:, ::-1, 0]
    return np.clip(corners, 0, size).reshape(-1, 4)


def move_mask(mask: Mask, sample: DetectionImage, geometry: Geometry) -> Bitmap:
    """Return a mask in the resized image: polygons by their corners, run lengths by pixel."""
    height, width, flip = geometry
    if isinstance(mask, Rle):
        pixels = Image.fromarray(decode_mask(mask, mask.height, mask.width).astype(np.uint8))
        moved = np.asarray(pixels.resize((width, height), Image.Resampling.NEAREST)) > 0
        return moved[:, ::-1] if flip else moved
    scale = np.array([width / sample.width, height / sample.height])
    polygons = [polygon * scale for polygon in mask]
    if flip:
        for polygon in polygons:
            polygon[:, 0] = width - polygon[:, 0]
    return decode_mask(tuple(polygons), height, width)


def grouped_batches(
    images: Sequence[DetectionImage], batch: int, seed: int, rank: int = 0, processes: int = 1
) -> Iterator[list[tuple[int, int]]]:
    """Yield batches endlessly, each of only wide or only tall images, to save padding.

    An entry is (epoch, position in `images`). An epoch's order is a function of (seed, epoch);
    its remainder is used in the next epoch, so that batches are full and no image is lost.
    Several processes share one stream.
    """
    if batch < 1 or not images:
        raise InputError(f"batch={batch} of {len(images)} images: both must be at least 1.")
    waiting: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for entry in islice(_visits(len(images), seed), rank, None, processes):
        wide = images[entry[1]].width > images[entry[1]].height
        waiting[wide].append(entry)
        if len(waiting[wide]) == batch:
            yield waiting[wide]
            waiting[wide] = []


def _visits(number: int, seed: int) -> Iterator[tuple[int, int]]:
    epoch = 0
    while True:
        for position in permutation(seed, epoch, number).tolist():
            yield epoch, position
        epoch += 1


def check_readable(images: Sequence[DetectionImage], workers: int | None) -> None:
    """Read every test image once, to fail now rather than after days of training."""
    pool = WorkerPool(_fault_of, workers, torch.device("cpu"))
    with progress("checking test images", len(images)) as meter:
        faults = []
        for number, fault in enumerate(pool.run(list(images)), start=1):
            faults += [fault] if fault else []
            meter.advance(number)
    pool.close()
    if faults:
        raise InputError(
            f"data.root: {len(faults)} of {len(images)} test images cannot be used"
            f" ({'; '.join(faults[:3])}): fix them, or remove them from the list of test images."
        )


def _fault_of(sample: DetectionImage) -> str | None:
    try:
        _pixels(sample)
    except UnreadableImage as error:
        return str(error)
    return None


def _image(sample: DetectionImage, geometry: Geometry) -> UInt8[Tensor, "3 height width"]:
    pixels = _pixels(sample)
    picture = Image.fromarray(np.ascontiguousarray(pixels.permute(1, 2, 0).numpy()))
    picture = picture.resize((geometry.width, geometry.height), Image.Resampling.BILINEAR)
    if geometry.flip:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()


def _pixels(sample: DetectionImage) -> UInt8[Tensor, "3 height width"]:
    pixels = read_image(sample.path)
    if pixels.shape[1:] != (sample.height, sample.width):
        raise UnreadableImage(
            f"{printable(sample.path)} has {pixels.shape[2]} x {pixels.shape[1]} pixels, but its"
            f" annotation says {sample.width} x {sample.height}: correct the annotation (EXIF"
            " orientation is applied)."
        )
    return pixels


def _masks_of(sample: DetectionImage) -> tuple[Mask, ...]:
    if sample.masks is None:
        raise InputError(f"{printable(sample.path)} has boxes but no masks: train without masks.")
    return sample.masks
