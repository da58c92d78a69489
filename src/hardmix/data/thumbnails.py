"""Sample images of a set, and thumbnails of images, for pages and figures."""

import base64
import io
from collections import Counter
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from hardmix.data.image_files import UnreadableImage, read_image
from hardmix.data.image_set import ImageSet
from hardmix.errors import InputError
from hardmix.runtime.random_numbers import permutation, seed_of


def sample_ids(images: ImageSet, seed: int, number: int = 8) -> list[int]:
    """Return readable images chosen by the seed; one of each class before a second of any."""
    order: list[int] = permutation(seed_of("gallery", seed), 0, len(images)).tolist()
    if images.labels is not None:
        labels, count = images.labels.tolist(), Counter[int]()
        rounds = {}
        for index in order:
            rounds[index] = count[labels[index]]
            count[labels[index]] += 1
        order.sort(key=rounds.__getitem__)  # stable: within a round, the order does not change
    chosen: list[int] = []
    for index in order[: 10 * number]:
        try:
            images.image(index)
        except UnreadableImage:
            continue
        chosen.append(index)
        if len(chosen) == number:
            break
    if not chosen:
        raise InputError("none of its sample images can be read.")
    return chosen


def class_of(images: ImageSet, index: int) -> str | None:
    """Return the name of an image's class; None if it is unknown."""
    if images.labels is None or not images.classes or images.labels[index] < 0:
        return None
    return images.classes[int(images.labels[index])]


def file_of(images: ImageSet, index: int) -> str:
    """Return an image's file; empty if it is not in a file of its own."""
    return "" if images.files is None else images.files[index]


def thumbnail(image: UInt8[Tensor, "channels height width"], size: int) -> str:
    """Return the central square, at most `size` pixels wide, as a data URI.

    If an image does not have three channels, its first channel is shown in grey.
    """
    three = image if len(image) == 3 else image[:1].expand(3, -1, -1)
    side = min(three.shape[1:])
    top, left = (three.shape[1] - side) // 2, (three.shape[2] - side) // 2
    square = three[:, top : top + side, left : left + side].permute(1, 2, 0).contiguous().numpy()
    if side > size:
        small = Image.fromarray(square).resize((size, size), Image.Resampling.LANCZOS)
        square = np.asarray(small)
    return data_uri(square)


def thumbnail_of(images: ImageSet, index: int, size: int) -> str:
    """Return the thumbnail of an image by number; empty if its file can no longer be read."""
    try:
        return thumbnail(original(images, index, size), size)
    except UnreadableImage:
        return ""


def original(images: ImageSet, index: int, shorter: int) -> UInt8[Tensor, "channels height width"]:
    """Return an image from its file, with a shorter side of at most so many pixels.

    An encoder may see it smaller, if data.reduce is set; a person should not.
    """
    if images.files is None or getattr(images.read, "func", images.read) is not read_image:
        return images.image(index)
    return read_image(images.files[index], images.channels, images.max_pixels, reduce=shorter)


def data_uri(pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> str:
    """Return an image (height, width, 3) as WebP in a data URI."""
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "WEBP", quality=75, method=4)
    return "data:image/webp;base64," + base64.b64encode(out.getvalue()).decode()
