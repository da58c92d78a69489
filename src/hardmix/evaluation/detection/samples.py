"""Detection data, a detector's output, and the formats of a mask.

Boxes are (x1, y1, x2, y2) in pixels, from edge to edge: a whole image is (0, 0, width, height).
Boxes and masks are in the pixels of the image file.
"""

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64
from torch import Tensor

from hardmix.errors import InputError
from hardmix.runtime.random_numbers import seed_of

Polygon = Float64[np.ndarray, "_ 2"]
"""Corners (x, y) of a region, in pixels."""

Bitmap = Bool[np.ndarray, "height width"]
"""A mask, pixel by pixel."""


class Rle(NamedTuple):
    """A mask as COCO's compressed run lengths."""

    height: int
    width: int
    counts: bytes


Mask = tuple[Polygon, ...] | Rle
"""An object's region: polygons, all of which belong to it, or run lengths."""


@dataclass(frozen=True, eq=False)
class DetectionImage:
    """An image file and the objects in it."""

    id: int | str
    """VOC: the file name without its suffix; COCO: the number in the annotations."""
    path: str
    height: int
    width: int
    boxes: Float64[np.ndarray, "objects 4"]
    classes: Int64[np.ndarray, " objects"]
    difficult: Bool[np.ndarray, " objects"]
    """VOC: used in training, but ignored in the evaluation."""
    crowd: Bool[np.ndarray, " objects"]
    """COCO: one box around many objects, not used in training."""
    masks: tuple[Mask, ...] | None = None
    areas: Float64[np.ndarray, " objects"] | None = None
    """COCO: pixels of each object, which make it small, medium or large."""
    unfindable: Int64[np.ndarray, " unfindable"] = field(
        default_factory=lambda: np.zeros(0, dtype=np.int64)
    )
    """VOC: classes of test objects whose box is invalid; they count, but cannot be found."""

    @property
    def number(self) -> int:
        """The id as a number of 63 bits, for random choices."""
        return seed_of("detection image", self.id)


class DetectionSet(NamedTuple):
    """One split of a data set."""

    images: tuple[DetectionImage, ...]
    classes: tuple[str, ...]
    dropped: tuple[str, ...]
    """Each object skipped because of an invalid annotation, with the reason."""


class DetectionSplits(NamedTuple):
    """Training and test data, with the same numbering of classes."""

    train: DetectionSet
    test: DetectionSet


@dataclass(frozen=True, eq=False)
class FoundObjects:
    """Objects that a detector finds in one image, in the pixels of the image file."""

    boxes: Float32[np.ndarray, "found 4"]
    scores: Float32[np.ndarray, " found"]
    classes: Int64[np.ndarray, " found"]
    masks: tuple[Rle, ...] | None = None
    """Run lengths, since bitmaps of all of COCO's test images would fill the memory."""


def found_objects(
    boxes: Float32[Tensor, "found 4"],
    scores: Float32[Tensor, " found"],
    classes: Int64[Tensor, " found"],
    masks: Bool[Tensor, "found height width"] | None = None,
) -> FoundObjects:
    """Convert a detector's tensors, on any device, for an evaluation."""
    return FoundObjects(
        boxes.detach().cpu().numpy(),
        scores.detach().cpu().numpy(),
        classes.cpu().numpy(),
        None if masks is None else tuple(map(encode_mask, masks.cpu().numpy())),
    )


def for_training(data: DetectionSet) -> DetectionSet:
    """Return the data without images that have no objects, or only crowds."""
    kept = tuple(image for image in data.images if (~image.crowd).any())
    if not kept:
        raise InputError(
            f"data.root: none of the {len(data.images)} training images has an object with a valid"
            " box: check the annotations."
        )
    return data._replace(images=kept)


def decode_mask(mask: Mask, height: int, width: int) -> Bitmap:
    """Return the pixels of a mask in an image of this size."""
    tools = coco_tools("mask")
    if isinstance(mask, Rle):
        coded: Any = {"size": [mask.height, mask.width], "counts": mask.counts}
    else:
        flat = [polygon.reshape(-1).tolist() for polygon in mask]
        coded = tools.merge(tools.frPyObjects(flat, height, width))
    return np.asarray(tools.decode(coded)).astype(np.bool_)


def run_lengths(counts: bytes) -> list[int]:
    """Return the runs of a compressed mask: 5 bits per character, differences from the third on."""
    runs: list[int] = []
    value = shift = 0
    for character in counts:
        code = character - 48
        if not 0 <= code < 64:
            raise ValueError(f"{chr(character)!r} is not a character of run lengths")
        value |= (code & 31) << shift
        shift += 5
        if code & 32:  # more follows
            continue
        value -= (1 << shift) if code & 16 else 0  # negative
        runs.append(value + (runs[-2] if len(runs) > 2 else 0))
        value = shift = 0
    if shift:
        raise ValueError("the run lengths break off")
    return runs


def encode_mask(pixels: Bitmap) -> Rle:
    """Return the run lengths of a mask."""
    coded = coco_tools("mask").encode(np.asfortranarray(pixels, dtype=np.uint8))
    height, width = pixels.shape
    return Rle(height, width, coded["counts"])


def coco_tools(module: str) -> Any:
    """Import a module of pycocotools, which is an optional dependency."""
    try:
        return import_module(f"pycocotools.{module}")
    except ImportError as error:
        raise InputError(
            "COCO's masks and its AP need the package pycocotools:"
            " pip install 'hardmix[detection]'."
        ) from error
