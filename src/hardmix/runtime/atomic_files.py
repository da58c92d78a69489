"""Files that exist whole or not at all. Only the main process writes."""

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
    """Temporary file, fsync, rename, directory fsync: the old file or the new one, never half."""
    if not is_main():
        return
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(file)
    except OSError as error:
        error.filename = os.fspath(file)  # the one that is missed, also where a write fails
        raise
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Make sure that names written, changed or deleted in a folder survive a power loss."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def append_line(file: Path, text: str) -> None:
    """Add a line; where there is no room for all of it, none of it stays and OSError is raised."""
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
    """Be the only process that trains in a folder, which is made if need be.

    Two would spoil each other's files. A POSIX lock: it ends with its process, however that ends,
    and loader workers do not inherit it.
    """
    if not is_main():
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("a+")
    except OSError as error:
        raise InputError(f"--out {folder} cannot be written: {error.strerror}.") from error
    with file:
        with suppress(OSError):  # a file system without locks, or without room
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                file.seek(0)
                holder = file.read().strip() or "another process"
                raise LockedError(
                    f"--out {folder} is being written by {holder}: wait until it has ended, or"
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
    """For messages: what a file needs and what its disk has."""
    try:
        free = f"{shutil.disk_usage(file.parent).free / 1e6:.1f} MB are free"
    except OSError:
        free = "its disk does not say how much is free"
    return f"{file} needs {needed / 1e6:.1f} MB, {free}"
