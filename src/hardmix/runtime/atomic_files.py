"""Files that are written completely or not at all. Only the main process writes."""

import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hardmix.errors import InputError, LockedError
from hardmix.runtime.distributed import is_main


def write_atomically(file: Path, data: bytes) -> None:
    """Write via a temporary file, fsync and rename: a crash leaves the old file or the new one."""
    if not is_main():
        return
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
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
        sync_folder(file.parent)


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
    """Delete temporary files of processes that were killed while they wrote."""
    for temporary in folder.glob(".*.tmp"):
        temporary.unlink(missing_ok=True)


def room(file: Path, needed: int) -> str:
    """Return text for messages: the size of a file and the free space on its disk."""
    try:
        free = f"{shutil.disk_usage(file.parent).free / 1e6:.1f} MB are free"
    except OSError:
        free = "the free space on its disk is unknown"
    return f"{file} needs {needed / 1e6:.1f} MB, {free}"
