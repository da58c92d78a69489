"""Reads the files of a run, which may come from anyone: regular files, up to a stated size.

A link to a device never ends, a fifo never answers, and a small compressed file may unpack to any
size. What is not read is an OSError whose `strerror` says why. Text is UTF-8.
"""

import errno
import io
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path

MOST_JSON = 16_000_000
"""Bytes of a JSON file: config, results, manifests, figures. Its objects may take 25 times that."""
MOST_LOG = 2_000_000_000
"""Bytes of a log, which is read line by line."""
MOST_LINE = 1_000_000
"""Bytes of a line of a log; longer ones are skipped."""
MOST_LISTED = 128_000_000
"""Bytes of the unpacked list of a run's images: that of ImageNet has 60,000,000."""
CHUNK = 1 << 20


def most_weights() -> int:
    """Return the most bytes of a file of weights: half of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def open_file(file: Path, most: int) -> io.BufferedReader:
    """Open a regular file of at most so many bytes; never waits for anything but the disk."""
    _check(file, os.stat(file), most)  # first: to open a device may already do something
    opened = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check(file, os.fstat(opened), most)
        return os.fdopen(opened, "rb")
    except BaseException:
        os.close(opened)
        raise


def check_file(file: Path, most: int) -> None:
    """Raise OSError unless it is a regular file of at most so many bytes."""
    open_file(file, most).close()


def read_file(file: Path, most: int) -> bytes:
    """Read a regular file of at most so many bytes, also if it grows meanwhile."""
    with open_file(file, most) as opened:
        data = opened.read(most + 1) or b""
    if len(data) > most:
        raise _refused(file, _too_large(len(data), most))
    return data


def read_lines(file: Path) -> Iterator[bytes]:
    """Yield the lines of a log, one after the other; an overlong one is cut."""
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
