"""Decoded images one after another in a file, or in memory that looks like one.

Pixels lie as the decoder left them, then follows an index with a line for each image, then a tail
that says where the index is and what the images are. A file is written under another name and
renamed when it is whole. Images are read by `pread`: any number of processes share the system's
copy of the file, and one that was cut or damaged is noticed instead of killing its reader.
"""

import os
import struct
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import UInt8
from numpy.typing import NDArray
from torch import Tensor

from hardmix.runtime.atomic_files import remove_dead, temporary_of

INDEX = np.dtype(
    [
        ("start", "<i8"),
        ("height", "<i4"),  # 0: not kept
        ("width", "<i4"),
        ("planar", "u1"),  # whether the channels lie one after another, or side by side
        ("crc", "<u4"),
    ]
)
_TAIL = struct.Struct("<16sQQI32s")
_MAGIC = b"hardmix images 1"
AT_ONCE = 1 << 26
"""Bytes of images in one tensor, at most."""
UNUSED_DAYS = 30
"""After so long without use a file is deleted by the next one that is made."""
LEFT_SECONDS = 3600.0
"""A temporary file that nobody has written to for so long belongs to a process that is gone."""

Index = NDArray[Any]
"""Lines of `INDEX`."""


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/hardmix, or ~/.cache/hardmix."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hardmix"


class KeptImages:
    """Decoded images by number, in an open file."""

    def __init__(self, file: IO[bytes], path: str, index: Index, channels: int) -> None:
        self._file, self._path, self._channels = file, path, channels
        self._index = index
        self._start, self._crc = index["start"].copy(), index["crc"].copy()
        self._shape = np.stack([index[name] for name in ("height", "width", "planar")], axis=1)
        self._good = np.zeros(len(index), dtype=np.bool_)  # checked once by each process

    def __reduce__(self) -> tuple[Any, ...]:
        """For worker processes that are not forked: opened again, never sent."""
        return _reopened, (self._path, self._index, self._channels)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def bytes(self) -> int:
        """Of all pixels."""
        return int(self._shape[:, :2].prod(axis=1, dtype=np.int64).sum()) * self._channels

    def image(self, row: int) -> UInt8[Tensor, "channels height width"] | None:
        """The very pixels that decoding gave, laid out as it left them; None if not kept."""
        height, width, _ = self._shape[row].tolist()
        pixels = np.empty(height * width * self._channels, dtype=np.uint8)
        if not height or not self._fill(row, pixels):
            return None
        return self._laid_out(pixels, row, height, width)

    def images(self, rows: list[int]) -> UInt8[Tensor, "n channels height width"] | None:
        """Several in one tensor; None unless all are kept, small and of one size."""
        shapes = self._shape[rows]
        height, width, _ = shapes[0].tolist()
        size = height * width * self._channels
        if not 0 < size * len(rows) <= AT_ONCE or (shapes != shapes[0]).any():
            return None
        pixels = np.empty((len(rows), size), dtype=np.uint8)
        if not all(self._fill(row, line) for row, line in zip(rows, pixels, strict=True)):
            return None
        return self._laid_out(pixels, rows[0], height, width)

    def _laid_out(self, pixels: NDArray[np.uint8], row: int, height: int, width: int) -> Tensor:
        if self._shape[row, 2]:
            return torch.from_numpy(pixels.reshape(*pixels.shape[:-1], -1, height, width))
        side_by_side = pixels.reshape(*pixels.shape[:-1], height, width, -1)
        return torch.from_numpy(side_by_side).movedim(-1, -3)

    def _fill(self, row: int, pixels: NDArray[np.uint8]) -> bool:
        try:
            got = os.preadv(self._file.fileno(), [pixels.data], int(self._start[row]))
        except OSError:
            return False
        if got == len(pixels) and not self._good[row]:
            self._good[row] = zlib.crc32(pixels.data) == self._crc[row]
        return got == len(pixels) and bool(self._good[row])


class Decoded(NamedTuple):
    """Images that a process has decoded: their pixels, and a line of the index for each."""

    pixels: UInt8[Tensor, " bytes"]
    lines: Index


def pack(images: Iterable[UInt8[Tensor, "channels _ _"] | None]) -> Decoded:
    """Images, None where one is not to be kept, one after another."""
    parts, lines, start = [], [], 0
    for image in images:
        if image is None:
            lines.append((0, 0, 0, 0, 0))
            continue
        planar = not image.permute(1, 2, 0).is_contiguous()
        flat = (image if planar else image.permute(1, 2, 0)).reshape(-1)
        lines.append((start, *image.shape[1:], planar, zlib.crc32(flat.numpy().data)))
        parts.append(flat)
        start += len(flat)
    pixels = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
    return Decoded(pixels, np.array(lines, dtype=INDEX))


def write_images(out: IO[bytes], decoded: Iterable[Decoded], mark: bytes) -> Index:
    """All images, in order, then the index and the tail; `mark` tells them from others."""
    indices, end = [], 0
    for pixels, lines in decoded:
        lines["start"] += end
        out.write(pixels.numpy().data)
        indices.append(lines)
        end += len(pixels)
    whole = np.concatenate(indices)
    out.write(whole.tobytes())
    out.write(_TAIL.pack(_MAGIC, end, len(whole), zlib.crc32(whole.tobytes()), mark))
    out.flush()
    return whole


def open_images_file(file: Path, mark: bytes, channels: int) -> KeptImages | None:
    """What `write_images` wrote there; None unless it is whole and has this mark."""
    try:
        opened = file.open("rb", buffering=0)
    except OSError:
        return None
    try:
        index = _read_index(opened, mark)
    except (OSError, ValueError, struct.error):
        index = None
    if index is None:
        opened.close()
        return None
    with suppress(OSError):  # of somebody else, perhaps
        os.utime(file)
    return KeptImages(opened, str(file), index, channels)


def _read_index(opened: IO[bytes], mark: bytes) -> Index | None:
    size = opened.seek(0, os.SEEK_END)
    tail = os.pread(opened.fileno(), _TAIL.size, size - _TAIL.size)
    magic, start, number, crc, found = _TAIL.unpack(tail)
    length = number * INDEX.itemsize
    if magic != _MAGIC or found != mark or start + length + _TAIL.size != size:
        return None
    lines = os.pread(opened.fileno(), length, start)
    return np.frombuffer(lines, dtype=INDEX) if zlib.crc32(lines) == crc else None


def _reopened(path: str, index: Index, channels: int) -> KeptImages:
    return KeptImages(Path(path).open("rb", buffering=0), path, index, channels)


def in_memory() -> tuple[IO[bytes], str]:
    """An empty file without a disk, gone with the last process that has it open; and its path."""
    descriptor = os.memfd_create("hardmix-images")
    return os.fdopen(descriptor, "w+b"), f"/proc/{os.getpid()}/fd/{descriptor}"


@contextmanager
def new_file(file: Path) -> Iterator[IO[bytes]]:
    """Written within, it has its name afterwards; if anything goes wrong nothing is left."""
    file.parent.mkdir(parents=True, exist_ok=True)
    _tidy(file.parent)
    temporary = temporary_of(file)
    try:
        with temporary.open("wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def _tidy(folder: Path) -> None:
    """Delete what nobody has used for long, and what killed processes left."""
    remove_dead(folder)
    left = dict.fromkeys((".images-*.tmp", ".shards-*.tmp"), LEFT_SECONDS)
    ages = {**left, "images-*": UNUSED_DAYS * 86400.0}
    for names, age in ages.items():
        for old in folder.glob(names):
            with suppress(OSError):
                if time.time() - old.stat().st_mtime > age:
                    old.unlink()
