"""Decoded images: each is decoded once and kept in memory, or in a file if that saves time.

Decoding a small image costs more than everything else that happens to it. The pixels are kept as
the decoder gave them, so that a run has the same bits with and without a cache. Images that cannot
be kept (an unreadable file, a full disk) are read from their own files, as if there were no cache.

In the file, or in memory that looks like one, the pixels of all images come first, then an index
with a line for each, then a tail that says where the index is and which images these are. The file
is written under another name and renamed when it is complete. Images are read by `pread`: any
number of processes share the system's copy of the file, and a file that was cut or damaged is
noticed instead of killing its reader.
"""

import fcntl
import hashlib
import os
import shutil
import signal
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Int, Int64, UInt8
from numpy.typing import NDArray
from torch import Tensor

from hardmix.data import image_files, video_frames
from hardmix.data.image_files import UnreadableImage, printable
from hardmix.data.video_frames import source_of
from hardmix.data.workers import WorkerPool
from hardmix.errors import InputError
from hardmix.runtime.console import progress, say, warn
from hardmix.runtime.distributed import (
    agree_on_max,
    broadcast,
    is_main,
    rank,
    while_main_works,
    world_size,
)
from hardmix.runtime.files import remove_dead, room, temporary_of
from hardmix.runtime.signals import StopRequest, listening
from hardmix.settings.named_choices import CacheMode

INDEX = np.dtype(
    [
        ("start", "<i8"),
        ("height", "<i4"),  # 0 if the image is not kept
        ("width", "<i4"),
        ("planar", "u1"),  # whether the channels lie one after another, or side by side
        ("crc", "<u4"),
    ]
)
_TAIL = struct.Struct("<16sQQI32s")
_MAGIC = b"hardmix images 1"
AT_ONCE = 1 << 26
"""Most bytes of images in one tensor."""
UNUSED_DAYS = 30
"""Days without use after which a file is deleted when another one is made."""
LEFT_SECONDS = 3600.0
"""Age after which an unfinished file is taken to be that of a process that is gone."""

Index = NDArray[Any]
"""Lines of `INDEX`."""


