"""Every image decoded once: kept in memory, or in a file where that pays, and read from there.

To decode a small image costs more than all else that happens to it. What is kept are the pixels as
the decoder gave them, so that a run has the same bits with and without. What cannot be kept (an
unreadable file, a full disk) is read from its own file as if there were no cache.
"""

import fcntl
import hashlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Int, Int64, UInt8
from torch import Tensor

from hardmix.data import image_arrays, image_files, video_frames
from hardmix.data.file_states import file_states
from hardmix.data.image_files import UnreadableImage, printable
from hardmix.data.kept_images import (
    Decoded,
    KeptImages,
    cache_folder,
    in_memory,
    new_file,
    open_images_file,
    pack,
    write_images,
)
from hardmix.data.workers import WorkerPool
from hardmix.runtime.atomic_files import room
from hardmix.runtime.console import progress, say, warn
from hardmix.runtime.distributed import rank, world_size
from hardmix.runtime.signals import StopRequest, listening
from hardmix.settings.named_choices import CacheMode

Read = Callable[[str], UInt8[Tensor, "channels height width"]]
Place = Literal["memory", "file"]

DECODERS = (image_arrays, image_files, video_frames)
"""Source files that pixels depend on: when one of them changes, caches are invalid."""
SAMPLED, SAMPLE_SECONDS = 64, 1.0
"""Images that are decoded to foresee how much room and time all of them take; fewer if slow."""
LONG = 20.0
"""Seconds of decoding that the next command should not spend again: they are worth a file."""
DISK = 100e6
"""Bytes a second that any disk reads: images that are decoded faster are not worth a file."""
FILE_SHARE = 5
"""How much larger than data.cache_gb a file may be that nobody has asked for."""
LITTLE = 32e6
"""Bytes that each of several processes may hold for itself."""
TOGETHER = 1 << 22
"""Bytes of decoded images that travel at once from a worker."""
ALONE_SECONDS = 2.0
"""Decoding that takes less is done here: workers would have to be started first."""


class Forecast(NamedTuple):
    """What decoding all images takes, judged by some."""

    bytes: float
    seconds: float


