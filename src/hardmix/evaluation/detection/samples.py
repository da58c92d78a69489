"""What the readers of data hand on, what a detector answers, and the forms of a mask.

Boxes are (x1, y1, x2, y2) in pixels, from edge to edge: the whole of an image is
(0, 0, width, height). Both are in the pixels of the image file.
"""

from dataclasses import dataclass
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
    """VOC: the name without its ending; COCO: the number in the annotations."""
    path: str
    height: int
    width: int
    boxes: Float64[np.ndarray, "objects 4"]
    classes: Int64[np.ndarray, " objects"]
    difficult: Bool[np.ndarray, " objects"]
    """VOC: trained on, but neither right nor wrong in the evaluation."""
    crowd: Bool[np.ndarray, " objects"]
    """COCO: one box around many objects, left out of training."""
    masks: tuple[Mask, ...] | None = None

    @property
    def number(self) -> int:
        """The id as a number of 63 bits, for random choices."""
        return seed_of("detection image", self.id)


class DetectionSet(NamedTuple):
    """One split of a data set."""

    images: tuple[DetectionImage, ...]
    classes: tuple[str, ...]
    dropped: tuple[str, ...]
    """Each object that was left out because its annotation is invalid, and why."""


class DetectionSplits(NamedTuple):
    """What is trained on and what is tested on; both number the classes alike."""

    train: DetectionSet
    test: DetectionSet


@dataclass(frozen=True, eq=False)
class FoundObjects:
    """What a detector finds in one image, in the pixels of the image file."""

    boxes: Float32[np.ndarray, "found 4"]
    scores: Float32[np.ndarray, " found"]
    classes: Int64[np.ndarray, " found"]
    masks: tuple[Rle, ...] | None = None
    """Run lengths and no bitmaps: those of all COCO's test images would fill the memory."""


def found_objects(
    boxes: Float32[Tensor, "found 4"],
    scores: Float32[Tensor, " found"],
    classes: Int64[Tensor, " found"],
    masks: Bool[Tensor, "found height width"] | None = None,
) -> FoundObjects:
    """A detector's tensors, on any device, as an evaluation takes them."""
    return FoundObjects(
        boxes.detach().cpu().numpy(),
        scores.detach().cpu().numpy(),
        classes.cpu().numpy(),
        None if masks is None else tuple(map(encode_mask, masks.cpu().numpy())),
    )


def for_training(data: DetectionSet) -> DetectionSet:
    """Without the images that have no object to learn from, or crowds alone."""
    kept = tuple(image for image in data.images if (~image.crowd).any())
    if not kept:
        raise InputError(
            f"data.root: none of {len(data.images)} training images has an object with a valid"
            " box: look into the annotations."
        )
    return data._replace(images=kept)


def decode_mask(mask: Mask, height: int, width: int) -> Bitmap:
    """The pixels of a mask in an image of this size."""
    tools = coco_tools("mask")
    if isinstance(mask, Rle):
        coded: Any = {"size": [mask.height, mask.width], "counts": mask.counts}
    else:
        flat = [polygon.reshape(-1).tolist() for polygon in mask]
        coded = tools.merge(tools.frPyObjects(flat, height, width))
    return np.asarray(tools.decode(coded)).astype(np.bool_)


def encode_mask(pixels: Bitmap) -> Rle:
    """The run lengths of a mask."""
    coded = coco_tools("mask").encode(np.asfortranarray(pixels, dtype=np.uint8))
    height, width = pixels.shape
    return Rle(height, width, coded["counts"])


def coco_tools(module: str) -> Any:
    """A module of pycocotools, which is an extra."""
    try:
        return import_module(f"pycocotools.{module}")
    except ImportError as error:
        raise InputError(
            "COCO's masks and its AP need the package pycocotools:"
            " pip install 'hardmix[detection]'."
        ) from error
