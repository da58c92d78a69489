"""Images as small JPEGs in one file: data.resized_jpegs, which reads a large set faster.

A photograph of ImageNet is then decoded in six tenths of the time, and takes a twentieth of the
room of its pixels. These are other pixels than the images' own, so the setting is
part of the run's config, and the two are never mixed: an image is read from here or not at all.

The JPEGs come first, then an index with a line for each, then a tail that says where the index is
and which images these are, as in cache.py. While the file is made, finished parts are listed in
another one beside it, so that whoever makes it continues where somebody else was stopped. Any
number of processes share the system's copy of the file.
"""

import hashlib
import io
import os
import signal
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import UInt8
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from hardmix.data.cache import ImageCache, only_process, tidy
from hardmix.data.image_files import UnreadableImage, printable, read_image, to_tensor
from hardmix.data.image_set import ImageSet
from hardmix.data.workers import WorkerPool
from hardmix.errors import InputError, UnfinishedError
from hardmix.runtime.console import progress, say
from hardmix.runtime.files import room
from hardmix.runtime.signals import StopRequest, listening
from hardmix.settings.config import DataConfig

SHORTER_SIDE, QUALITY = 256, 90
"""Pixels of the shorter side, and JPEG's quality."""
PART = 64
"""Images that a worker resizes at once."""

LINE = np.dtype([("name", "<u8"), ("start", "<i8"), ("size", "<i4"), ("crc", "<u4")])
"""A line of the index: a hash of the file's name; a size of 0 stands for an unreadable image."""
_TAIL = struct.Struct("<16sQQI32s")
_MAGIC = b"hardmix jpegs 1\0"

Read = Callable[[str, int, int], UInt8[Tensor, "channels height width"]]
"""Reads an image by the name of its file, the number of its channels and the most pixels."""
Lines = NDArray[Any]


class _Encoded(NamedTuple):
    """The JPEGs of a part of the images, one after another, and their lines."""

    data: UInt8[Tensor, " bytes"]
    lines: Lines


def with_resized_jpegs(images: ImageSet, config: DataConfig) -> ImageSet:
    """Return the same images, read from small JPEGs, which are made first if nobody has yet."""
    if images.files is None:
        raise InputError(
            f"data.resized_jpegs=True, but {images.name} is held in memory: it has no files that"
            " would be read faster; leave data.resized_jpegs off."
        )
    if images.channels not in (1, 3):
        raise InputError(
            f"data.resized_jpegs=True with data.channels={images.channels}: a JPEG has 1 or 3"
            " channels; leave data.resized_jpegs off."
        )
    settings = images.max_pixels, SHORTER_SIDE, QUALITY, images.state, config.reduce
    read = partial(_read_original, images.read, images.channels, images.max_pixels)
    # Only for its names: what the images are called, and what identifies them.
    names = ImageCache(images.files, read, images.channels, settings, "file", 0.0, config.workers)
    file = names.file.with_name(names.file.name.replace("images-", "jpegs-"))
    index = _read_index(file, names.mark)
    if index is None:
        with listening() as stop:
            _make(file, names, stop)
        if stop.name is not None:  # the signal is for those who listened before
            signal.raise_signal(signal.Signals[stop.name])
            raise UnfinishedError(
                f"stopped by {stop.name} while images were resized: the same command continues."
            )
        index = _read_index(file, names.mark)
        assert index is not None, "a file that was just written"
    reader = ResizedJpegs(str(file), index, images.read)
    return replace(images, read=reader, state=f"{images.state} resized JPEGs, {SHORTER_SIDE} px")


def _read_original(read: Read, channels: int, max_pixels: int, file: str) -> Tensor:
    return read(file, channels, max_pixels)


