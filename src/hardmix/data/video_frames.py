"""Frames of videos as images: "clip.mp4@12.0s" is the frame that the video shows at that time.

That is the last frame that begins no later than the time, whether the decoder starts at a key frame
before it or continues from its position. Needs the extra hardmix[video].
"""

import math
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8
from torch import Tensor

from hardmix.data.image_files import (
    MAX_PIXELS,
    VIDEO_SUFFIXES,
    Bands,
    check_size,
    errors_named,
    fit_channels,
    read_image,
    to_tensor,
)
from hardmix.errors import InputError
from hardmix.runtime.console import visible

_ENDINGS = "|".join(suffix[1:] for suffix in sorted(VIDEO_SUFFIXES))
_FRAME = re.compile(rf"(.*\.(?:{_ENDINGS}))@(\d+\.\d+)s", re.IGNORECASE | re.DOTALL)
MOST_OF_A_VIDEO = 10_000_000
"""Most frames of a video, as a header may claim any duration."""
AHEAD = 10.0
"""Seconds up to which the decoder continues to a later frame instead of jumping there."""
LATE = 0.0005
"""Seconds, half of a name's last digit: a frame at 0.0333 s belongs to "@0.033s"."""


class Frame(NamedTuple):
    """A frame by its file and time."""

    file: str
    seconds: float


def frame_of(name: str) -> Frame | None:
    """Return the frame that a name stands for, or None if it is not the name of a frame."""
    if not name.endswith("s") or "@" not in name:
        return None
    match = _FRAME.fullmatch(name)
    return None if match is None else Frame(match[1], float(match[2]))


def read_image_or_frame(
    name: str, channels: int = 3, max_pixels: int = MAX_PIXELS, reduce: int | None = None
) -> UInt8[Tensor, "channels height width"]:
    """Read the frame that a name stands for, or else the image file of this name."""
    frame = frame_of(name)
    if frame is None:
        return read_image(name, channels, max_pixels, reduce=reduce)
    with errors_named(name, max_pixels):
        return to_tensor(_read_frame(frame, channels, max_pixels), reduce)


def source_of(name: str) -> str:
    """Return the file that an image comes from: a frame's video, or else the name itself."""
    frame = frame_of(name)
    return name if frame is None else frame.file


def frame_names(file: str, frames_per_second: float) -> list[str]:
    """Return the names of a video's frames; one that cannot be opened has one, read later."""
    try:
        seconds = _duration(file, os.stat(file).st_mtime_ns)
    except Exception:  # of a damaged file; reading it will report the reason
        seconds = 0.0
    number = max(1, math.ceil(seconds * frames_per_second - 1e-6))
    if number > MOST_OF_A_VIDEO:
        raise InputError(
            f"{visible(file)} claims to last {seconds:.0f} s, which are {number:,} frames at"
            f" data.frames_per_second={frames_per_second:g}, more than {MOST_OF_A_VIDEO:,}: remove"
            " the file, or lower the setting."
        )
    return [f"{file}@{_digits(k / frames_per_second)}s" for k in range(number)]


def _digits(seconds: float) -> str:
    text = f"{seconds:.3f}".rstrip("0")
    return text + "0" if text.endswith(".") else text


@lru_cache(maxsize=100_000)
def _duration(file: str, _: int) -> float:
    """Return the duration of the pictures by the header, or by the time of the last packet."""
    with _av().open(file) as container:
        stream = container.streams.video[0]
        if stream.duration is not None:
            return float(stream.duration * stream.time_base)
        if container.duration is not None:
            return float(container.duration) / 1e6
        times = [packet.pts for packet in container.demux(stream) if packet.pts is not None]
        return float((max(times) - min(times)) * stream.time_base)


def _av() -> Any:
    if find_spec("av") is None:
        raise ValueError("a video: pip install 'hardmix[video]' to read it")
    return import_module("av")


def _read_frame(frame: Frame, channels: int, max_pixels: int) -> Bands:
    """Return the pixels of a frame, upright."""
    decoded = _reader_of(frame.file).frame(frame.seconds + LATE)
    check_size(decoded.width, decoded.height, max_pixels)
    colours = decoded.reformat(format="rgb24", threads=1).to_ndarray()
    pixels = np.rot90(colours, k=round(decoded.rotation / 90))
    return fit_channels(np.ascontiguousarray(pixels).transpose(2, 0, 1), channels)


class _Reader:
    """An open video, and its current frame."""

    def __init__(self, file: str) -> None:
        self.key = (file, os.stat(file).st_mtime_ns, os.getpid())
        self._container = _av().open(file)
        self._stream = self._container.streams.video[0]
        # As in `reformat`: a forked worker would wait for threads that it does not have.
        self._stream.codec_context.thread_count = 1
        self._start = float((self._stream.start_time or 0) * self._stream.time_base)
        self._frames: Iterator[Any] = iter(())
        self._current: Any = None
        self._following: Any = None

    def frame(self, seconds: float) -> Any:
        """Return the last frame that begins by this time, or the first frame of all."""
        if self._current is None or not 0 <= seconds - self._time(self._current) <= AHEAD:
            self._jump(seconds)
        while self._following is not None and self._time(self._following) <= seconds:
            self._current, self._following = self._following, next(self._frames, None)
        return self._current

    def _jump(self, seconds: float) -> None:
        """Go to a key frame before this time; further back if the container names a later one."""
        before, step = seconds, 1.0
        while True:
            place = (max(0.0, before) + self._start) / self._stream.time_base
            self._container.seek(int(place), stream=self._stream)
            self._frames = self._decoded(any_frame=before <= 0)
            self._current, self._following = next(self._frames, None), next(self._frames, None)
            if self._current is not None and self._time(self._current) <= seconds:
                return
            if before <= 0:
                break
            before, step = before - step, 2 * step
        if self._current is None:
            raise ValueError("the video has no frames")

    def _decoded(self, any_frame: bool) -> Iterator[Any]:
        """Yield frames from the first key frame on: those before it may lack their references."""
        for frame in self._container.decode(self._stream):
            any_frame = any_frame or frame.key_frame
            if any_frame and frame.time is not None:
                yield frame

    def _time(self, frame: Any) -> float:
        return float(frame.time) - self._start


_open: list[_Reader] = []
"""The video that was read last, because frames are mostly read in their order."""


def _reader_of(file: str) -> _Reader:
    key = (file, os.stat(file).st_mtime_ns, os.getpid())
    if not _open or _open[-1].key != key:
        reader = _Reader(file)
        _open[:] = [reader]
    return _open[-1]
