"""One image file in, one uint8 tensor (channels, height, width) out; or one kind of error.

What becomes of the many kinds of pixels:

- 8 bits: as they are. CMYK, palettes and the like: Pillow's conversion to RGB.
- Transparent: laid on white, as a browser shows it.
- 16 bits: divided by 257, so that 65535 becomes 255. Pillow alone would clip to white.
- 32-bit integers and floats, which have no natural range: smallest value of the file to 0, largest
  to 255, NaN and infinity to 0.
- EXIF orientation is applied; of an animation the first frame is taken.

Files in NumPy's .npy format follow the same rules, as (H, W), (C, H, W) or (H, W, C); so do TIFFs
where the channels asked for are neither 1 nor 3. A grey image fills all of 3 channels, and 3 are
weighted to 1 as by Pillow's convert("L"); any other number of channels must be that of the file,
whose bands are then taken raw.
"""

import math
import os
import warnings
from functools import cache
from io import BufferedIOBase
from pathlib import Path
from typing import IO, cast

import numpy as np
import torch
from jaxtyping import UInt8
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from hardmix.errors import InputError

IMAGE_SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".npy"}
)
"""Files with these endings, in any case, are taken for images."""

MAX_PIXELS = 89_000_000
"""Images with more are refused before they are decoded (Pillow's limit for a warning)."""

# Only these: for others Pillow may start a program, as Ghostscript for an EPS file named .jpg.
_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
_NUMPY = b"\x93NUMPY"
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

Bands = NDArray[np.uint8]
"""(bands, height, width)"""


class UnreadableImage(InputError):  # noqa: N818  (it says what is the matter)
    """An image that cannot be used; the message names the file and the reason."""


def read_image(
    file: str | os.PathLike[str] | BufferedIOBase,
    channels: int = 3,
    max_pixels: int = MAX_PIXELS,
    name: str | None = None,
) -> UInt8[Tensor, "channels height width"]:
    """Decode an image file, or an open one; whatever goes wrong is an `UnreadableImage`.

    `name` stands for the file in messages, where an open one has no name of its own. A pixel's
    channels may lie side by side in memory, as decoders leave them: resizing is fastest so.
    """
    _silence_pillow()
    try:
        if isinstance(file, str | os.PathLike):
            with Path(file).open("rb") as opened:
                bands = _decode(opened, channels, max_pixels)
        else:
            bands = _decode(file, channels, max_pixels)
    except Exception as error:  # on damaged bytes a decoder raises whatever it stumbles over
        path = file if isinstance(file, str | os.PathLike) else getattr(file, "name", "image")
        raise UnreadableImage(f"{printable(name or path)}: {_reason(error, max_pixels)}") from error
    return _tensor(bands)


def convert_image(image: Image.Image, channels: int = 3) -> UInt8[Tensor, "channels height width"]:
    """An image that Pillow has opened, by the same rules."""
    _silence_pillow()
    try:
        return _tensor(_from_pillow(_upright(image), channels))
    except Exception as error:
        raise UnreadableImage(f"image: {_reason(error, MAX_PIXELS)}") from error


def _tensor(bands: Bands) -> UInt8[Tensor, "channels height width"]:
    """A copy, because Pillow's memory is read-only, with the axes in memory as they are."""
    return torch.from_numpy(np.array(bands, order="K"))


def printable(path: str | os.PathLike[str]) -> str:
    r"""A path as text that any terminal can show: bytes that are no UTF-8 become \udcXX."""
    return os.fspath(path).encode("utf-8", "backslashreplace").decode()


@cache
def _silence_pillow() -> None:
    """Pillow's remarks on odd files would come once per file and epoch; errors still show.

    Once, and not around each image: a change of filters makes Python forget which of the other
    warnings it has already shown.
    """
    warnings.filterwarnings("ignore", module=r"PIL\.")


def _reason(error: Exception, max_pixels: int) -> str:
    if isinstance(error, Image.DecompressionBombError):
        return f"more than data.max_pixels={max_pixels} pixels: {error}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def _decode(file: BufferedIOBase, channels: int, max_pixels: int) -> Bands:
    head = file.read(16)
    file.seek(0)
    if not head:
        raise ValueError("the file is empty (0 bytes)")
    if head.startswith(_NUMPY):
        return _from_numpy(file, channels, max_pixels)
    if head.startswith(_TIFF) and channels not in (1, 3):
        return _from_tiff(file, channels, max_pixels)
    if Image.MAX_IMAGE_PIXELS is not None and max_pixels > Image.MAX_IMAGE_PIXELS:
        Image.MAX_IMAGE_PIXELS = max_pixels  # else Pillow's own limit would overrule the user's
    try:
        image = Image.open(cast("IO[bytes]", file), formats=_FORMATS)
    except UnidentifiedImageError:
        known = ", ".join(_FORMATS)
        raise ValueError(f"neither {known} nor .npy: it begins with {head!r}") from None
    with image:
        _check_size(image.width, image.height, max_pixels)
        image.load()
        return _from_pillow(_upright(image), channels)


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise ValueError(
            f"{width} x {height} pixels are more than data.max_pixels={max_pixels}: shrink the"
            " image or raise data.max_pixels"
        )