def cache_folder() -> Path:
    """Return $XDG_CACHE_HOME/hardmix, or ~/.cache/hardmix."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hardmix"


class KeptImages:
    """Decoded images by number, in an open file."""

    def __init__(self, file: IO[bytes], path: str, index: Index, channels: int) -> None:
        self._file, self._path, self._channels = file, path, channels
        self._index = index
        self._start, self._crc = index["start"].copy(), index["crc"].copy()
        self._shape = np.stack([index[name] for name in ("height", "width", "planar")], axis=1)
        self._checked = np.zeros(len(index), dtype=np.bool_)  # once by each process

    def __reduce__(self) -> tuple[Any, ...]:
        """Open the file again in worker processes that are not forked."""
        return _reopened, (self._path, self._index, self._channels)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def bytes(self) -> int:
        """Bytes of all pixels."""
        return int(self._shape[:, :2].prod(axis=1, dtype=np.int64).sum()) * self._channels

    def image(self, row: int) -> UInt8[Tensor, "channels height width"] | None:
        """Return the pixels of an image, in memory as the decoder left them; None if not kept."""
        height, width, _ = self._shape[row].tolist()
        pixels = np.empty(height * width * self._channels, dtype=np.uint8)
        if not height or not self._fill(row, pixels):
            return None
        return self._laid_out(pixels, row, height, width)

    def images(self, rows: list[int]) -> UInt8[Tensor, "n channels height width"] | None:
        """Return several images in one tensor; None unless all are kept, small and of one size."""
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
            size = os.preadv(self._file.fileno(), [pixels.data], int(self._start[row]))
        except OSError:
            return False
        if size == len(pixels) and not self._checked[row]:
            self._checked[row] = zlib.crc32(pixels.data) == self._crc[row]
        return size == len(pixels) and bool(self._checked[row])


class Decoded(NamedTuple):
    """Images that a worker has decoded: their pixels, and a line of the index for each."""

    pixels: UInt8[Tensor, " bytes"]
    lines: Index


def pack(images: Iterable[UInt8[Tensor, "channels _ _"] | None]) -> Decoded:
    """Put the pixels of images one after another; None stands for one that is not kept."""
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
    """Write all images in order, the index and the tail; `mark` identifies the images."""
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
    """Open a file of `write_images`; return None unless it is complete and has this mark."""
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
    with suppress(OSError):  # it may belong to another user
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
    """Return an empty file in memory, and its path; it ends with the last process that has it."""
    descriptor = os.memfd_create("hardmix-images")
    return os.fdopen(descriptor, "w+b"), f"/proc/{os.getpid()}/fd/{descriptor}"


@contextmanager
def new_file(file: Path) -> Iterator[IO[bytes]]:
    """Give a file its name when the context ends; delete it if anything goes wrong."""
    file.parent.mkdir(parents=True, exist_ok=True)
    tidy(file.parent)
    temporary = temporary_of(file)
    try:
        with temporary.open("wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def tidy(folder: Path) -> None:
    """Delete files that have not been used for long, and those that killed processes left."""
    remove_dead(folder)
    unfinished = dict.fromkeys((".images-*.tmp", ".shards-*.tmp"), LEFT_SECONDS)
    unused = dict.fromkeys(("images-*", "jpegs-*"), UNUSED_DAYS * 86400.0)
    ages = unfinished | unused
    for pattern, age in ages.items():
        for old in folder.glob(pattern):
            with suppress(OSError):
                if time.time() - old.stat().st_mtime > age:
                    old.unlink()


Read = Callable[[str], UInt8[Tensor, "channels height width"]]
Place = Literal["memory", "file"]

DECODERS = (image_files, video_frames)
"""Modules that decode: when the source of one of them changes, caches are invalid."""
SAMPLED, SAMPLE_SECONDS = 64, 1.0
"""Images, and seconds, that are spent on estimating the size of all and the time to decode them."""
LONG = 20.0
"""Seconds of decoding that are worth a file, so that the next command need not spend them."""
DISK = 100e6
"""Bytes per second that any disk reads: images that are decoded faster are not worth a file."""
FILE_SHARE = 5
"""Largest size of a file that the user has not asked for, as a multiple of data.cache_gb."""
LITTLE = 32e6
"""Bytes that each of several processes may hold by itself instead of in a shared file."""

TOGETHER = 1 << 22
"""Bytes of decoded images that a worker sends at once."""
ALONE_SECONDS = 2.0
"""Seconds up to which decoding is done in this process, without starting workers."""


class Forecast(NamedTuple):
    """Estimates for all images, from a sample."""

    bytes: float
    seconds: float


@dataclass(eq=False)
class ImageCache:
    """The decoded images of a set; empty until `fill` or `find` is called."""

    files: Sequence[str]
    read: Read
    """Function from one of `files` to pixels; it is pickled for worker processes."""
    channels: int
    settings: tuple[Any, ...]
    """Everything else that the pixels depend on."""
    mode: CacheMode
    limit: float
    """Bytes that may be held in memory."""
    workers: int | None = 0
    """Processes that decode, as data.workers."""
    kept: KeptImages | None = None
    states: Int64[Tensor, "n 2"] | None = None
    """Result of `file_states` for the files, if it is known already."""
    _looked: bool = field(default=False, repr=False)

    def image(self, row: int) -> UInt8[Tensor, "channels height width"] | None:
        """Return one image, or None if it is not cached."""
        return None if self.kept is None else self.kept.image(row)

    def only(self, files: Sequence[str], rows: Int[Tensor, " m"]) -> "ImageCache":
        """Return a cache of only these files, which have these rows."""
        states = None if self.states is None else self.states[rows]
        return replace(self, files=files, states=states, kept=None, _looked=False)

    def find(self) -> bool:
        """Use what this or another process has cached, if it is still valid."""
        if self.kept is None and self.mode != "off" and (_held or os.path.exists(self.file)):
            held = _held.get(self.mark)
            self.kept = held or open_images_file(self.file, self.mark, self.channels)
        return self.kept is not None

    def fill(self) -> None:
        """Decode all images once, unless they are already cached or it is not worthwhile."""
        if self._looked or self.mode == "off" or self.find():
            return
        self._looked = True
        forecast = self._forecast()
        place = self._place(forecast)
        if place is None:
            return
        with listening() as stop:
            try:
                self._make(place, forecast, stop)
            except _Abandoned as reason:
                if reason.args:
                    warn(
                        f"decoded images are not cached: {reason}; every epoch decodes them again."
                    )
            except OSError as error:
                warn(
                    f"decoded images are not cached ({error.strerror}; "
                    f"{room(self.file, int(forecast.bytes))}): every epoch decodes them again."
                )
        if stop.name is not None:  # the signal is for those who listened before
            signal.raise_signal(signal.Signals[stop.name])

    @cached_property
    def mark(self) -> bytes:
        """Identifies these pixels: a hash of the files' names, sizes and times, and the decoder."""
        states = file_states(self.files) if self.states is None else self.states
        lines = "\n".join("" if size < 0 else f"{size} {time}" for size, time in states.tolist())
        return hashlib.sha256(self._name + lines.encode()).digest()

    @cached_property
    def _name(self) -> bytes:
        """Hash of the names, and of how the files are decoded."""
        rules = b"".join(Path(module.__file__ or "").read_bytes() for module in DECODERS)
        folder = "" if os.path.isabs(self.files[0]) else os.getcwd()
        facts = self.settings, self.channels, folder, _versions()
        names = os.fsencode("\0".join(self.files))
        return hashlib.sha256(repr(facts).encode() + rules + names).digest()

    @property
    def file(self) -> Path:
        """The file for images of these names; it is replaced when one of them has changed."""
        return cache_folder() / f"images-{self._name.hex()[:16]}.pixels"

    def _forecast(self) -> Forecast:
        step = max(1, len(self.files) // SAMPLED)
        started, total, number = time.perf_counter(), 0, 0
        for file in self.files[::step]:
            number += 1
            total += getattr(_read_or_none(self.read, file), "nbytes", 0)
            if number >= SAMPLED // 8 and time.perf_counter() - started > SAMPLE_SECONDS:
                break
        scale = len(self.files) / number
        return Forecast(total * scale, (time.perf_counter() - started) * scale)

    def _place(self, forecast: Forecast) -> Place | None:
        """Return where to keep the images: as requested, or wherever it saves time; or None."""
        fits = forecast.bytes <= self.limit
        if self.mode == "file" or (self.mode == "memory" and fits):
            return self._shared(self.mode, forecast)
        if self.mode == "memory":
            warn(
                f"data.cache=memory: {forecast.bytes / 1e9:.1f} GB of decoded images exceed"
                f" data.cache_gb={self.limit / 1e9:g}: every epoch decodes them again."
            )
            return None
        slow = forecast.seconds > LONG and forecast.bytes / forecast.seconds < DISK
        if slow and forecast.bytes <= min(FILE_SHARE * self.limit, _free(self.file.parent) / 2):
            return "file"
        return self._shared("memory", forecast) if fits else None

    def _shared(self, place: Place, forecast: Forecast) -> Place:
        """Return "file" if several processes should share the images, unless they are small."""
        apart = world_size() == 1 or forecast.bytes < LITTLE
        return place if apart and hasattr(os, "memfd_create") else "file"

    def _make(self, place: Place, forecast: Forecast, stop: StopRequest) -> None:
        started = time.monotonic()
        if place == "memory":
            out, path = in_memory()
            index = write_images(out, self._decoded(forecast, stop, self.limit), self.mark)
            self.kept = KeptImages(out, path, index, self.channels)
            _hold(self.mark, self.kept, self.limit)
            where = "memory"
        else:
            with only_process(self.file, stop):
                if self.find():
                    return
                with new_file(self.file) as out:
                    write_images(out, self._decoded(forecast, stop), self.mark)
            self.find()
            where = f"{printable(self.file)}, which may be deleted at any time"
        seconds = time.monotonic() - started
        if self.kept is not None and (place == "file" or seconds > ALONE_SECONDS):
            number, size = len(self.files), self.kept.bytes / 1e6
            say(f"Decoded {number} images in {seconds:.0f} s: {size:.0f} MB in {where}.")

    def _decoded(
        self, forecast: Forecast, stop: StopRequest, limit: float = float("inf")
    ) -> Iterator[Decoded]:
        """Yield all images, part by part, decoded by worker processes or by this one."""
        image_bytes = max(TOGETHER / 1024, forecast.bytes / len(self.files))
        rows = range(0, len(self.files), max(1, int(TOGETHER / image_bytes)))
        jobs = [list(self.files[row : row + rows.step]) for row in rows]
        workers = self.workers if forecast.seconds > ALONE_SECONDS else 0
        pool = WorkerPool(partial(_decode, self.read), workers, torch.device("cpu"))
        done = size = 0
        try:
            with progress("decoding images", len(self.files)) as meter:
                for part in pool.run(jobs):
                    done, size = done + len(part.lines), size + len(part.pixels)
                    if stop:
                        raise _Abandoned
                    if size > 1.5 * limit:
                        raise _Abandoned(f"they exceed data.cache_gb={self.limit / 1e9:g}")
                    meter.advance(done)
                    yield part
        finally:
            pool.close()


class _Abandoned(Exception):  # noqa: N818  (not an error: nothing is lost)
    """This process was asked to stop, or the images are larger than estimated."""


_held: dict[bytes, KeptImages] = {}
"""Images that this process holds in memory, by mark, for sets that are opened again."""


def _hold(mark: bytes, kept: KeptImages, limit: float) -> None:
    """Hold images in memory; drop the oldest ones if together they exceed the limit."""
    _held[mark] = kept
    while len(_held) > 1 and sum(each.bytes for each in _held.values()) > limit:
        del _held[next(iter(_held))]


@cache
def _versions() -> dict[str, str]:
    """Return the versions of the packages that decode and reduce."""
    versions = {}
    for package in ("pillow", "pillow-heif", "av", "tifffile", "torch", "torchcodec"):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def _free(folder: Path) -> float:
    """Return the free bytes on the disk of a folder, which need not exist yet."""
    try:
        existing = next(path for path in [folder, *folder.parents] if os.path.exists(path))
        return shutil.disk_usage(existing).free
    except OSError:
        return 0.0


def _decode(read: Read, files: list[str]) -> Decoded:
    return pack(_read_or_none(read, file) for file in files)


def _read_or_none(read: Read, file: str) -> Tensor | None:
    try:
        return read(file)
    except UnreadableImage:
        return None  # whoever needs it reports and counts it


@contextmanager
def only_process(file: Path, stop: StopRequest) -> Iterator[None]:
    """Let one process make a file; others that want it wait, and find it afterwards."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if rank():
        time.sleep(1.0)  # rank 0 shows its progress, so it should be first
    with file.with_suffix(".lock").open("a+") as lock:
        while True:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError):
                if stop:
                    raise _Abandoned from None
                time.sleep(0.1)
            except OSError:  # a file system without locks: several make it, and the last one stays
                break
        yield


MISSING = (-1, -1)
"""State of a file that does not exist."""
LOOKED_AT, LOOKING = 1000, 16
"""Files that are looked at together, and threads that look at them."""


def file_states(files: Sequence[str]) -> Int64[Tensor, "n 2"]:
    """Return the size of every file, and the time of its last change in nanoseconds."""
    return _joined(_look_at(files))


def shared_states(files: Sequence[str]) -> Int64[Tensor, "n 2"]:
    """Return rank 0's `file_states` on every rank.

    A million files on a network disk take minutes, during which rank 0 sends signs of life.
    """
    most = agree_on_max(len(files))
    if most != len(files):
        raise InputError(
            f"this process finds {len(files)} images, another one {most}: all processes must see"
            " the same files."
        )
    parts = while_main_works(_look_at(files))
    return broadcast(_joined(parts) if is_main() else torch.zeros(most, 2, dtype=torch.int64))


def _look_at(files: Sequence[str]) -> Iterator[Int64[Tensor, "some 2"]]:
    """Yield the states part by part, from several threads: network disks answer slowly."""
    parts = [files[start : start + LOOKED_AT] for start in range(0, len(files), LOOKED_AT)]
    with ThreadPoolExecutor(LOOKING) as threads:
        yield from threads.map(_states_of, parts)


def _states_of(files: Sequence[str]) -> Int64[Tensor, "some 2"]:
    states = []
    for file in files:
        try:
            facts = _stat(file)
        except (OSError, ValueError):  # gone, or a name that only the user's own `read` knows
            states.append(MISSING)
        else:
            states.append((facts.st_size, facts.st_mtime_ns))
    return torch.tensor(states)


def _stat(name: str) -> os.stat_result:
    try:
        return os.stat(name)
    except OSError:
        return os.stat(source_of(name))  # the video of a frame


def _joined(parts: Iterator[Tensor] | list[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0, 2, dtype=torch.int64), *parts])
