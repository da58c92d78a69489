"""Arrays of numbers as images: uint8, (bands, height, width), as many bands as asked for.

16 bits are divided by 257; what has no natural range goes from its smallest value at 0 to its
largest at 255. Grey and colour are made of each other, other numbers of bands must be right.
"""

import math
from io import BufferedIOBase
from typing import IO, cast

import numpy as np
from numpy.typing import NDArray

Bands = NDArray[np.uint8]
"""(bands, height, width)"""


def check_size(width: int, height: int, max_pixels: int) -> None:
    """Raise ValueError, before decoding, if the header gives more than `max_pixels`."""
    if width * height > max_pixels:
        raise ValueError(
            f"{width} x {height} pixels are more than data.max_pixels={max_pixels}: shrink the"
            " image or raise data.max_pixels"
        )


def from_numpy(file: BufferedIOBase, channels: int, max_pixels: int) -> Bands:
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
            f"an array of {dtype} with shape {shape} is not an image: save it as (H, W),"
            f" ({channels}, H, W) or (H, W, {channels})"
        )
    _check_array(shape, channels, max_pixels)
    file.seek(0)
    return _from_array(np.lib.format.read_array(file, allow_pickle=False), channels)


def from_tiff(file: BufferedIOBase, channels: int, max_pixels: int) -> Bands:
    """Any number of bands, in one page or one page each: what microscopes and satellites write."""
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
    scaled = to_bytes(values)
    return fit(scaled[None] if axis is None else np.moveaxis(scaled, axis, 0), channels)


def _band_axis(shape: tuple[int, ...], channels: int) -> int | None:
    """Where the bands are: the first axis if its size can be right, else the last."""
    if len(shape) == 2:
        return None
    if len(shape) != 3:
        raise ValueError(f"an array of shape {shape} is not an image: it needs 2 or 3 dimensions")
    also = {1: 3, 3: 1}.get(channels, channels)
    for number in (channels, also):
        for axis in (0, 2):
            if shape[axis] == number:
                return axis
    raise ValueError(
        f"an array of shape {shape} does not have data.channels={channels} as its first or last"
        " dimension"
    )


def to_bytes(values: NDArray[np.generic]) -> Bands:
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


def fit(bands: Bands, channels: int) -> Bands:
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
