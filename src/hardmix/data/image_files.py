"""One image file in, one uint8 tensor (channels, height, width) out; or one kind of error.

What becomes of the many kinds of pixels:

- 8 bits: as they are. CMYK, palettes and the like: Pillow's conversion to RGB.
- Transparent: laid on white, as a browser shows it.
- 16 bits: divided by 257, so that 65535 becomes 255. Pillow alone would clip to white.
- 32-bit integers and floats, which have no natural range: smallest value of the file to 0, largest
  to 255, NaN and infinity to 0.
- EXIF orientation is applied; of an animation the first frame is taken.

HEIC needs the extra hardmix[heif], a frame of a video, as "clip.mp4@12.0s", hardmix[video].

Files in NumPy's .npy format follow the same rules, as (H, W), (C, H, W) or (H, W, C); so do TIFFs
where the channels asked for are neither 1 nor 3. A grey image fills all of 3 channels, and 3 are
weighted to 1 as by Pillow's convert("L"); any other number of channels must be that of the file,
whose bands are then taken raw.
"""

import os
import warnings
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from io import BufferedIOBase
from pathlib import Path
from typing import IO, cast

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image, UnidentifiedImageError, features
from torch import Tensor
from torchvision.transforms.v2.functional import resize

from hardmix.data.image_arrays import Bands, check_size, fit, from_numpy, from_tiff, to_bytes
from hardmix.data.video_frames import VIDEO_SUFFIXES, frame_of, read_frame
from hardmix.errors import InputError

HEIF_SUFFIXES = frozenset({".heic", ".heif", ".hif"})
IMAGE_SUFFIXES = HEIF_SUFFIXES | frozenset(
    {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".npy"}
    | {".avif"}
)
"""Files with these extensions, in any case, are read as images."""

MAX_PIXELS = 89_000_000
"""Larger images are refused before they are decoded (the limit at which Pillow warns)."""

