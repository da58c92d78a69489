"""Whether the images of a resumed run are those it was started with, and if not, which differ.

images.txt.gz in the run's folder has a line for every file: size, tab, path below the common
folder. Of images held in memory only the fingerprint is known.
"""

import gzip
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from jaxtyping import Int64
from torch import Tensor

from hardmix.data.file_states import file_states, shared_states
from hardmix.data.image_files import printable
from hardmix.data.image_set import ImageSet
from hardmix.runtime.atomic_files import write_atomically
from hardmix.runtime.distributed import broadcast_text, is_main
from hardmix.settings.bounded_files import MOST_LINE, unpacked
from hardmix.settings.config import DataConfig

STREAM = "stream in lanes of"
"""Start of the mark of shards that are a stream; of earlier versions it was "shards"."""
SHOWN = 5
"""Names in a message."""
HASHED = 4096
"""Images held in memory that a fingerprint looks at, at most."""


class DataRecord(NamedTuple):
    """What a run remembers of its images."""

    mark: str
    """What tells one set of images from another."""
    sizes: dict[bytes, int] | None
    """Of every file by its name; known to rank 0, and where there are files."""


def record_data(images: ImageSet | None, config: DataConfig) -> DataRecord:
    """Return a record of the images, made by rank 0; for shards, of their names only.

    Done once, when a run starts, and for the cache of decoded images too: nothing else that starts
    a run looks at the files again.
    """
    if images is None:
        return DataRecord(f"{STREAM} {os.path.basename(config.root or '')}", None)
    sizes = _look_at(images)[:, 0].tolist()
    if not is_main():
        return DataRecord(broadcast_text(""), None)
    named = None if images.files is None else dict(zip(_names(images), sizes, strict=True))
    return DataRecord(broadcast_text(fingerprint(images, sizes)), named)


def _look_at(images: ImageSet) -> Int64[Tensor, "n 2"]:
    cache = images.cache
    if cache is None or cache.mode == "off":
        return shared_states(images.files or ())
    cache.states = shared_states(cache.files)
    return cache.states if images.rows is None else cache.states[images.rows]


def fingerprint(images: ImageSet, sizes: Iterable[int] | None = None) -> str:
    """16 hexadecimal digits that change with the data set, yet not when its folder is moved.

    Of files the names and sizes count, of images in memory the bytes of some thousands. `sizes`:
    of the files, if they are known already.
    """
    if sizes is None:
        sizes = file_states(images.files or ())[:, 0].tolist()
    digest = hashlib.sha256(f"{len(images)} {images.channels}".encode())
    if images.labels is not None:
        digest.update(images.labels.numpy().tobytes())
    if images.tensor is not None:
        some = images.tensor[:: max(1, len(images) // HASHED)]
        digest.update(some.numpy().tobytes())
    files = images.files or ()
    start = len(os.path.commonpath(files)) if files else 0
    for file, size in zip(files, sizes, strict=True):
        digest.update(os.fsencode(file[start:]) + b"\0%d\0" % size)
    return digest.hexdigest()[:16]


def write_list(file: Path, record: DataRecord) -> None:
    """Remember the files' names and sizes."""
    if record.sizes is not None:
        lines = b"\n".join(b"%d\t" % size + name for name, size in record.sizes.items())
        write_atomically(file, gzip.compress(lines, mtime=0))


def describe_change(file: Path, record: DataRecord) -> str:
    """How many files were added, removed or changed since `write_list`, and the first names."""
    if record.mark.startswith(STREAM):
        return "other archives, or a stream that an earlier version read in another order"
    try:
        kinds = None if record.sizes is None else _compare(file, record.sizes)
    except (OSError, ValueError):
        kinds = None
    if kinds is None:
        return "a different number of images, or different labels or pixels"
    said = []
    for kind, names in kinds.items():
        if names.number:
            shown = ", ".join(printable(os.fsdecode(name)) for name in names.first)
            said.append(f"{names.number} {kind} ({shown}{', ...' * (names.number > SHOWN)})")
    return "; ".join(said) or "the same files with different labels or in a different order"


class _Names:
    """How many names there are, and the first few in order."""

    def __init__(self) -> None:
        self.number = 0
        self.first: list[bytes] = []

    def add(self, name: bytes) -> None:
        self.number += 1
        self.first = sorted([*self.first, name])[:SHOWN]


def _compare(file: Path, now: dict[bytes, int]) -> dict[str, _Names]:
    """Compare the files with those that are listed, which are read one by one."""
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
