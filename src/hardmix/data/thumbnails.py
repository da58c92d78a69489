"""Small images for pictures and pages."""

import base64
import io
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from hardmix.data.image_files import UnreadableImage
from hardmix.data.image_set import ImageSet


def thumbnail(image: UInt8[Tensor, "channels height width"], size: int) -> str:
    """The middle square, at most `size` pixels wide, as a data URI.

    Of other than three channels the first one is shown, in grey.
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
    """The same by number; empty where the file cannot be read any more."""
    try:
        return thumbnail(images.image(index), size)
    except UnreadableImage:
        return ""


def data_uri(pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> str:
    """An image (height, width, 3) as WebP in a data URI."""
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "WEBP", quality=75, method=4)
    return "data:image/webp;base64," + base64.b64encode(out.getvalue()).decode()