class ResizedJpegs:
    """Reads images by the names of their own files from the file that holds their small JPEGs."""

    def __init__(self, path: str, index: Lines, original: Read) -> None:
        self._path, self._index, self._original = path, index, original
        self._order = np.argsort(index["name"], kind="stable")
        self._names = index["name"][self._order]
        self._opened: tuple[int, int] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return ResizedJpegs, (self._path, self._index, self._original)

    def __call__(
        self, file: str, channels: int, max_pixels: int
    ) -> UInt8[Tensor, "channels height width"]:
        """Return the pixels of an image; raise `UnreadableImage` if it has none."""
        data = self.data(file)
        if not data:
            return self._original(file, channels, max_pixels)  # which says why it is unreadable
        return read_image(io.BytesIO(data), channels, max_pixels, name=file)

    def data(self, file: str) -> bytes:
        """Return the JPEG of an image; nothing if the image is unreadable."""
        place = int(np.searchsorted(self._names, _hash_of(file)))
        if place == len(self._names) or self._names[place] != _hash_of(file):
            raise UnreadableImage(f"{printable(file)}: it was not there when images were resized")
        line = self._index[self._order[place]]
        data = os.pread(self._descriptor(), int(line["size"]), int(line["start"]))
        if zlib.crc32(data) != line["crc"]:
            raise UnreadableImage(
                f"{printable(file)}: its copy in {self._path} is damaged; delete that file, and it"
                " is made anew"
            )
        return data

    def _descriptor(self) -> int:
        """Return the open file of this process; a forked one has a place of its own in the file."""
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = os.getpid(), os.open(self._path, os.O_RDONLY)
        return self._opened[1]


def _hash_of(name: str) -> np.uint64:
    return np.uint64(
        int.from_bytes(hashlib.blake2b(os.fsencode(name), digest_size=8).digest(), "little")
    )


def _read_index(file: Path, mark: bytes) -> Lines | None:
    """Return the index of a complete file of these images; None if there is none."""
    try:
        with file.open("rb") as opened:
            opened.seek(-_TAIL.size, os.SEEK_END)
            end = opened.tell()
            magic, start, number, crc, found = _TAIL.unpack(opened.read())
            if magic != _MAGIC or found != mark or start + number * LINE.itemsize != end:
                return None
            opened.seek(start)
            lines = opened.read(end - start)
    except (OSError, struct.error):
        return None
    if zlib.crc32(lines) != crc:
        return None
    with suppress(OSError):  # it may belong to another user
        os.utime(file)
    return np.frombuffer(lines, dtype=LINE)


# -- making the file


@dataclass
class _Parts:
    """The unfinished file, and the list of what it has so far."""

    data: IO[bytes]
    listed: IO[bytes]
    lines: Lines

    @classmethod
    def opened(cls, file: Path, mark: bytes) -> "_Parts":
        """Open what an earlier process has left of these images, or nothing."""
        data, listed = (
            open(file.with_name(f"{file.name}.{end}"), "a+b")  # noqa: SIM115
            for end in ("part", "list")
        )
        listed.seek(0)
        found = listed.read()
        lines = np.frombuffer(found[len(mark) :][: _whole(len(found) - len(mark))], dtype=LINE)
        if not found.startswith(mark):
            lines = lines[:0]
        data.seek(0, os.SEEK_END)
        there = lines["start"] + lines["size"] <= data.tell()
        lines = lines[: int(there.argmin()) if not there.all() else len(lines)]
        while len(lines) and not _is_whole(data, lines[-1]):  # written, but not all on the disk
            lines = lines[:-1]
        data.truncate(_end_of(lines))
        listed.truncate(0)
        listed.write(mark + lines.tobytes())
        return cls(data, listed, lines)

    def add(self, part: _Encoded) -> None:
        """Append a part: first the JPEGs, then their lines."""
        part.lines["start"] += _end_of(self.lines)
        self.data.write(part.data.numpy().data)
        self.data.flush()
        self.listed.write(part.lines.tobytes())
        self.listed.flush()
        self.lines = np.concatenate([self.lines, part.lines])

    def finish(self, file: Path, mark: bytes) -> None:
        """Append the index and the tail, and give the file its name."""
        lines, end = self.lines.tobytes(), _end_of(self.lines)
        self.data.write(lines)
        self.data.write(_TAIL.pack(_MAGIC, end, len(self.lines), zlib.crc32(lines), mark))
        self.data.flush()
        os.fsync(self.data.fileno())
        os.replace(self.data.name, file)
        os.unlink(self.listed.name)

    def close(self) -> None:
        """Close both files."""
        self.data.close()
        self.listed.close()


