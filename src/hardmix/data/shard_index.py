"""WebDataset archives on a disk, as images by number: their members are indexed once.

A tar file has no table of contents, but every member lies in it in one piece. The index says where,
and an image is read by `pread`: by any process, in any order. It is kept in the cache folder and
made anew where an archive has another size or time. "a-00.tar!cat.jpg@0:1536+2048" is the name of
an image: archive and member, for people; number of the archive, offset and size, for the reader.
"""

import fcntl
import hashlib
import io
import itertools
import os
import re
import tarfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import UInt8
from numpy.typing import NDArray
from torch import Tensor

from hardmix.data.file_names import FileNames
from hardmix.data.image_files import IMAGE_SUFFIXES, UnreadableImage, printable, read_image
from hardmix.data.image_set import ImageSet
from hardmix.data.kept_images import cache_folder
from hardmix.data.shard_limits import (
    BRACES,
    MOST_BYTES,
    MOST_CLASSES,
    MOST_HEADER,
    BoundedMember,
    check_names,
    check_size,
    label_of,
)
from hardmix.errors import InputError
from hardmix.runtime.atomic_files import write_atomically
from hardmix.runtime.console import progress, warn
from hardmix.settings.config import DataConfig

FORMAT = 1
CHECKSUM = 32
"""Bytes of sha256, before the arrays of an index."""
MOST_OPEN = 64
"""Archives that a process keeps open."""
_PLACE = re.compile(r"@(\d+):(\d+)\+(\d+)$")


class Shard(NamedTuple):
    """An archive as it was indexed."""

    path: str
    size: int
    time: int
    """Of its last change, in nanoseconds."""


class Members(NamedTuple):
    """The images of all archives."""

    names: FileNames
    labels: NDArray[np.int64]
    """-1 where unknown."""


def is_indexed(root: str) -> bool:
    """Return whether shards can be indexed: files on a disk, not compressed as a whole."""
    stream = root.startswith("pipe:") or "://" in root
    return not stream and all(name.endswith(".tar") for name in expand(root))


def expand(root: str) -> list[str]:
    """Return the files that a root names: 'a-{000..099}.tar', '{a,b}.tar', 'a.tar::b.tar'."""
    check_names(root)
    return [name for part in root.split("::") for name in _expand(part)]


def _expand(text: str) -> list[str]:
    found = BRACES.search(text)
    if found is None:
        return [os.path.expanduser(text)]
    numbers = re.fullmatch(r"(\d+)\.\.(\d+)", found[1])
    choices = found[1].split(",")
    if numbers:
        first, last = int(numbers[1]), int(numbers[2])
        width = len(numbers[1])
        choices = [f"{number:0{width}d}" for number in range(first, last + 1)]
    head, tail = text[: found.start()], text[found.end() :]
    return [name for choice in choices for name in _expand(f"{head}{choice}{tail}")]


def open_shard_set(root: str, config: DataConfig, number_of_classes: int = 0) -> ImageSet:
    """Return the images of archives; `number_of_classes`: at least, as training images have."""
    shards = _states(expand(root))
    members = read_index(shards) or make_index(shards)
    classes = max(number_of_classes, int(members.labels.max(initial=-1)) + 1)
    reduce = 2 * config.image_size if config.reduce else None
    return ImageSet(
        printable(root),
        torch.from_numpy(members.labels) if classes else None,
        tuple(map(str, range(classes))) if classes else None,
        files=members.names,
        channels=config.channels,
        max_pixels=config.max_pixels,
        read=partial(read_member, shards, reduce=reduce),
        state=_digest(shards),
    )


def _states(paths: list[str]) -> tuple[Shard, ...]:
    shards = []
    for path in paths:
        try:
            found = os.stat(path)
        except OSError as error:
            raise InputError(
                f"data.root: the shard {printable(path)} cannot be read: {error.strerror}."
            ) from error
        shards.append(Shard(os.path.abspath(path), found.st_size, found.st_mtime_ns))
    return tuple(shards)


def index_file(shards: tuple[Shard, ...]) -> Path:
    """Return the place of the index of archives with these names."""
    names = "\0".join(shard.path for shard in shards)
    digest = hashlib.sha256(os.fsencode(names)).hexdigest()
    return cache_folder() / f"shards-{digest[:16]}.index"


def _digest(shards: tuple[Shard, ...]) -> str:
    return hashlib.sha256(repr((FORMAT, shards)).encode()).hexdigest()


def read_index(shards: tuple[Shard, ...]) -> Members | None:
    """Return the index of these very archives; None if there is none, or it is damaged."""
    try:
        data = index_file(shards).read_bytes()
    except OSError:
        return None
    checksum, content = data[:CHECKSUM], data[CHECKSUM:]
    if hashlib.sha256(content).digest() != checksum:
        return None
    with np.load(io.BytesIO(content)) as found:
        labels = found["labels"]
        if str(found["digest"]) != _digest(shards) or labels.max(initial=-1) >= MOST_CLASSES:
            return None
        names = FileNames.of_arrays(found["text"], found["ends"])
        return Members(names, labels)


