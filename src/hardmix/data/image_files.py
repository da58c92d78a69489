"""One image file in, one uint8 tensor (channels, height, width) out; or one kind of error.

Pixels are converted by these rules:

- 8 bits: unchanged. CMYK, palettes and the like: Pillow's conversion to RGB.
- Transparent images: laid on white, as a browser shows them.
- 16 bits: divided by 257, so that 65535 becomes 255. Pillow alone would clip to white.
- 32-bit integers and floats, which have no natural range: the smallest value of the file becomes 0,
  the largest 255; NaN and infinity become 0.
- EXIF orientation is applied; of an animation, the first frame is taken.

Files in NumPy's .npy format follow the same rules, as (H, W), (C, H, W) or (H, W, C); so do TIFFs
if the channels asked for are neither 1 nor 3. A grey image fills all of 3 channels, and 3 are
weighted to 1 as by Pillow's convert("L"). Any other number of channels must be that of the file,
whose bands are then taken as they are.

JPEGs are decoded by torchcodec if it is installed, which gives Pillow's pixels in four fifths of
the time. Everything else, and a JPEG that torchcodec refuses, is decoded by Pillow. HEIC needs the
extra hardmix[heif]; frames of videos are read by video_frames.py.
"""

import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from io import BufferedIOBase
from pathlib import Path
from typing import IO, cast

import numpy as np
import torch
from jaxtyping import UInt8
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError, features
from torch import Tensor
from torch.utils.data import get_worker_info
from torchvision.transforms.v2.functional import resize

from hardmix.errors import InputError

HEIF_SUFFIXES = frozenset({".heic", ".heif", ".hif"})

IMAGE_SUFFIXES = HEIF_SUFFIXES | frozenset(
    {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".npy"}
    | {".avif"}
)
"""Files with these extensions, in any case, are read as images."""

VIDEO_SUFFIXES = frozenset(
    {".mp4", ".mov", ".m4v", ".avi", ".mkv", ".webm", ".mpg", ".mpeg", ".3gp", ".mts"}
)
"""Files with these extensions, in any case, are read as videos."""

MAX_PIXELS = 89_000_000
"""Larger images are refused before they are decoded (the limit at which Pillow warns)."""

Bands = NDArray[np.uint8]
"""Pixels as (bands, height, width)."""

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


class UnreadableImage(InputError):  # noqa: N818  (the message says what is wrong)
    """An image that cannot be used; the message names the file and the reason."""


def read_image(
    file: str | os.PathLike[str] | BufferedIOBase,
    channels: int = 3,
    max_pixels: int = MAX_PIXELS,
    name: str | None = None,
    reduce: int | None = None,
) -> UInt8[Tensor, "channels height width"]:
    """Decode an image file, given by path or open; raise `UnreadableImage` if that fails.

    The channels of a pixel may be adjacent in memory, as decoders leave them: that is the fastest
    layout for resizing.

    Args:
        file: a path or an open file.
        channels: number of channels of the result.
        max_pixels: larger images are refused.
        name: name for messages if an open file has none of its own.
        reduce: length that the shorter side is reduced to, as far as possible while decoding.
    """
    path = file if isinstance(file, str | os.PathLike) else getattr(file, "name", "image")
    with errors_named(name or path, max_pixels):
        if isinstance(file, str | os.PathLike):
            with Path(file).open("rb") as opened:
                bands = _decode(opened, channels, max_pixels, reduce)
        else:
            bands = _decode(file, channels, max_pixels, reduce)
    return to_tensor(bands, reduce)


def convert_image(image: Image.Image, channels: int = 3) -> UInt8[Tensor, "channels height width"]:
    """Convert an image opened by Pillow, by the same rules as `read_image`."""
    with errors_named("image", MAX_PIXELS):
        return to_tensor(_from_pillow(_upright(image), channels))


@contextmanager
def errors_named(name: str | os.PathLike[str], max_pixels: int) -> Iterator[None]:
    """Turn any error of a decoder into `UnreadableImage` with the name of the image."""
    _silence_warnings()
    try:
        yield
    except Exception as error:  # damaged bytes can raise anything
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if isinstance(error, Image.DecompressionBombError):
            reason = f"more than data.max_pixels={max_pixels} pixels: {error}"
        raise UnreadableImage(f"{printable(name)}: {reason}") from error


