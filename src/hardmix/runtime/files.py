"""Files that are written completely or not at all, and read within limits.

Only the main process writes. The files of a run may come from anyone: only regular files are read,
up to a stated size. A link to a device never ends, a fifo never answers, and a small compressed
file may unpack to any size. A refusal is an OSError whose `strerror` gives the reason.
"""

import errno
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import socket
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from hardmix.errors import InputError, LockedError


def write_atomically(file: Path, data: bytes) -> None:
    """Write via a temporary file, fsync and rename: a crash leaves the old file or the new one.

    Temporary files that killed processes left in the folder are deleted.
    """
    if not _writes():
        return
    temporary = temporary_of(file)
    with errors_naming(file):
        try:
            with temporary.open("wb") as out:
                out.write(data)
                out.flush()
                os.fsync(out.fileno())
            temporary.replace(file)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
        remove_dead(file.parent)
        sync_folder(file.parent)


def _writes() -> bool:
    from hardmix.runtime.distributed import is_main  # imports torch, which reading does not need

    return is_main()


def temporary_of(file: Path) -> Path:
    """Return the temporary file that this process writes a file to."""
    return file.with_name(f".{file.name}.hardmix-{_host()}-{os.getpid()}.tmp")


_TEMPORARY = re.compile(r"\..*\.hardmix-([0-9a-f]{8})-(\d+)\.tmp")


@cache
def _host() -> str:
    """Return a short name of this machine: others that share a folder have the same process ids."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def remove_dead(folder: Path) -> None:
    """Delete temporary files of processes of this machine that are gone."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            name = _TEMPORARY.fullmatch(entry.name) if entry.name.endswith(".tmp") else None
            if name is not None and name[1] == _host() and not _is_alive(int(name[2])):
                os.unlink(entry.path)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it is another user's
        return True
    return True


@contextmanager
def errors_naming(file: Path) -> Iterator[None]:
    """Make OSErrors name the file: those of a failed write or fsync do not."""
    try:
        yield
    except OSError as error:
        error.filename = os.fspath(file)
        raise


def sync_folder(folder: Path) -> None:
    """Make sure that names written, changed or deleted in a folder survive a power loss."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def append_line(file: Path, text: str) -> None:
    """Append a line; if the disk is full, remove any part of it and raise OSError."""
    if not _writes():
        return
    size = file.stat().st_size if file.exists() else 0
    try:
        with file.open("ab", buffering=0) as out:
            data = (text + "\n").encode()
            while data:  # a disk that is nearly full accepts only a part
                data = data[out.write(data) :]
    except OSError:
        if file.exists():
            os.truncate(file, size)
        raise


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Lock a folder, creating it if needed, so that no other process trains in it.

    This is a POSIX lock: it is released when its process ends, however it ends, and loader workers
    do not inherit it.
    """
    if not _writes():
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("a+")
    except OSError as error:
        raise InputError(f"out={folder} cannot be written: {error.strerror}.") from error
    with file:
        with suppress(OSError):  # a file system without locks, or without room
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                file.seek(0)
                holder = file.read().strip() or "another process"
                raise LockedError(
                    f"out={folder} is being written by {holder}: wait until it ends, or"
                    " choose another folder."
                ) from None
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        yield


def remove_leftovers(folder: Path) -> None:
    """Delete all temporary files in a folder that no other process writes to."""
    for temporary in folder.glob(".*.tmp"):
        temporary.unlink(missing_ok=True)


def room(file: Path, needed: int) -> str:
    """Return text for messages: the size of a file and the free space on its disk."""
    try:
        free = f"{shutil.disk_usage(file.parent).free / 1e6:.1f} MB are free"
    except OSError:
        free = "the free space on its disk is unknown"
    return f"{file} needs {needed / 1e6:.1f} MB, {free}"


MOST_JSON = 16_000_000
"""Most bytes of a JSON file: config, results, manifests, figures. Its objects may take 25 times as
much memory."""
MOST_LOG = 2_000_000_000
"""Most bytes of a log, which is read line by line."""
MOST_LINE = 1_000_000
"""Most bytes of a line of a log; longer lines are skipped."""
MOST_LISTED = 128_000_000
"""Most bytes of the unpacked list of a run's images; ImageNet's has 60,000,000."""
CHUNK = 1 << 20


def most_weights() -> int:
    """Return the most bytes of a file of weights: half of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def open_file(file: Path, most: int) -> io.BufferedReader:
    """Open a regular file of at most `most` bytes, without waiting for anything but the disk."""
    _check(file, os.stat(file), most)  # before opening it, which can act on a device
    opened = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check(file, os.fstat(opened), most)
        return os.fdopen(opened, "rb")
    except BaseException:
        os.close(opened)
        raise


def check_file(file: Path, most: int) -> None:
    """Raise OSError unless this is a regular file of at most `most` bytes."""
    open_file(file, most).close()


def read_file(file: Path, most: int) -> bytes:
    """Read a regular file of at most `most` bytes, even if it grows in the meantime."""
    with open_file(file, most) as opened:
        data = opened.read(most + 1) or b""
    if len(data) > most:
        raise _refused(file, _too_large(len(data), most))
    return data


def read_lines(file: Path) -> Iterator[bytes]:
    """Yield the lines of a log; overlong ones are cut."""
    with open_file(file, MOST_LOG) as opened:
        while line := opened.readline(MOST_LINE):
            rest = line
            while len(rest) == MOST_LINE and not rest.endswith(b"\n"):
                rest = opened.readline(MOST_LINE)
            yield line if rest is line else line + b"\n"


def unpacked(file: Path) -> Iterator[bytes]:
    """Yield the parts of a gzip file; raises OSError if it is damaged or grows too large."""
    reader, size = zlib.decompressobj(wbits=31), 0
    with open_file(file, MOST_LISTED) as opened:
        while packed := opened.read(CHUNK):
            while packed:
                try:
                    part = reader.decompress(packed, CHUNK)
                except zlib.error as error:
                    raise _refused(file, f"it is damaged ({error})") from error
                size += len(part)
                if size > MOST_LISTED:
                    raise _refused(file, f"it unpacks to more than {MOST_LISTED // 10**6} MB")
                yield part
                packed = reader.unconsumed_tail
    if not reader.eof:
        raise _refused(file, "it is incomplete")


def _check(file: Path, facts: os.stat_result, most: int) -> None:
    if stat.S_ISDIR(facts.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
    if not stat.S_ISREG(facts.st_mode):
        raise _refused(file, "it is not a regular file")
    if facts.st_size > most:
        raise _refused(file, _too_large(facts.st_size, most))


def _too_large(size: int, most: int) -> str:
    return f"it has {size / 1e6:,.0f} MB, and at most {most / 1e6:,.0f} MB are read"


def _refused(file: Path, why: str) -> OSError:
    return OSError(errno.EPERM, why, str(file))


def read_json(file: Path) -> Any:
    """Read a JSON file in UTF-8; raise OSError, or ValueError if it is damaged or too deep."""
    try:
        return json.loads(read_file(file, MOST_JSON).decode("utf-8"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
