"""Near-duplicates: groups of nearly identical images, and the one to keep in each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, Int64
from numpy.typing import ArrayLike
from torch import Tensor

from hardmix.errors import InputError
from hardmix.explore.neighbourhoods import SHOWN, named, unit_rows
from hardmix.settings.small_html import rows_html

THRESHOLD = 0.95
"""Smallest cosine similarity of near-duplicates."""

LAST_BITS = 1e-6
"""Rounding errors of the cosine of two equal vectors."""

BLOCK = 1 << 24
"""Most similarities held at once: 64 MB."""


@dataclass(frozen=True, eq=False)
class DuplicateGroup:
    """An image to keep and its near-duplicates."""

    keep: int
    """Row to keep."""
    others: Int64[np.ndarray, " m"]
    """Rows that could be removed, the most similar first."""
    similarities: Float32[np.ndarray, " m"]
    """Similarities of `others` to the row to keep, at least the threshold."""


@dataclass(frozen=True, eq=False)
class Duplicates:
    """All groups, the largest first. No image is in more than one."""

    groups: tuple[DuplicateGroup, ...]
    threshold: float
    """Smallest similarity within a group."""
    names: Sequence[str] | None = None
    """Name of every row, shown in notebooks; None means its number."""

    @property
    def num_others(self) -> int:
        """Number of images that could be removed."""
        return sum(len(group.others) for group in self.groups)

    def __repr__(self) -> str:
        return f"Duplicates({len(self.groups)} groups; {self.num_others} rows could be removed)"

    def _repr_html_(self) -> str:
        rows = [
            [
                named(self.names, each.keep),
                ", ".join(named(self.names, row) for row in each.others[:SHOWN]),
                len(each.others),
            ]
            for each in self.groups[:SHOWN]
        ]
        return rows_html(repr(self), ["keep", "could be removed", "number"], rows)


def duplicates(
    features: ArrayLike | Tensor,
    threshold: float = THRESHOLD,
    *,
    preference: Sequence[Any] | None = None,
    confirm: ArrayLike | Tensor | None = None,
    confirm_threshold: float = THRESHOLD,
) -> Duplicates:
    """Group rows whose cosine similarity to the one to keep is at least `threshold`.

    `confirm` is a second description of the same rows, such as thumbnails minus their mean: its
    cosines must reach `confirm_threshold` too, since an encoder alone may be mistaken.
    `preference` has a value for each row, such as (pixels, bytes): the row with the highest value
    is kept, or the first of equal ones. Rows are visited in order of preference; each row that is
    not in a group yet forms one with all that are similar enough. So every row that could be
    removed is similar to the one that is kept, not only to a neighbour of it.
    """
    for name, value in (("threshold", threshold), ("confirm_threshold", confirm_threshold)):
        if not 0 < value <= 1:
            raise InputError(
                f"{name}={value} must be above 0 and at most 1: it is a cosine similarity."
            )
    rows = unit_rows(features)
    order = _by_preference(len(rows), preference)
    judges = [(rows[order], threshold)]
    if confirm is not None:
        second = unit_rows(confirm, "confirm")
        if len(second) != len(rows):
            raise InputError(
                f"confirm has {len(second)} rows, but features have {len(rows)}: pass one for each."
            )
        judges.append((second[order], confirm_threshold))
    groups = _groups(judges)
    numbers = order.numpy()
    in_order = [
        DuplicateGroup(int(numbers[group.keep]), numbers[group.others], group.similarities)
        for group in groups
    ]
    in_order.sort(key=lambda group: (-len(group.others), group.keep))
    return Duplicates(tuple(in_order), threshold)


def _by_preference(number: int, preference: Sequence[Any] | None) -> Int64[Tensor, " n"]:
    if preference is None:
        return torch.arange(number)
    if len(preference) != number:
        raise InputError(
            f"preference has {len(preference)} values for {number} rows: pass one for each row."
        )
    # `sorted` is stable even when reversed: the first of equal rows stays first.
    return torch.tensor(sorted(range(number), key=preference.__getitem__, reverse=True))


def _groups(judges: Sequence[tuple[Tensor, float]]) -> list[DuplicateGroup]:
    """Return groups of rows, which are in order of preference: only later rows join a group.

    Each judge has rows and a threshold; similarities are those of the first judge.
    """
    rows, _ = judges[0]
    taken = np.zeros(len(rows), bool)
    groups = []
    for block in blocks(len(rows), len(rows)):
        similarity = (rows[block] @ rows[block.start :].T).numpy()
        near = similarity >= judges[0][1] - LAST_BITS
        for others, threshold in judges[1:]:
            near &= (others[block] @ others[block.start :].T).numpy() >= threshold - LAST_BITS
        for row in np.flatnonzero(near.sum(axis=1) > 1):
            first = block.start + row
            if taken[first]:
                continue
            joining = np.flatnonzero(near[row, row + 1 :] & ~taken[first + 1 :])
            if len(joining) == 0:
                continue
            value = similarity[row, row + 1 + joining]
            best = np.lexsort((joining, -value))
            others = first + 1 + joining[best]
            taken[others] = taken[first] = True
            groups.append(DuplicateGroup(int(first), others, value[best]))
    return groups


def blocks(rows: int, columns: int) -> Iterator[slice]:
    """Yield slices of `rows` whose similarities with all columns stay within BLOCK."""
    step = max(1, BLOCK // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))
