"""Files that are written completely or not at all. Only the main process writes."""

import fcntl
import hashlib
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from hardmix.errors import InputError, LockedError
from hardmix.runtime.distributed import is_main


def write_atomically(file: Path, data: bytes) -> None:
    """Write via a temporary file, fsync and rename: a crash leaves the old file or the new one.

    Temporary files that killed processes left in the folder are deleted.
    """
    if not is_main():
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


def temporary_of(file: Path) -> Path:
    """Return the temporary file that this process writes a file to."""
    return file.with_name(f".{file.name}.hardmix-{_host()}-{os.getpid()}.tmp")


_TEMPORARY = re.compile(r"\..*\.hardmix-([0-9a-f]{8})-(\d+)\.tmp")


@cache
def _host() -> str:
    """Return a short name of this machine: a folder may be shared, and processes have numbers."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def remove_dead(folder: Path) -> None:
    """Delete temporary files of processes of this machine that are gone."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            found = _TEMPORARY.fullmatch(entry.name) if entry.name.endswith(".tmp") else None
            if found is not None and found[1] == _host() and not _is_alive(int(found[2])):
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
    """Have errors name the file that is missed: a failed write or fsync names none."""
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
    if not is_main():
        return
    size = file.stat().st_size if file.exists() else 0
    try:
        with file.open("ab", buffering=0) as out:
            data = (text + "\n").encode()
            while data:  # a disk that is nearly full takes a part
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
    if not is_main():
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
    """Delete all temporary files of a folder that nobody else writes to."""
    for temporary in folder.glob(".*.tmp"):
        temporary.unlink(missing_ok=True)


def room(file: Path, needed: int) -> str:
    """Return text for messages: the size of a file and the free space on its disk."""
    try:
        free = f"{shutil.disk_usage(file.parent).free / 1e6:.1f} MB are free"
    except OSError:
        free = "the free space on its disk is unknown"
    return f"{file} needs {needed / 1e6:.1f} MB, {free}"
