"""How a command ends: its exit status, and a one-sentence message.

0 done; 1 a bug in hardmix, with a traceback; 2 bad input; 74 results could not be written;
75 stopped, can be resumed; 130 interrupted twice.
"""

import errno
import re
from typing import NamedTuple

from hardmix.errors import InputError, OutputError, UnfinishedError

UNUSABLE = (
    errno.EACCES,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
)
"""Errors of a file or folder that cannot be used."""

FULL = (errno.EDQUOT, errno.EFBIG, errno.ENOSPC)
"""Errors of a disk that has no more space."""

FAILED = (
    errno.EIO,
    errno.EREMOTEIO,
    errno.ESTALE,  # a network disk whose file or folder was replaced on the server
    errno.ENODEV,
    errno.ENOTCONN,
    errno.ENXIO,
    errno.ETIMEDOUT,
)
"""Errors of a disk that fails, as network disks may for a while."""


class Ending(NamedTuple):
    """A message and an exit status."""

    message: str
    status: int


def ending_of(error: Exception) -> Ending | None:
    """Return how a command ends with this error; None if it is a bug in hardmix."""
    if isinstance(error, InputError | OutputError | UnfinishedError):
        return Ending(str(error), error.status)
    if isinstance(error, OSError):
        return _of_file(error)
    return _of_memory(error)


def _of_file(error: OSError) -> Ending | None:
    name = "a file" if error.filename is None else str(error.filename)
    if error.errno in FULL:
        return Ending(
            f"results could not be written ({error.strerror}): {name}; free some space and run the"
            " command again.",
            74,
        )
    if error.errno in FAILED:
        return Ending(
            f"results could not be written, or data not be read ({error.strerror}): {name}; check"
            " the disk and run the command again.",
            74,
        )
    if error.errno in UNUSABLE:
        return Ending(f"{name} cannot be used: {error.strerror}; choose another.", 2)
    return None


def _of_memory(error: Exception) -> Ending | None:
    said = str(error).partition("\n")[0]
    if not isinstance(error, MemoryError) and not re.search(
        r"allocate memory|out of memory|calculation overflowed|multiplication overflow", said
    ):
        return None
    asked = re.search(r"allocate ([\d.]+)( \w*iB|(?= bytes))", said)
    amount = "more than is available"
    if asked is not None:
        amount = asked[1] + asked[2] if asked[2] else f"{int(asked[1]) / 1e9:.1f} GB"
    return Ending(
        f"not enough memory ({amount} was requested): lower the batch size, the image size, the"
        " number of images or the queue size.",
        2,
    )
