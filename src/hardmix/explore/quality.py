"""Flaws that people look for in a set of images, and copies where there should be none.

Blurred, dark, bright, empty, tiny and oddly shaped images are told by plain measures; exact copies
by the bytes of their files. Copies between two groups of images are leaks: between training and
test images, they make a test easier than it is; between patients, somebody exchanged files.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float32, Int64

from hardmix.data.folders import TEST_FOLDERS
from hardmix.data.image_set import ImageSet
from hardmix.errors import InputError
from hardmix.explore.pictures import Pictures

BLURRED = 0.62
"""Blur from which an image is called blurred."""
DARK, DARKEST_HIGH = 45.0, 110.0
"""A dark image has a mean grey value below the first, and 95 % of its pixels below the second."""
BRIGHT, BRIGHTEST_LOW = 210.0, 130.0
"""A bright image has a mean grey value above the first, and 95 % of its pixels above the second."""
EMPTY = 4.0
"""Deviation of the grey values below which there is nothing to see."""
TINY_SIDE, TINY_SHARE = 32, 0.1
"""A tiny image has a shorter side below the first, or fewer pixels than this share of the median
image."""
LONG = 2.5
"""Ratio of the sides from which a shape is odd, unless half of the images are as long."""
SETS = frozenset({"train", "training", *TEST_FOLDERS})
"""Folders that are compared with each other unless other groups are named."""


@dataclass(frozen=True, eq=False)
class Flaw:
    """Images with one flaw, the clearest first."""

    name: str
    """A word: blurred, dark, bright, empty, tiny, long."""
    rows: Int64[np.ndarray, " m"]
    values: Float32[np.ndarray, " m"]
    """The measure by which each was found."""
    measure: str
    """The name of the measure."""


@dataclass(frozen=True, eq=False)
class Leak:
    """An image and its copy in another group."""

    row: int
    group: str
    other: int
    other_group: str
    agreement: float


def flaws_of(pictures: Pictures) -> list[Flaw]:
    """Return all images with a flaw, by kind; kinds that do not occur are missing."""
    readable = pictures.width > 0
    shorter = np.minimum(pictures.width, pictures.height)
    ratio = np.maximum(pictures.width, pictures.height) / np.maximum(1, shorter)
    pixels = pictures.pixels
    median = float(np.median(pixels[readable])) if readable.any() else 0.0
    usual = float(np.median(ratio[readable])) if readable.any() else 1.0
    empty = pictures.contrast < EMPTY
    dark = (pictures.mean < DARK) & (pictures.high < DARKEST_HIGH)
    bright = (pictures.mean > BRIGHT) & (pictures.low > BRIGHTEST_LOW)
    few = TINY_SHARE * median
    # A set of small images, as a whole, has no tiny ones; of these, sharpness says nothing either.
    tiny = (pixels < few) | ((shorter < TINY_SIDE) & (median >= 4 * TINY_SIDE**2))
    measurable = shorter >= 2 * TINY_SIDE
    kinds = [
        ("blurred", (pictures.blur > BLURRED) & measurable & ~empty, -pictures.blur),
        ("dark", dark & ~empty, pictures.mean),
        ("bright", bright & ~empty, -pictures.mean),
        ("empty", empty, pictures.contrast),
        ("tiny", tiny, pixels.astype(np.float32)),
        ("long", (ratio > LONG) & (usual < LONG), -ratio.astype(np.float32)),
    ]
    flaws = []
    for name, found, ranking in kinds:
        rows = np.flatnonzero(found & readable)
        if len(rows):
            rows = rows[np.lexsort((rows, ranking[rows]))]
            values = np.abs(ranking[rows]).astype(np.float32)
            flaws.append(Flaw(name, rows, values, MEASURED[name]))
    return flaws


MEASURED = {
    "blurred": "blur, 0 to 1",
    "dark": "mean grey value, 0 to 255",
    "bright": "mean grey value, 0 to 255",
    "empty": "deviation of the grey values",
    "tiny": "pixels",
    "long": "longer side over shorter side",
}


def exact_copies(
    images: ImageSet, ids: Sequence[int], pictures: Pictures
) -> list[Int64[np.ndarray, " m"]]:
    """Return groups of images whose files have the same bytes, in any folder; the largest first.

    Only files of the same size are read. Images in memory are compared by their pixels.
    """
    by_size = defaultdict(list)
    for row, size in enumerate(pictures.bytes.tolist()):
        if size or images.tensor is not None:
            by_size[size].append(row)
    groups = defaultdict(list)
    for size, rows in by_size.items():
        if len(rows) > 1:
            for row in rows:
                groups[size, _digest(images, ids[row])].append(row)
    copies = [np.array(rows) for rows in groups.values() if len(rows) > 1]
    return sorted(copies, key=lambda rows: (-len(rows), int(rows[0])))


def _digest(images: ImageSet, index: int) -> bytes:
    """Return a hash of an image's file; its number if the file can no longer be read."""
    if images.tensor is not None:
        return hashlib.sha256(images.tensor[index].numpy().tobytes()).digest()
    assert images.files is not None
    try:
        with Path(images.files[index]).open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError:
        return b"%d" % index


def groups_of(names: Sequence[str], groups: str | None) -> list[str] | None:
    """Return the group of each image; None if there are fewer than two.

    Args:
        names: paths below the folder of all images, with "/" between folders.
        groups: the level of the folder that names the group ("1" is the first), or a regular
            expression whose first group, or match, does. None means the first folders, if they are
            named train, test or val.
    """
    if groups is None:
        firsts = {name.partition("/")[0] for name in names}
        if not (len(firsts) > 1 and firsts <= SETS):
            return None
        groups = "1"
    if groups.isdecimal():
        found = [_folder(name, int(groups)) for name in names]
    else:
        found = _matches(names, groups)
    number = len(set(found) - {""})
    if number < 2:
        raise InputError(
            f"groups={groups} finds {number} groups of images: name a level of folders (1 is the"
            " first below the folder of all images), or a regular expression, such as"
            " '([^/]+)_[^/]*$', whose first group is the name of an image's group."
        )
    return found


def _folder(name: str, level: int) -> str:
    folders = name.split("/")[:-1]
    return folders[level - 1] if 1 <= level <= len(folders) else ""


def _matches(names: Sequence[str], pattern: str) -> list[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise InputError(
            f"groups={pattern} is neither a number nor a regular expression: {error}."
        ) from error
    found = map(compiled.search, names)
    return [match[min(1, compiled.groups)] or "" if match else "" for match in found]


def leaks_of(
    pairs: Int64[np.ndarray, "pairs 2"],
    agreement: Float32[np.ndarray, " pairs"],
    groups: Sequence[str],
) -> list[Leak]:
    """Return the pairs of copies whose images are in different groups, the clearest first."""
    leaks = []
    for place in np.lexsort((pairs[:, 1], pairs[:, 0], -agreement)):
        row, other = pairs[place].tolist()
        if groups[row] and groups[other] and groups[row] != groups[other]:
            leaks.append(Leak(row, groups[row], other, groups[other], float(agreement[place])))
    return leaks