# Only these: for others Pillow may start a program, as Ghostscript for an EPS file named .jpg.
_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
_NUMPY = b"\x93NUMPY"
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_HEIF = (b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1")
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


class UnreadableImage(InputError):  # noqa: N818  (it says what is the matter)
    """An image that cannot be used; the message names the file and the reason."""


def read_image(
    file: str | os.PathLike[str] | BufferedIOBase,
    channels: int = 3,
    max_pixels: int = MAX_PIXELS,
    name: str | None = None,
    reduce: int | None = None,
) -> UInt8[Tensor, "channels height width"]:
    """Decode an image file, given by path or open; raise `UnreadableImage` if that fails.

    `name` stands for the file in messages, where an open one has no name of its own. With `reduce`
    an image whose shorter side exceeds it is made smaller, as far as possible while it is decoded.
    A pixel's channels may lie side by side in memory, as decoders leave them: resizing is fastest
    so.
    """
    _silence_pillow()
    try:
        frame = frame_of(file) if isinstance(file, str) else None
        if frame is not None:
            bands = read_frame(frame, channels, max_pixels)
        elif isinstance(file, str | os.PathLike):
            with Path(file).open("rb") as opened:
                bands = _decode(opened, channels, max_pixels, reduce)
        else:
            bands = _decode(file, channels, max_pixels, reduce)
    except Exception as error:  # on damaged bytes a decoder raises whatever it stumbles over
        path = file if isinstance(file, str | os.PathLike) else getattr(file, "name", "image")
        raise UnreadableImage(f"{printable(name or path)}: {_reason(error, max_pixels)}") from error
    return _reduced(_tensor(bands), reduce)


def convert_image(image: Image.Image, channels: int = 3) -> UInt8[Tensor, "channels height width"]:
    """Convert an image opened by Pillow, by the same rules as `read_image`."""
    _silence_pillow()
    try:
        return _tensor(_from_pillow(_upright(image), channels))
    except Exception as error:
        raise UnreadableImage(f"image: {_reason(error, MAX_PIXELS)}") from error


def _tensor(bands: Bands) -> UInt8[Tensor, "channels height width"]:
    """The pixels, with the axes in memory as they are.

    What Pillow gives is read-only, but it has made it for this array and keeps no hold of it: a
    copy would take a tenth of the decoding.
    """
    fresh = not bands.flags.writeable and min(bands.strides) >= 0
    return torch.from_numpy(bands if fresh else np.array(bands, order="K"))


def _reduced(image: UInt8[Tensor, "channels _ _"], side: int | None) -> UInt8[Tensor, "..."]:
    """The shorter side to `side`, if it is longer; channels side by side."""
    if side is None or min(image.shape[1:]) <= side:
        return image
    small: Tensor = resize(image, [side], antialias=True)
    return small.permute(1, 2, 0).contiguous().permute(2, 0, 1)


def printable(path: str | os.PathLike[str]) -> str:
    r"""A path as text that any terminal can show: bytes that are not UTF-8 become \udcXX."""
    return os.fspath(path).encode("utf-8", "backslashreplace").decode()


@cache
def _silence_pillow() -> None:
    """Pillow's remarks on odd files would come once per file and epoch; errors still show.

    Once, and not around each image: a change of filters makes Python forget which of the other
    warnings it has already shown.
    """
    warnings.filterwarnings("ignore", module=r"PIL\.")
    with warnings.catch_warnings():  # torch says once that an array is read-only: now, unheard
        warnings.simplefilter("ignore")
        torch.from_numpy(np.frombuffer(b"0", dtype=np.uint8))


def _reason(error: Exception, max_pixels: int) -> str:
    if isinstance(error, Image.DecompressionBombError):
        return f"more than data.max_pixels={max_pixels} pixels: {error}"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _decode(file: BufferedIOBase, channels: int, max_pixels: int, reduce: int | None) -> Bands:
    head = file.read(16)
    file.seek(0)
    if not head:
        raise ValueError("the file is empty (0 bytes)")
    if head.startswith(_NUMPY):
        return from_numpy(file, channels, max_pixels)
    if head.startswith(_TIFF) and channels not in (1, 3):
        return from_tiff(file, channels, max_pixels)
    if Image.MAX_IMAGE_PIXELS is not None and max_pixels > Image.MAX_IMAGE_PIXELS:
        Image.MAX_IMAGE_PIXELS = max_pixels  # else Pillow's own limit would overrule the user's
    try:
        image = Image.open(cast("IO[bytes]", file), formats=_formats(head))
    except UnidentifiedImageError:
        known = ", ".join(_FORMATS)
        raise ValueError(f"neither {known} nor .npy: the file starts with {head!r}") from None
    with image:
        check_size(image.width, image.height, max_pixels)
        if reduce is not None:
            image.draft(image.mode, (reduce, reduce))  # a JPEG decodes to 1/2, 1/4 or 1/8
        image.load()
        return _from_pillow(_upright(image), channels)


def _formats(head: bytes) -> tuple[str, ...]:
    """Return the formats Pillow may try, judged by the first bytes of the file."""
    brand = head[8:12] if head[4:8] == b"ftyp" else b""
    if brand in (b"avif", b"avis"):
        return ("AVIF",)
    if brand not in _HEIF:
        return _FORMATS
    missing = missing_reader(".heic")
    if missing:
        raise ValueError(f"a HEIC image: {missing} to read it")
    import_module("pillow_heif").register_heif_opener()
    return ("HEIF",)


@cache
def missing_reader(suffix: str) -> str | None:
    """Return how to install the reader for this extension, or None if it is not missing."""
    if suffix in HEIF_SUFFIXES and find_spec("pillow_heif") is None:
        return "pip install 'hardmix[heif]'"
    if suffix in VIDEO_SUFFIXES and find_spec("av") is None:
        return "pip install 'hardmix[video]'"
    if suffix == ".avif" and not features.check("avif"):
        return "pip install --upgrade pillow"
    return None


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
        return fit(to_bytes(values)[None], channels)
    if channels not in (1, 3):
        return fit(np.atleast_3d(np.asarray(image)).transpose(2, 0, 1), channels)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    mode = "L" if image.mode in ("1", "L") else "RGB"
    pixels = np.atleast_3d(np.asarray(image if image.mode == mode else image.convert(mode)))
    return fit(pixels.transpose(2, 0, 1), channels)
