"""Whether the images of a resumed run are those it was started with, and if not, which differ.

images.txt.gz in the run's folder has a line for every file: size, tab, path below the common
folder. Of images held in memory only the fingerprint is known.
"""

import gzip
import os
import zlib
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from hardmix.data.datasets import ImageSet, file_sizes, fingerprint
from hardmix.data.image_files import printable
from hardmix.runtime.atomic_files import write_atomically
from hardmix.runtime.distributed import broadcast_text, is_main, while_main_works
from hardmix.settings.config import DataConfig

SHOWN = 5
"""Names in a message."""


class DataRecord(NamedTuple):
    """What a run remembers of its images."""

    mark: str
    """What tells one set of images from another."""
    sizes: dict[bytes, int] | None
    """Of every file by its name; known to rank 0, and where there are files."""


def record_data(images: ImageSet | None, config: DataConfig) -> DataRecord:
    """Look at every file once, on rank 0, and tell the others; of shards the names count.

    Done once, when a run starts: a million files on a network disk take minutes, in which the other
    processes hear that rank 0 is still at it.
    """
    if images is None:
        return DataRecord(f"shards {os.path.basename(config.root or '')}", None)
    parts = while_main_works(file_sizes(images))
    if not is_main():
        return DataRecord(broadcast_text(""), None)
    sizes = list(chain.from_iterable(parts))
    named = None if images.files is None else dict(zip(_names(images), sizes, strict=True))
    return DataRecord(broadcast_text(fingerprint(images, sizes)), named)


def write_list(file: Path, record: DataRecord) -> None:
    """Remember the files' names and sizes."""
    if record.sizes is not None:
        lines = b"\n".join(b"%d\t" % size + name for name, size in record.sizes.items())
        write_atomically(file, gzip.compress(lines, mtime=0))


def describe_change(file: Path, record: DataRecord) -> str:
    """How many files were added, removed or changed since `write_list`, and the first names."""
    before, now = _read_list(file), record.sizes
    if now is None or before is None:
        return "another number of images, other labels or other pixels"
    kinds = {
        "added": [name for name in now if name not in before],
        "removed": [name for name in before if name not in now],
        "changed in size": [name for name in now if before.get(name, now[name]) != now[name]],
    }
    said = []
    for kind, names in kinds.items():
        if names:
            shown = ", ".join(printable(os.fsdecode(name)) for name in sorted(names)[:SHOWN])
            said.append(f"{len(names)} {kind} ({shown}{', ...' * (len(names) > SHOWN)})")
    return "; ".join(said) or "the same files with other labels, or in another order"


def _names(images: ImageSet) -> list[bytes]:
    files = images.files or ()
    start = len(os.path.commonpath(files)) if files else 0
    return [os.fsencode(file[start:]).replace(b"\n", b"?") for file in files]


def _read_list(file: Path) -> dict[bytes, int] | None:
    try:
        lines = gzip.decompress(file.read_bytes()).split(b"\n")
        pairs = [line.split(b"\t", 1) for line in lines]
        return {name: int(size) for size, name in pairs}
    except (OSError, EOFError, ValueError, zlib.error):
        return None
