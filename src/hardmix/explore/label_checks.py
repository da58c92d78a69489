"""Labels that disagree with those of the neighbours."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int64
from numpy.typing import ArrayLike
from torch import Tensor

from hardmix.errors import InputError
from hardmix.explore.nearest import Neighbours, checked_rows, neighbours

NEIGHBOURS = 20
MOST_OWN, LEAST_OTHER = 0.2, 0.5
"""A label is suspect if at most this fraction of neighbours share it, and at least this fraction
have another one."""


@dataclass(frozen=True, eq=False)
class Mislabelled:
    """Images whose neighbours have another class, the clearest first."""

    indices: Int64[np.ndarray, " m"]
    """Rows with a suspect label."""
    labels: Int64[np.ndarray, " m"]
    """Given label of each."""
    suggested: Int64[np.ndarray, " m"]
    """Most common label of each one's neighbours."""
    own_share: Float32[np.ndarray, " m"]
    """Fraction of the neighbours with the given label."""
    suggested_share: Float32[np.ndarray, " m"]
    """Fraction of the neighbours with the suggested label."""
    agreement: float
    """Fraction of all labelled images that agree with most neighbours: how far to trust it."""


def mislabelled(
    features: ArrayLike | Tensor, labels: ArrayLike | Tensor, k: int = NEIGHBOURS
) -> Mislabelled:
    """Find labelled rows whose k nearest labelled rows have another label (-1: no label).

    A label is suspect if at least half of the neighbours share another label and at most a fifth
    have the row's own.
    """
    rows, known = checked_rows(features), checked_labels(labels)
    if len(known) != len(rows):
        raise InputError(f"{len(known)} labels for {len(rows)} rows: pass one for each row.")
    chosen = np.flatnonzero(known >= 0)
    if len(chosen) < 2:
        raise InputError(f"{len(chosen)} rows have a label: at least 2 are needed.")
    return disagreeing(neighbours(rows[chosen], k), known[chosen], chosen)


def checked_labels(labels: ArrayLike | Tensor) -> Int64[np.ndarray, " n"]:
    """Return labels as integers, one for each row."""
    given = np.asarray(labels.detach().cpu() if isinstance(labels, Tensor) else labels)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise InputError(
            f"labels are {given.dtype} of shape {given.shape}: they must be one integer for each"
            " row, -1 if the class is unknown."
        )
    return given.astype(np.int64)


def disagreeing(
    near: Neighbours, labels: Int64[np.ndarray, " n"], rows: Int64[np.ndarray, " n"] | None = None
) -> Mislabelled:
    """Like `mislabelled`, for known neighbours, all labelled; `rows` are the indices to return."""
    votes = labels[near.indices]
    number, k = votes.shape
    rows = np.arange(number) if rows is None else rows
    winner, most = _winners(votes)
    own = (votes == labels[:, None]).sum(axis=1)
    agreement = float((winner == labels).mean()) if number else 0.0
    suspect = (winner != labels) & (own <= MOST_OWN * k) & (most >= LEAST_OTHER * k)
    found = np.flatnonzero(suspect)
    found = found[np.lexsort((found, own[found] - most[found]))]
    share, other = ((count[found] / k).astype(np.float32) for count in (own, most))
    return Mislabelled(rows[found], labels[found], winner[found], share, other, agreement)


def _winners(
    votes: Int64[np.ndarray, "n k"],
) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
    """Return the most common label of each row and its count; ties go to the nearest."""
    counts = (votes[:, :, None] == votes[:, None, :]).sum(axis=2)
    best = counts.argmax(axis=1)  # the first, thus the nearest
    here = np.arange(len(votes))
    return votes[here, best], counts[here, best]