def to_tensor(bands: Bands, reduce: int | None = None) -> UInt8[Tensor, "channels height width"]:
    """Return pixels as a tensor with the same layout in memory, reduced if they are larger.

    Decoders give read-only arrays that they made for this image: these are not copied, which would
    take a tenth of the time of decoding.
    """
    fresh = not bands.flags.writeable and min(bands.strides) >= 0
    return reduced(torch.from_numpy(bands if fresh else np.array(bands, order="K")), reduce)


def reduced(
    image: UInt8[Tensor, "channels height width"], side: int | None
) -> UInt8[Tensor, "channels height2 width2"]:
    """Return an image whose shorter side is at most `side`; None leaves it as it is."""
    if side is None or min(image.shape[1:]) <= side:
        return image
    small: Tensor = resize(image, [side], antialias=True)
    return small.permute(1, 2, 0).contiguous().permute(2, 0, 1)


def printable(path: str | os.PathLike[str]) -> str:
    r"""Return a path as text that any terminal can show: bytes that are not UTF-8 become \udcXX."""
    return os.fspath(path).encode("utf-8", "backslashreplace").decode()


@cache
def _silence_warnings() -> None:
    """Ignore Pillow's warnings about odd files, which would come once per file and epoch.

    This is done once and not around each image: a change of filters makes Python forget which
    other warnings it has already shown.
    """
    warnings.filterwarnings("ignore", module=r"PIL\.")
    with warnings.catch_warnings():  # torch warns once that an array is read-only: now, in silence
        warnings.simplefilter("ignore")
        torch.from_numpy(np.frombuffer(b"0", dtype=np.uint8))


def _decode(file: BufferedIOBase, channels: int, max_pixels: int, reduce: int | None) -> Bands:
    head = file.read(16)
    file.seek(0)
    if not head:
        raise ValueError("the file is empty (0 bytes)")
    if head.startswith(_NUMPY):
        return _from_npy(file, channels, max_pixels)
    if head.startswith(_TIFF) and channels not in (1, 3):
        return _from_tiff(file, channels, max_pixels)
    if Image.MAX_IMAGE_PIXELS is not None and max_pixels > Image.MAX_IMAGE_PIXELS:
        Image.MAX_IMAGE_PIXELS = max_pixels  # otherwise Pillow's limit would overrule the user's
    try:
        image = Image.open(cast("IO[bytes]", file), formats=_formats(head))
    except UnidentifiedImageError:
        names = ", ".join(_FORMATS)
        raise ValueError(f"neither {names} nor .npy: the file starts with {head!r}") from None
    with image:
        check_size(image.width, image.height, max_pixels)
        if reduce is not None:
            image.draft(image.mode, (reduce, reduce))  # a JPEG decodes to 1/2, 1/4 or 1/8
        elif channels == 3 and image.format in ("JPEG", "MPO"):
            pixels = _by_torchcodec(file)
            if pixels is not None:
                return pixels
        image.load()
        return _from_pillow(_upright(image), channels)


def _by_torchcodec(file: BufferedIOBase) -> Bands | None:
    """Decode a JPEG; None if torchcodec is missing or refuses the file."""
    decode = _torchcodec()
    if decode is None:
        return None
    file.seek(0)
    try:
        with _libjpeg_silenced():
            bands: Bands = decode(file.read()).numpy()
    except RuntimeError:
        return None
    bands.flags.writeable = False  # made for this image
    return bands


