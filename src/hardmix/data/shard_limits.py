"""Limits of shards: what would take all memory, or never end, is refused in a sentence.

An archive from elsewhere may name a billion files in a few characters, claim a size that it does
not have, or be a small compressed file that unpacks to a huge one.
"""

import re
import tarfile

from hardmix.data.image_files import printable
from hardmix.errors import InputError

MOST_SHARDS = 1_000_000
"""Archives that a root may name."""
MOST_BRACES = 64
"""Pairs of braces in a root."""
MOST_DIGITS = 40
"""Characters of two numbers in braces."""
MOST_CLASSES = 1_000_000
"""Labels are below this: a class has a name, and memory, even if no image is of it."""
MOST_BYTES = 2**29
"""Bytes of an image in an archive, still encoded, together with its other files."""
MOST_HEADER = 2**20
"""Bytes of a header of an archive: names and attributes."""

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
        number, braces, found = 1, 0, BRACES.search(part)
        while found is not None and number <= MOST_SHARDS and braces <= MOST_BRACES:
            number, braces = number * _choices(found[1]), braces + 1
            part = f"{part[: found.start()]}_{part[found.end() :]}"  # braces may be nested
            found = BRACES.search(part)
        total += number
        if total > MOST_SHARDS or braces > MOST_BRACES:
            raise InputError(
                f"data.root={_start(root)} names more than {MOST_SHARDS:,} shards, or has more than"
                f" {MOST_BRACES} pairs of braces: name fewer."
            )


def _choices(text: str) -> int:
    """Return how many texts braces stand for, at most."""
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
    """Return the label that a file of an archive holds."""
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
    """A member of an archive whose header claims no impossible size."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "BoundedMember":
        """Read a header of 512 bytes; a longer one that follows it is limited, too."""
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