@dataclass(eq=False)
class ImageCache:
    """The decoded images of a set: nothing until `fill` or `find` has been called."""

    files: Sequence[str]
    read: Read
    """One of `files` to pixels; it is pickled for worker processes."""
    channels: int
    settings: tuple[Any, ...]
    """All else that the pixels depend on."""
    mode: CacheMode
    limit: float
    """Bytes that may be held in memory."""
    workers: int | None = 0
    """Processes that decode, as data.workers has it."""
    kept: KeptImages | None = None
    states: Int64[Tensor, "n 2"] | None = None
    """Of the files, as `file_states` has them, if they are known already."""
    _looked: bool = field(default=False, repr=False)

    def image(self, row: int) -> UInt8[Tensor, "channels height width"] | None:
        """Return one image, or None if it is not cached."""
        return None if self.kept is None else self.kept.image(row)

    def only(self, files: Sequence[str], rows: Int[Tensor, " m"]) -> "ImageCache":
        """Return a cache of some of the files, which have these rows."""
        states = None if self.states is None else self.states[rows]
        return replace(self, files=files, states=states, kept=None, _looked=False)

    def find(self) -> bool:
        """Use what this or another process has cached, if it is still valid."""
        if self.kept is None and self.mode != "off" and (_held or self.file.exists()):
            here = _held.get(self.mark)
            self.kept = here or open_images_file(self.file, self.mark, self.channels)
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
            except _Abandoned as why:
                if why.args:
                    warn(f"decoded images are not cached: {why}; every epoch decodes them again.")
            except OSError as error:
                warn(
                    f"decoded images are not cached ({error.strerror}; "
                    f"{room(self.file, int(forecast.bytes))}): every epoch decodes them again."
                )
        if stop.name is not None:  # it was meant for whoever listened before
            signal.raise_signal(signal.Signals[stop.name])

    @cached_property
    def mark(self) -> bytes:
        """What tells these pixels from others: names, sizes and times of files, and the decoder."""
        states = file_states(self.files) if self.states is None else self.states
        lines = "\n".join("" if size < 0 else f"{size} {time}" for size, time in states.tolist())
        return hashlib.sha256(self._name + lines.encode()).digest()

    @cached_property
    def _name(self) -> bytes:
        """Of the names, and of how they are decoded."""
        rules = b"".join(Path(each.__file__ or "").read_bytes() for each in DECODERS)
        here = "" if os.path.isabs(self.files[0]) else os.getcwd()
        facts = self.settings, self.channels, here, _versions()
        names = os.fsencode("\0".join(self.files))
        return hashlib.sha256(repr(facts).encode() + rules + names).digest()

    @property
    def file(self) -> Path:
        """Where the images of these names are kept; when one has changed, they are replaced."""
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
        """Memory, a file or neither: as asked for, or whatever pays."""
        here = forecast.bytes <= self.limit
        if self.mode == "file" or (self.mode == "memory" and here):
            return self._shared(self.mode, forecast)
        if self.mode == "memory":
            warn(
                f"data.cache=memory: {forecast.bytes / 1e9:.1f} GB of decoded images exceed"
                f" data.cache_gb={self.limit / 1e9:g}: every epoch decodes them again."
            )
            return None
        dear = forecast.seconds > LONG and forecast.bytes / forecast.seconds < DISK
        if dear and forecast.bytes <= min(FILE_SHARE * self.limit, _free(self.file.parent) / 2):
            return "file"
        return self._shared("memory", forecast) if here else None

    def _shared(self, place: Place, forecast: Forecast) -> Place:
        """Processes that train together share a file, unless it is hardly worth one."""
        alone = world_size() == 1 or forecast.bytes < LITTLE
        return place if alone and hasattr(os, "memfd_create") else "file"

    def _make(self, place: Place, forecast: Forecast, stop: StopRequest) -> None:
        started = time.monotonic()
        if place == "memory":
            out, path = in_memory()
            index = write_images(out, self._decoded(forecast, stop, self.limit), self.mark)
            self.kept = KeptImages(out, path, index, self.channels)
            _hold(self.mark, self.kept, self.limit)
            where = "memory"
        else:
            with _only_process(self.file, stop):
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
        """All images, part by part, as worker processes or this one decode them."""
        each = max(TOGETHER / 1024, forecast.bytes / len(self.files))
        rows = range(0, len(self.files), max(1, int(TOGETHER / each)))
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


class _Abandoned(Exception):  # noqa: N818  (no error: nothing is lost)
    """Somebody wants this process to stop, or the images are larger than foreseen."""


_held: dict[bytes, KeptImages] = {}
"""What this process has in memory, by its mark: a set that is opened again finds it here."""


def _hold(mark: bytes, kept: KeptImages, limit: float) -> None:
    """Remember it; the oldest are forgotten where all of them exceed the limit."""
    _held[mark] = kept
    while len(_held) > 1 and sum(each.bytes for each in _held.values()) > limit:
        del _held[next(iter(_held))]


@cache
def _versions() -> dict[str, str]:
    """Of the packages that decode and reduce."""
    found = {}
    for package in ("pillow", "pillow-heif", "av", "tifffile", "torch"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _free(folder: Path) -> float:
    """Bytes on its disk, or where it will be made."""
    try:
        return shutil.disk_usage(
            next(each for each in [folder, *folder.parents] if each.exists())
        ).free
    except OSError:
        return 0.0


def _decode(read: Read, files: list[str]) -> Decoded:
    return pack(_read_or_none(read, file) for file in files)


def _read_or_none(read: Read, file: str) -> Tensor | None:
    try:
        return read(file)
    except UnreadableImage:
        return None  # named and counted by whoever asks for it


@contextmanager
def _only_process(file: Path, stop: StopRequest) -> Iterator[None]:
    """Of several processes that want the same file one makes it; the others wait, then find it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if rank():
        time.sleep(1.0)  # rank 0 shows its progress: let it be first
    with file.with_suffix(".lock").open("a+") as lock:
        while True:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError):
                if stop:
                    raise _Abandoned from None
                time.sleep(0.1)
            except OSError:  # a file system without locks: then several make it, and the last stays
                break
        yield
