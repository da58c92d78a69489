"""WebDataset archives on a disk as images by number; their members are indexed once.

A tar file has no table of contents, but each member is in one piece. The index says where, so that
any process can read images in any order, by `pread`. It is kept in the cache folder, and made again
if an archive has another size or time. "a-00.tar!cat.jpg@0:1536+2048" is the name of an image:
archive and member for people; number of the archive, offset and size for the reader.

An archive from elsewhere may name a billion files in a few characters, claim a size that it does
not have, or be a small compressed file that unpacks to a huge one. Whatever would fill the memory
or never end is refused with a message.

webdataset's own index (wids) does not serve here. Every process reads all headers again, labels are
not indexed, long names are cut, a changed archive is not noticed, members named .pkl are unpickled,
and a memory map kills the process if an archive is cut off.
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

from hardmix.data.cache import cache_folder
from hardmix.data.image_files import IMAGE_SUFFIXES, UnreadableImage, printable, read_image
from hardmix.data.image_set import FileNames, ImageSet
from hardmix.errors import InputError
from hardmix.runtime.console import progress, warn
from hardmix.runtime.files import write_atomically
from hardmix.settings.config import DataConfig

MOST_SHARDS = 1_000_000
"""Most archives that a root may name."""
MOST_BRACES = 64
"""Most pairs of braces in a root."""
MOST_DIGITS = 40
"""Most characters of two numbers in braces."""
MOST_CLASSES = 1_000_000
"""Labels are below this, because a class takes memory even if it has no image."""
MOST_BYTES = 2**29
"""Most bytes of an encoded image in an archive, together with its other files."""
MOST_HEADER = 2**20
"""Most bytes of a header in an archive: names and attributes."""

BRACES = re.compile(r"\{([^{}]*)\}")
_NUMBERS = re.compile(r"-?(\d+)\.\.-?(\d+)(\.\..*)?")
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])(\.\..*)?")
_LONG_HEADERS = {
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
}


def check_names(root: str) -> None:
    """Raise InputError if the braces of a root name too many archives."""
    total = 0
    for part in root.split("::"):
        number, pairs, braces = 1, 0, BRACES.search(part)
        while braces is not None and number <= MOST_SHARDS and pairs <= MOST_BRACES:
            number, pairs = number * _choices(braces[1]), pairs + 1
            part = f"{part[: braces.start()]}_{part[braces.end() :]}"  # braces may be nested
            braces = BRACES.search(part)
        total += number
        if total > MOST_SHARDS or pairs > MOST_BRACES:
            raise InputError(
                f"data.root={_start(root)} names more than {MOST_SHARDS:,} shards, or has more than"
                f" {MOST_BRACES} pairs of braces: name fewer."
            )


def _choices(text: str) -> int:
    """Return the most texts that braces can stand for."""
    numbers, letters = _NUMBERS.fullmatch(text), _LETTERS.fullmatch(text)
    if numbers and len(text) > MOST_DIGITS:
        return MOST_SHARDS + 1
    if numbers:
        first, last = text.split("..")[:2]
        return abs(int(last) - int(first)) + 1
    if letters:
        return abs(ord(letters[2]) - ord(letters[1])) + 1
    return text.count(",") + 1


def label_of(text: bytes, name: str) -> int:
    """Return the label in a file of an archive."""
    try:
        label = int(text[: MOST_DIGITS + 1])
    except ValueError:
        label = MOST_CLASSES
    if not -1 <= label < MOST_CLASSES:
        raise InputError(
            f"{printable(name)} holds {_start(repr(text[:80]))}: a label must be an integer from 0"
            f" to {MOST_CLASSES - 1}."
        )
    return label


class BoundedMember(tarfile.TarInfo):
    """A member of an archive, whose long headers are limited in size."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "BoundedMember":
        """Read a header of 512 bytes, and check the size of a longer one that follows it."""
        member = super().frombuf(buf, encoding, errors)
        if member.type in _LONG_HEADERS and member.size > MOST_HEADER:
            raise tarfile.ReadError(
                f"a header claims {member.size:,} bytes, more than {MOST_HEADER:,}"
            )
        return member


def check_size(member: tarfile.TarInfo, most: int | None = None) -> None:
    """Raise ReadError if a member's size is negative, or exceeds `most` bytes."""
    if member.size < 0 or (most is not None and member.size > most):
        limit = "0 or more are possible" if member.size < 0 else f"at most {most:,} are read"
        name = _start(printable(member.name))
        raise tarfile.ReadError(f"its member {name} claims {member.size:,} bytes: {limit}")