def make_index(shards: tuple[Shard, ...]) -> Members:
    """Read every archive's headers, and keep the index if the disk takes it.

    Of several processes on a machine one does it; the others wait, then find it.
    """
    file = index_file(shards)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.with_suffix(".lock").open("a") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
            return read_index(shards) or _keep(_indexed(shards), shards)
    except OSError:  # no folder, or a file system without locks
        return _indexed(shards)


def _indexed(shards: tuple[Shard, ...]) -> Members:
    names: list[str] = []
    labels: list[int] = []
    with progress("indexing shards", len(shards)) as meter:
        for number, shard in enumerate(shards):
            for name, label in _members(shard, number):
                names.append(name)
                labels.append(label)
            meter.advance(number + 1, f"{len(names)} images")
    return Members(FileNames(names), np.array(labels, dtype=np.int64))


def _keep(made: Members, shards: tuple[Shard, ...]) -> Members:
    content = io.BytesIO()
    arrays: dict[str, Any] = {"text": made.names.text, "ends": made.names.ends}
    np.savez(content, digest=_digest(shards), labels=made.labels, **arrays)
    try:
        data = content.getvalue()
        write_atomically(index_file(shards), hashlib.sha256(data).digest() + data)
    except OSError as error:
        warn(f"the index of the shards is not kept ({error.strerror}): it is made again next time.")
    return made


def _members(shard: Shard, number: int) -> Iterator[tuple[str, int]]:
    """Yield name and label of every sample: consecutive members of one key."""
    try:
        with tarfile.open(shard.path, "r:", tarinfo=BoundedMember) as tar:
            files = _files(tar, shard)
            for _, sample in itertools.groupby(files, key=lambda member: _key(member.name)):
                yield _sample(tar, shard, number, list(sample))
            _check_end(tar.offset, shard)
    except (OSError, tarfile.TarError, EOFError, ValueError, OverflowError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"data.root: the shard {printable(shard.path)} cannot be read: {error}."
        ) from error


def _files(tar: tarfile.TarFile, shard: Shard) -> Iterator[tarfile.TarInfo]:
    for member in tar:
        check_size(member)
        if member.isfile():
            _check_end(member.offset_data + member.size, shard)
            yield member


def _check_end(end: int, shard: Shard) -> None:
    if end > shard.size:
        raise InputError(
            f"data.root: the shard {printable(shard.path)} is cut off, or claims a false size: a"
            f" member ends at byte {end}, the file at {shard.size}. Copy it again."
        )


def _sample(
    tar: tarfile.TarFile, shard: Shard, number: int, members: list[tarfile.TarInfo]
) -> tuple[str, int]:
    images = [each for each in members if Path(each.name).suffix.lower() in IMAGE_SUFFIXES]
    image = (images or members)[0]  # one without an image is named when it is read
    label = next((each for each in members if _ending(each.name) == "cls"), None)
    name = f"{os.path.basename(shard.path)}!{image.name}@{number}:{image.offset_data}+{image.size}"
    if label is None:
        return name, -1
    check_size(label, MOST_HEADER)
    text = tar.extractfile(label).read()  # type: ignore[union-attr]  # a file
    return name, label_of(text, f"{os.path.basename(shard.path)}/{label.name}")


def _key(name: str) -> str:
    folder, base = os.path.split(name)
    return os.path.join(folder, base.partition(".")[0])


def _ending(name: str) -> str:
    return os.path.basename(name).partition(".")[2].lower()


def read_member(
    shards: tuple[Shard, ...], name: str, channels: int, max_pixels: int, reduce: int | None = None
) -> UInt8[Tensor, "channels height width"]:
    """Decode an image of an archive; raise `UnreadableImage` if the archive is another by now."""
    found = _PLACE.search(name)
    assert found is not None, f"{name} is not a member of a shard"
    number, offset, size = map(int, found.groups())
    data = _bytes(shards[number], offset, size)
    return read_image(io.BytesIO(data), channels, max_pixels, name[: found.start()], reduce)


_open: dict[str, int] = {}
"""File numbers of open archives, the least recently used first."""


def _bytes(shard: Shard, offset: int, size: int) -> bytes:
    """Return a part of an archive, as it was when it was indexed."""
    if size > MOST_BYTES:
        raise UnreadableImage(
            f"{printable(shard.path)} has a member of {size:,} bytes: at most {MOST_BYTES:,} are"
            " read"
        )
    try:
        file = _open.pop(shard.path, None)
        if file is None:
            file = os.open(shard.path, os.O_RDONLY | os.O_CLOEXEC)
        _open[shard.path] = file
        if len(_open) > MOST_OPEN:
            os.close(_open.pop(next(iter(_open))))
        data = os.pread(file, size, offset)
        state = os.fstat(file)  # afterwards: a change before or while it was read shows here
    except OSError as error:
        raise UnreadableImage(f"{printable(shard.path)}: {error.strerror}") from error
    if (state.st_size, state.st_mtime_ns) != shard[1:] or len(data) < size:
        os.close(_open.pop(shard.path))
        raise UnreadableImage(
            f"{printable(shard.path)} has changed since it was indexed: start again, so that it is"
            " indexed anew"
        )
    return data
