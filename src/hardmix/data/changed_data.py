"""Checks whether a resumed run has the same images as before, and if not, which differ.

images.txt.gz in the run's folder has a line for every file: size, tab, path below the common
folder. For images held in memory there is only a fingerprint.
"""

import gzip
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from jaxtyping import Int64
from torch import Tensor

from hardmix.data.cache import file_states, shared_states
from hardmix.data.image_files import printable
from hardmix.data.image_set import ImageSet
from hardmix.runtime.distributed import broadcast_object, is_main
from hardmix.runtime.files import MOST_LINE, unpacked, write_atomically
from hardmix.settings.config import DataConfig

STREAM = "stream in lanes of"
"""Start of the mark of shards that are a stream; in earlier versions it was "shards"."""

SHOWN = 5
"""Most names in a message."""
HASHED = 4096
"""Most images held in memory that a fingerprint looks at."""


class DataRecord(NamedTuple):
    """Facts about a run's images that it keeps."""

    mark: str
    """Identifies the set of images."""
    sizes: dict[bytes, int] | None
    """Size of every file by its name, on rank 0; None if there are no files."""


def record_data(images: ImageSet | None, config: DataConfig) -> DataRecord:
    """Return rank 0's record of the images; for shards that are a stream, of their names only.

    This looks at all files once, when a run starts, also for the cache of decoded images: nothing
    else at the start looks at them again.
    """
    if images is None:
        return DataRecord(f"{STREAM} {os.path.basename(config.root or '')}", None)
    sizes = _look_at(images)[:, 0].tolist()
    if not is_main():
        return DataRecord(broadcast_object(""), None)
    by_name = None if images.files is None else dict(zip(_names(images), sizes, strict=True))
    return DataRecord(broadcast_object(fingerprint(images, sizes)), by_name)


def _look_at(images: ImageSet) -> Int64[Tensor, "n 2"]:
    cache = images.cache
    if cache is None or cache.mode == "off":
        return shared_states(images.files or ())
    cache.states = shared_states(cache.files)
    return cache.states if images.rows is None else cache.states[images.rows]


def fingerprint(images: ImageSet, sizes: Iterable[int] | None = None) -> str:
    """Return 16 hexadecimal digits that change with the data set, but not if its folder is moved.

    They depend on the names and sizes of files, or on the bytes of some thousand images in memory.
    `sizes` are those of the files, if they are known already.
    """
    if sizes is None:
        sizes = file_states(images.files or ())[:, 0].tolist()
    digest = hashlib.sha256(f"{len(images)} {images.channels}".encode())
    if images.labels is not None:
        digest.update(images.labels.numpy().tobytes())
    if images.tensor is not None:
        sample = images.tensor[:: max(1, len(images) // HASHED)]
        digest.update(sample.numpy().tobytes())
    files = images.files or ()
    start = len(os.path.commonpath(files)) if files else 0
    for file, size in zip(files, sizes, strict=True):
        digest.update(os.fsencode(file[start:]) + b"\0%d\0" % size)
    return digest.hexdigest()[:16]


def write_list(file: Path, record: DataRecord) -> None:
    """Write the names and sizes of the files."""
    if record.sizes is not None:
        lines = b"\n".join(b"%d\t" % size + name for name, size in record.sizes.items())
        write_atomically(file, gzip.compress(lines, mtime=0))


def describe_change(file: Path, record: DataRecord) -> str:
    """Say how many files were added, removed or changed since `write_list`, and name the first."""
    if record.mark.startswith(STREAM):
        return "other archives, or a stream that an earlier version read in another order"
    try:
        kinds = None if record.sizes is None else _compare(file, record.sizes)
    except (OSError, ValueError):
        kinds = None
    if kinds is None:
        return "a different number of images, or different labels or pixels"
    changes = []
    for kind, names in kinds.items():
        if names.number:
            shown = ", ".join(printable(os.fsdecode(name)) for name in names.first)
            changes.append(f"{names.number} {kind} ({shown}{', ...' * (names.number > SHOWN)})")
    return "; ".join(changes) or "the same files with different labels or in a different order"


class _Names:
    """The number of names, and the first few in order."""

    def __init__(self) -> None:
        self.number = 0
        self.first: list[bytes] = []

    def add(self, name: bytes) -> None:
        self.number += 1
        self.first = sorted([*self.first, name])[:SHOWN]


def _compare(file: Path, now: dict[bytes, int]) -> dict[str, _Names]:
    """Compare the files with a list, which is read line by line."""
    added, removed, changed = _Names(), _Names(), _Names()
    unlisted = set(now)
    for name, size in _listed(file):
        unlisted.discard(name)
        if name not in now:
            removed.add(name)
        elif now[name] != size:
            changed.add(name)
    for name in unlisted:
        added.add(name)
    return {"added": added, "removed": removed, "changed in size": changed}


def _names(images: ImageSet) -> list[bytes]:
    files = images.files or ()
    start = len(os.path.commonpath(files)) if files else 0
    return [os.fsencode(file[start:]).replace(b"\n", b"?") for file in files]


def _listed(file: Path) -> Iterator[tuple[bytes, int]]:
    """Yield the names and sizes of a list; raises OSError or ValueError if it is damaged."""
    rest = b""
    for part in unpacked(file):
        *lines, rest = (rest + part).split(b"\n")
        if len(rest) > MOST_LINE:
            raise ValueError("a line is too long")
        for line in lines:
            yield _entry(line)
    yield _entry(rest)


def _entry(line: bytes) -> tuple[bytes, int]:
    size, name = line.split(b"\t", 1)
    return name, int(size)