def _start(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


FORMAT = 1
CHECKSUM = 32
"""Bytes of the sha256 before the arrays of an index."""
MOST_OPEN = 64
"""Most archives that a process keeps open."""
_PLACE = re.compile(r"@(\d+):(\d+)\+(\d+)$")


class Shard(NamedTuple):
    """An archive as it was indexed."""

    path: str
    size: int
    time: int
    """Time of its last change, in nanoseconds."""


class Members(NamedTuple):
    """The images of all archives."""

    names: FileNames
    labels: NDArray[np.int64]
    """-1 for unknown ones."""


def is_indexed(root: str) -> bool:
    """Return whether shards can be indexed: only files on a disk that are not compressed."""
    stream = root.startswith("pipe:") or "://" in root
    return not stream and all(name.endswith(".tar") for name in expand(root))


def expand(root: str) -> list[str]:
    """Return the files that a root names: 'a-{000..099}.tar', '{a,b}.tar', 'a.tar::b.tar'."""
    check_names(root)
    return [name for part in root.split("::") for name in _expand(part)]


def _expand(text: str) -> list[str]:
    braces = BRACES.search(text)
    if braces is None:
        return [os.path.expanduser(text)]
    numbers = re.fullmatch(r"(\d+)\.\.(\d+)", braces[1])
    choices = braces[1].split(",")
    if numbers:
        first, last = int(numbers[1]), int(numbers[2])
        width = len(numbers[1])
        choices = [f"{number:0{width}d}" for number in range(first, last + 1)]
    head, tail = text[: braces.start()], text[braces.end() :]
    return [name for choice in choices for name in _expand(f"{head}{choice}{tail}")]


def open_shard_set(root: str, config: DataConfig, number_of_classes: int = 0) -> ImageSet:
    """Return the images of archives, with at least `number_of_classes`, those in training."""
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
            facts = os.stat(path)
        except OSError as error:
            raise InputError(
                f"data.root: the shard {printable(path)} cannot be read: {error.strerror}."
            ) from error
        shards.append(Shard(os.path.abspath(path), facts.st_size, facts.st_mtime_ns))
    return tuple(shards)


def index_file(shards: tuple[Shard, ...]) -> Path:
    """Return the file for the index of archives with these names."""
    names = "\0".join(shard.path for shard in shards)
    digest = hashlib.sha256(os.fsencode(names)).hexdigest()
    return cache_folder() / f"shards-{digest[:16]}.index"


def _digest(shards: tuple[Shard, ...]) -> str:
    return hashlib.sha256(repr((FORMAT, shards)).encode()).hexdigest()


def read_index(shards: tuple[Shard, ...]) -> Members | None:
    """Return the index of exactly these archives; None if it is missing or damaged."""
    try:
        data = index_file(shards).read_bytes()
    except OSError:
        return None
    checksum, content = data[:CHECKSUM], data[CHECKSUM:]
    if hashlib.sha256(content).digest() != checksum:
        return None
    with np.load(io.BytesIO(content)) as arrays:
        labels = arrays["labels"]
        if str(arrays["digest"]) != _digest(shards) or labels.max(initial=-1) >= MOST_CLASSES:
            return None
        names = FileNames.of_arrays(arrays["text"], arrays["ends"])
        return Members(names, labels)


def make_index(shards: tuple[Shard, ...]) -> Members:
    """Read the headers of all archives, and keep the index if it can be written.

    One process of a machine does this; the others wait, and then find the index.
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
            meter.advance(number + 1, None, f"{len(names):,} images")
    return Members(FileNames(names), np.array(labels, dtype=np.int64))


def _keep(members: Members, shards: tuple[Shard, ...]) -> Members:
    content = io.BytesIO()
    arrays: dict[str, Any] = {"text": members.names.text, "ends": members.names.ends}
    np.savez(content, digest=_digest(shards), labels=members.labels, **arrays)
    try:
        data = content.getvalue()
        write_atomically(index_file(shards), hashlib.sha256(data).digest() + data)
    except OSError as error:
        warn(f"the index of the shards is not kept ({error.strerror}): it is made again next time.")
    return members


def _members(shard: Shard, number: int) -> Iterator[tuple[str, int]]:
    """Yield the name and label of every sample, which is a group of members with the same key."""
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
    images = [member for member in members if Path(member.name).suffix.lower() in IMAGE_SUFFIXES]
    image = (images or members)[0]  # a sample without an image is reported when it is read
    label = next((member for member in members if _ending(member.name) == "cls"), None)
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
    """Decode an image of an archive; raise `UnreadableImage` if the archive has changed."""
    place = _PLACE.search(name)
    assert place is not None, f"{name} is not a member of a shard"
    number, offset, size = map(int, place.groups())
    data = _bytes(shards[number], offset, size)
    return read_image(io.BytesIO(data), channels, max_pixels, name[: place.start()], reduce)


_open: dict[str, int] = {}
"""File numbers of open archives, the least recently used first."""


def _bytes(shard: Shard, offset: int, size: int) -> bytes:
    """Return a part of an archive that has not changed since it was indexed."""
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
        state = os.fstat(file)  # after reading, so that a change in the meantime is noticed
    except OSError as error:
        raise UnreadableImage(f"{printable(shard.path)}: {error.strerror}") from error
    if (state.st_size, state.st_mtime_ns) != shard[1:] or len(data) < size:
        os.close(_open.pop(shard.path))
        raise UnreadableImage(
            f"{printable(shard.path)} has changed since it was indexed: start again, so that it is"
            " indexed anew"
        )
    return data