def _whole(size: int) -> int:
    """Return the bytes of the whole lines in this many bytes."""
    return max(0, size) // LINE.itemsize * LINE.itemsize


def _end_of(lines: Lines) -> int:
    """Return where the last JPEG ends."""
    return int((lines["start"] + lines["size"]).max()) if len(lines) else 0


def _is_whole(data: IO[bytes], line: Any) -> bool:
    read = os.pread(data.fileno(), int(line["size"]), int(line["start"]))
    return bool(len(read) == line["size"] and zlib.crc32(read) == line["crc"])


def _make(file: Path, names: ImageCache, stop: StopRequest) -> None:
    """Make the file, or wait for the process that makes it."""
    try:
        with only_process(file, stop):
            tidy(file.parent)
            if stop or _read_index(file, names.mark) is not None:
                return
            parts = _Parts.opened(file, names.mark)
            try:
                if _encode_rest(parts, names, stop):
                    parts.finish(file, names.mark)
                    size = file.stat().st_size / 1e6
                    say(f"Resized {len(names.files)} images: {size:.0f} MB in {printable(file)}.")
            finally:
                parts.close()
    except OSError as error:
        raise InputError(
            f"data.resized_jpegs=True: resized images cannot be written ({error.strerror};"
            f" {room(file, 28_000 * len(names.files))}): set XDG_CACHE_HOME to a larger disk, or"
            " leave data.resized_jpegs off. What was written is used when it continues."
        ) from error


def _encode_rest(parts: _Parts, names: ImageCache, stop: StopRequest) -> bool:
    """Resize the images that are missing; return whether none is left."""
    number, done = len(names.files), len(parts.lines)
    rows = range(done, number, PART)
    jobs = [[names.files[i] for i in range(row, min(row + PART, number))] for row in rows]
    pool = WorkerPool(partial(_encode, names.read), names.workers, torch.device("cpu"))
    try:
        with progress("resizing images", number, done) as meter:
            for part in pool.run(jobs):
                parts.add(part)
                meter.advance(len(parts.lines))
                if stop:
                    break
    finally:
        pool.close()
    return len(parts.lines) == number


def _encode(read: Callable[[str], Tensor], files: Sequence[str]) -> _Encoded:
    """Return the JPEGs of these images: a worker's part."""
    encoded, lines, start = [], [], 0
    for file, data in zip(files, _jpegs(read, files), strict=True):
        lines.append((_hash_of(file), start, len(data), zlib.crc32(data)))
        encoded.append(data)
        start += len(data)
    joined = torch.frombuffer(bytearray(b"".join(encoded)), dtype=torch.uint8) if start else None
    empty = torch.empty(0, dtype=torch.uint8)
    return _Encoded(empty if joined is None else joined, np.array(lines, dtype=LINE))


def _jpegs(read: Callable[[str], Tensor], files: Sequence[str]) -> Iterator[bytes]:
    """Yield the JPEG of each image; nothing for one that cannot be read."""
    for file in files:
        try:
            image = read(file)
        except UnreadableImage:
            yield b""
            continue
        pixels = to_tensor(image.numpy(), SHORTER_SIDE).permute(1, 2, 0).numpy()
        out = io.BytesIO()
        Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[..., 0]).save(
            out, "JPEG", quality=QUALITY
        )
        yield out.getvalue()