@contextmanager
def _libjpeg_silenced() -> Iterator[None]:
    """Discard libjpeg's remarks on odd files, which torchcodec lets it write to standard error.

    They would come once per file and epoch. This is done only in worker processes, in which no
    other thread could write at the same time.
    """
    if get_worker_info() is None:
        yield
        return
    stderr = os.dup(2)
    os.dup2(_devnull(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


@cache
def _devnull() -> int:
    return os.open(os.devnull, os.O_WRONLY)


@cache
def _torchcodec() -> Callable[[bytes], Tensor] | None:
    try:
        decode: Callable[[bytes], Tensor] = import_module("torchcodec.decoders").decode_jpeg
    except (AttributeError, ImportError, OSError, RuntimeError):
        return None  # missing, or made for another version of torch
    return decode


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


def check_size(width: int, height: int, max_pixels: int) -> None:
    """Raise ValueError, before decoding, if the header claims more than `max_pixels`."""
    if width * height > max_pixels:
        raise ValueError(
            f"{width} x {height} pixels are more than data.max_pixels={max_pixels}: shrink the"
            " image or raise data.max_pixels"
        )


def fit_channels(bands: Bands, channels: int) -> Bands:
    """Convert between 1 and 3 channels; any other number must match the file."""
    if len(bands) == channels:
        return bands
    if len(bands) == 1 and channels == 3:
        return bands.repeat(3, axis=0)
    if len(bands) == 3 and channels == 1:
        weights = np.array([299, 587, 114], dtype=np.uint32)[:, None, None]
        grey: Bands = ((bands * weights).sum(axis=0, keepdims=True) // 1000).astype(np.uint8)
        return grey
    raise ValueError(
        f"{len(bands)} bands, but data.channels={channels}: set data.channels={len(bands)}, or"
        f" save arrays of {channels} bands as .npy"
    )


def _upright(image: Image.Image) -> Image.Image:
    """Turn an image as the camera was held; Pillow has already turned a TIFF."""
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
        return fit_channels(_to_bytes(values)[None], channels)
    if channels not in (1, 3):
        return fit_channels(np.atleast_3d(np.asarray(image)).transpose(2, 0, 1), channels)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    mode = "L" if image.mode in ("1", "L") else "RGB"
    pixels = np.atleast_3d(np.asarray(image if image.mode == mode else image.convert(mode)))
    return fit_channels(pixels.transpose(2, 0, 1), channels)


def _from_npy(file: BufferedIOBase, channels: int, max_pixels: int) -> Bands:
    """Read an array after its header was checked, which may claim any size, or hold objects."""
    version = np.lib.format.read_magic(file)
    read_header = (
        np.lib.format.read_array_header_1_0
        if version == (1, 0)
        else np.lib.format.read_array_header_2_0
    )
    shape, _, dtype = read_header(file)
    if dtype.kind not in "buif" or len(shape) not in (2, 3) or 0 in shape:
        raise ValueError(
            f"an array of {dtype} with shape {shape} is not an image: save it as (H, W),"
            f" ({channels}, H, W) or (H, W, {channels})"
        )
    _check_array(shape, channels, max_pixels)
    file.seek(0)
    return _from_array(np.lib.format.read_array(file, allow_pickle=False), channels)


def _from_tiff(file: BufferedIOBase, channels: int, max_pixels: int) -> Bands:
    """Read any number of bands, in one page or one page each, as microscopes and satellites do."""
    import tifffile  # slow to import, and most images are photographs

    with tifffile.TiffFile(cast("IO[bytes]", file)) as opened:
        series = opened.series[0]
        _check_array(series.shape, channels, max_pixels)
        return _from_array(series.asarray(), channels)


def _check_array(shape: tuple[int, ...], channels: int, max_pixels: int) -> None:
    axis = _band_axis(shape, channels)
    height, width = (size for i, size in enumerate(shape) if i != axis)
    check_size(width, height, max_pixels)


def _from_array(values: NDArray[np.generic], channels: int) -> Bands:
    axis = _band_axis(values.shape, channels)
    scaled = _to_bytes(values)
    return fit_channels(scaled[None] if axis is None else np.moveaxis(scaled, axis, 0), channels)


def _band_axis(shape: tuple[int, ...], channels: int) -> int | None:
    """Return the axis of the bands: the first if its size is possible, otherwise the last."""
    if len(shape) == 2:
        return None
    if len(shape) != 3:
        raise ValueError(f"an array of shape {shape} is not an image: it needs 2 or 3 dimensions")
    convertible = {1: 3, 3: 1}.get(channels, channels)
    for number in (channels, convertible):
        for axis in (0, 2):
            if shape[axis] == number:
                return axis
    raise ValueError(
        f"an array of shape {shape} does not have data.channels={channels} as its first or last"
        " dimension"
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