def _upright(image: Image.Image) -> Image.Image:
    """As the camera was held; a TIFF has already been turned by Pillow."""
    try:
        orientation = image.getexif().get(_ORIENTATION)
    except Exception:  # damaged EXIF beside good pixels
        return image
    return image.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else image


def _from_pillow(image: Image.Image, channels: int) -> Bands:
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        values = np.asarray(image)
        if image.mode == "I" and values.min() >= 0 and values.max() <= 65535:
            values = values.astype(np.uint16)  # Pillow's mode for 16 bits in PGM and some PNG
        return _fit(_to_bytes(values)[None], channels)
    if channels not in (1, 3):
        return _fit(np.atleast_3d(np.asarray(image)).transpose(2, 0, 1), channels)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    mode = "L" if image.mode in ("1", "L") else "RGB"
    pixels = np.atleast_3d(np.asarray(image if image.mode == mode else image.convert(mode)))
    return _fit(pixels.transpose(2, 0, 1), channels)


def _from_numpy(file: BufferedIOBase, channels: int, max_pixels: int) -> Bands:
    """The header is judged before the array is read: it may promise any size, or objects."""
    version = np.lib.format.read_magic(file)
    read_header = (
        np.lib.format.read_array_header_1_0
        if version == (1, 0)
        else np.lib.format.read_array_header_2_0
    )
    shape, _, dtype = read_header(file)
    if dtype.kind not in "buif" or len(shape) not in (2, 3) or 0 in shape:
        raise ValueError(
            f"an array of {dtype} with shape {shape} is no image: save numbers as (H, W),"
            f" ({channels}, H, W) or (H, W, {channels})"
        )
    _check_array(shape, channels, max_pixels)
    file.seek(0)
    return _from_array(np.lib.format.read_array(file, allow_pickle=False), channels)


def _from_tiff(file: BufferedIOBase, channels: int, max_pixels: int) -> Bands:
    """Any number of bands, in one page or one page each: what microscopes and satellites write."""
    import tifffile  # slow to import, and most images are photographs

    with tifffile.TiffFile(cast("IO[bytes]", file)) as opened:
        series = opened.series[0]
        _check_array(series.shape, channels, max_pixels)
        return _from_array(series.asarray(), channels)


def _check_array(shape: tuple[int, ...], channels: int, max_pixels: int) -> None:
    axis = _band_axis(shape, channels)
    height, width = (size for i, size in enumerate(shape) if i != axis)
    _check_size(width, height, max_pixels)


def _from_array(values: NDArray[np.generic], channels: int) -> Bands:
    axis = _band_axis(values.shape, channels)
    scaled = _to_bytes(values)
    return _fit(scaled[None] if axis is None else np.moveaxis(scaled, axis, 0), channels)


def _band_axis(shape: tuple[int, ...], channels: int) -> int | None:
    """Where the bands are: the first axis if its size can be right, else the last."""
    if len(shape) == 2:
        return None
    if len(shape) != 3:
        raise ValueError(f"an array of shape {shape} is no image: 2 or 3 sizes are needed")
    also = {1: 3, 3: 1}.get(channels, channels)
    for number in (channels, also):
        for axis in (0, 2):
            if shape[axis] == number:
                return axis
    raise ValueError(
        f"an array of shape {shape} does not have data.channels={channels} as its first or last"
        " size"
    )


def _to_bytes(values: NDArray[np.generic]) -> Bands:
    """Scale to 0..255 by the rules at the top of this file."""
    if values.dtype == np.uint8:
        return values.view(np.uint8)
    if values.dtype == np.bool_:
        return values.astype(np.uint8) * np.uint8(255)
    if values.dtype.kind == "u" and values.dtype.itemsize == 2:
        return ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)
    numbers = values.astype(np.float64)
    finite = np.isfinite(numbers)
    if not finite.any():
        raise ValueError("every pixel is NaN or infinite")
    low, high = float(numbers[finite].min()), float(numbers[finite].max())
    if math.isinf(high - low):
        raise ValueError(f"the range of the pixels, {low:g} to {high:g}, is too wide to be scaled")
    numbers[~finite] = low
    return ((numbers - low) / ((high - low) or 1.0) * 255).round().astype(np.uint8)


def _fit(bands: Bands, channels: int) -> Bands:
    """Grey to 3 channels and back; else the number must be right."""
    if len(bands) == channels:
        return bands
    if len(bands) == 1 and channels == 3:
        return bands.repeat(3, axis=0)
    if len(bands) == 3 and channels == 1:
        weights = np.array([299, 587, 114], dtype=np.uint32)[:, None, None]
        grey: Bands = ((bands * weights).sum(axis=0, keepdims=True) // 1000).astype(np.uint8)
        return grey
    raise ValueError(
        f"{len(bands)} bands where data.channels={channels}: set data.channels={len(bands)}, or"
        f" save arrays of {channels} bands as .npy"
    )
