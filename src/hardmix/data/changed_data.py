"""Whether the images of a resumed run are those it was started with, and if not, which differ.

images.txt.gz in the run's folder has a line for every file: size, tab, path below the common
folder. Of images held in memory only the fingerprint is known.
"""

import gzip
import hashlib
import os
import zlib
from pathlib import Path

from hardmix.data.image_files import printable
from hardmix.data.image_set import ImageSet
from hardmix.data.video_frames import source_of
from hardmix.runtime.atomic_files import write_atomically
from hardmix.settings.config import DataConfig

SHOWN = 5
"""Names in a message."""
HASHED = 4096
"""Images held in memory that a fingerprint looks at, at most."""


def data_mark(images: ImageSet | None, config: DataConfig) -> str:
    """What tells one set of images from another; of shards, which are a stream, the names."""
    if images is None:
        return f"shards {os.path.basename(config.root or '')}"
    return fingerprint(images)


def fingerprint(images: ImageSet) -> str:
    """16 hexadecimal digits that change with the data set, yet not when its folder is moved.

    Of files the names and sizes count, of images in memory the bytes of some thousands.
    """
    digest = hashlib.sha256(f"{len(images)} {images.channels}".encode())
    if images.labels is not None:
        digest.update(images.labels.numpy().tobytes())
    if images.tensor is not None:
        some = images.tensor[:: max(1, len(images) // HASHED)]
        digest.update(some.numpy().tobytes())
    files = images.files or ()
    start = len(os.path.commonpath(files)) if files else 0
    for file in files:
        digest.update(os.fsencode(file[start:]) + b"\0%d\0" % _size(file))
    return digest.hexdigest()[:16]


def write_list(file: Path, images: ImageSet | None) -> None:
    """Remember the files' names and sizes."""
    if images is not None and images.files is not None:
        lines = b"\n".join(b"%d\t" % size + name for name, size in _sizes(images).items())
        write_atomically(file, gzip.compress(lines, mtime=0))


def describe_change(file: Path, images: ImageSet | None) -> str:
    """How many files were added, removed or changed since `write_list`, and the first names."""
    before = _read_list(file)
    if images is None or images.files is None or before is None:
        return "another number of images, other labels or other pixels"
    now = _sizes(images)
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


def _sizes(images: ImageSet) -> dict[bytes, int]:
    files = images.files or ()
    start = len(os.path.commonpath(files)) if files else 0
    return {os.fsencode(file[start:]).replace(b"\n", b"?"): _size(file) for file in files}


def _size(name: str) -> int:
    """Bytes of the file that an image comes from; -1 where there is none."""
    try:
        return os.path.getsize(source_of(name))
    except OSError:
        return -1


def _read_list(file: Path) -> dict[bytes, int] | None:
    try:
        lines = gzip.decompress(file.read_bytes()).split(b"\n")
        pairs = [line.split(b"\t", 1) for line in lines]
        return {name: int(size) for size, name in pairs}
    except (OSError, EOFError, ValueError, zlib.error):
        return None
