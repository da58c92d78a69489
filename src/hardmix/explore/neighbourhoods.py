"""Properties of an image's nearest neighbours: similar images, outliers, and wrong labels.

Every similarity here is a cosine in float32, and nothing is approximated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsIndex

import numpy as np
import torch
from jaxtyping import Float32, Int64
from numpy.typing import ArrayLike
from torch import Tensor
from torch.nn.functional import normalize

from hardmix.errors import InputError
from hardmix.evaluation.neighbours import neighbours as nearest_rows
from hardmix.settings.small_html import rows_html

AROUND = 10
"""Nearest neighbours that make an image an outlier or not."""
CUTOFF = 3.5
"""Robust deviations above the median (3.5 after Iglewicz and Hoaglin)."""
VOTERS = 20
"""Nearest neighbours whose labels are compared with an image's."""
MOST_OWN, LEAST_OTHER = 0.2, 0.5
"""A label is suspect if at most this fraction of neighbours share it, and at least this fraction
have another one."""

BLOCK = 512
"""Rows whose distances to all others are held at once."""
SHOWN = 6
"""Rows of a table in a notebook."""


def named(names: Sequence[str] | None, row: SupportsIndex) -> str:
    """Return a row's name, or its number if it has none."""
    return str(row) if names is None else names[int(row)]


@dataclass(frozen=True, eq=False)
class Neighbours:
    """The nearest rows of every row, the most similar first."""

    indices: Int64[np.ndarray, "n k"]
    """Indices of the nearest rows."""
    similarities: Float32[np.ndarray, "n k"]
    """Their cosine similarities."""
    names: Sequence[str] | None = None
    """Name of every row, shown in notebooks; None means its number."""

    def first(self, k: int) -> "Neighbours":
        """Return only the k nearest rows."""
        return Neighbours(self.indices[:, :k], self.similarities[:, :k], self.names)

    def __repr__(self) -> str:
        rows, k = self.indices.shape
        median = float(np.median(self.similarities[:, 0])) if rows and k else float("nan")
        return f"Neighbours({rows} rows, {k} each; the nearest at {median:.2f} in the median)"

    def _repr_html_(self) -> str:
        columns = [
            "row",
            *(f"neighbour {rank + 1}" for rank in range(min(SHOWN, self.indices.shape[1]))),
        ]
        rows = [
            [
                named(self.names, row),
                *(
                    f"{named(self.names, each)} ({value:.2f})"
                    for each, value in zip(near, similar, strict=True)
                ),
            ]
            for row, (near, similar) in enumerate(
                zip(self.indices[:SHOWN, :SHOWN], self.similarities[:SHOWN, :SHOWN], strict=True)
            )
        ]
        return rows_html(repr(self), columns, rows)


def neighbours(
    features: ArrayLike | Tensor, k: int = 12, *, queries: ArrayLike | Tensor | None = None
) -> Neighbours:
    """Find the k most similar rows of `features` for each of its rows, or for each query.

    Without `queries`, a row is not its own neighbour. There are fewer than k if there are fewer
    rows. Equal similarities are ordered by row.
    """
    if k < 1:
        raise InputError(f"k={k} must be at least 1: the number of neighbours.")
    rows = checked_rows(features)
    asked = rows if queries is None else checked_rows(queries, "queries")
    if asked.shape[1] != rows.shape[1]:
        raise InputError(
            f"queries have {asked.shape[1]} columns and features have {rows.shape[1]}: both must"
            " come from the same encoder."
        )
    parts = list(nearest_rows(rows, asked, k, device=rows.device, leave_one_out=queries is None))
    indices, similarities = (
        torch.cat([getattr(part, name) for part in parts]).numpy()
        for name in ("places", "similarity")
    )
    return Neighbours(indices, similarities)


def centred(features: ArrayLike | Tensor) -> Float32[Tensor, "n dim"]:
    """Return features minus their mean, at unit length.

    After a ReLU, all features are positive and all cosines are high; without their mean, unrelated
    images have a similarity near 0.
    """
    rows = checked_rows(features)
    return normalize(rows - rows.double().mean(dim=0).float(), dim=1)


def unit_rows(features: ArrayLike | Tensor, name: str = "features") -> Float32[Tensor, "n dim"]:
    """Return rows at unit length on the CPU; a row of zeros stays zero, similar to nothing."""
    return normalize(checked_rows(features, name), dim=1)


def checked_rows(features: ArrayLike | Tensor, name: str = "features") -> Float32[Tensor, "n dim"]:
    """Return a NumPy or torch array as rows; raise InputError if a cosine is undefined."""
    if isinstance(features, Tensor):
        rows = features.detach().cpu().float()
    else:
        try:
            rows = torch.from_numpy(np.ascontiguousarray(features, np.float32))
        except (TypeError, ValueError) as error:
            raise InputError(f"{name} are not an array of numbers: {error}.") from error
    if rows.ndim != 2 or 0 in rows.shape:
        raise InputError(
            f"{name} have the shape {tuple(rows.shape)}: it must be (n, dim), one row for each"
            " image."
        )
    broken = (~rows.isfinite().all(dim=1)).nonzero().flatten()
    if len(broken):
        raise InputError(
            f"{name} contain NaN or infinity in {len(broken)} rows, the first of which is row"
            f" {int(broken[0])}: remove them."
        )
    return rows


@dataclass(frozen=True, eq=False)
class Outliers:
    """A score of how unusual every image is, and the ones that stand out."""

    scores: Float32[np.ndarray, " n"]
    """Score of every row; the higher, the more unusual."""
    order: Int64[np.ndarray, " n"]
    """All rows, the most unusual first."""
    number: int
    """Number of rows that stand out: the first ones of `order`."""
    names: Sequence[str] | None = None
    """Name of every row, shown in notebooks; None means its number."""

    @property
    def indices(self) -> Int64[np.ndarray, " m"]:
        """The rows that stand out, the most unusual first."""
        return self.order[: self.number]

    def __repr__(self) -> str:
        return f"Outliers({self.number} of {len(self.scores)} rows stand out)"

    def _repr_html_(self) -> str:
        rows = [[named(self.names, row), f"{self.scores[row]:.3f}"] for row in self.indices[:SHOWN]]
        return rows_html(repr(self), ["row", "score"], rows)


def outliers(features: ArrayLike | Tensor, k: int = AROUND, *, cutoff: float = CUTOFF) -> Outliers:
    """Find rows that are farther from their k nearest neighbours than is usual in this set.

    The score is 1 minus the mean similarity: 0 for copies, 1 for unrelated rows.
    A row stands out if its score exceeds the median by `cutoff` robust deviations, each 1.4826
    times the median distance to the median.
    """
    return outlying(neighbours(features, k), cutoff)


def outlying(near: Neighbours, cutoff: float = CUTOFF) -> Outliers:
    """Return `outliers` for neighbours that were found before."""
    if cutoff <= 0:
        raise InputError(f"cutoff={cutoff} must be above 0: a number of deviations.")
    if near.indices.shape[1] == 0:
        raise InputError("features have 1 row: outliers need at least 2.")
    scores = (1 - near.similarities.astype(np.float64).mean(axis=1)).astype(np.float32)
    return _standing_out(scores, cutoff)


def _standing_out(scores: Float32[np.ndarray, " n"], cutoff: float) -> Outliers:
    """Rank rows by their scores; the first ones are unusually high."""
    order = np.lexsort((np.arange(len(scores)), -scores))
    middle = np.median(scores)
    spread = 1.4826 * np.median(np.abs(scores - middle))
    # If most images have copies, the spread is 0 and everything else would stand out.
    number = int((scores > middle + cutoff * spread).sum()) if spread > 0 else 0
    return Outliers(scores, order, number)


def sparse(features: ArrayLike | Tensor, k: int = VOTERS, *, cutoff: float = CUTOFF) -> Outliers:
    """Find rows around which there are fewer others than around their neighbours.

    The score is the distance to the k-th nearest row, divided by the mean of the same distances of
    the k nearest rows: 1 is usual, also in a loose part of the set, where `outliers` would name
    every row. Distances are Euclidean, since the length of features tells strange images apart too.
    `cutoff` is that of `outliers`.
    """
    rows = checked_rows(features)
    k = min(k, len(rows) - 1)
    if k < 1:
        raise InputError("features have 1 row: outliers need at least 2.")
    distances, nearest = [], []
    lengths = rows.square().sum(dim=1)
    for start in range(0, len(rows), BLOCK):
        part = rows[start : start + BLOCK]
        squares = lengths[start : start + BLOCK, None] + lengths - 2 * part @ rows.T
        squares[torch.arange(len(part)), torch.arange(start, start + len(part))] = torch.inf
        near = squares.topk(k, dim=1, largest=False)
        distances.append(near.values[:, -1].clamp_min(0).sqrt())
        nearest.append(near.indices)
    own = torch.cat(distances)
    around = own[torch.cat(nearest)].mean(dim=1)
    scores = torch.where(around > 0, own / around.clamp_min(1e-12), 1.0).numpy()
    return _standing_out(scores.astype(np.float32), cutoff)


@dataclass(frozen=True, eq=False)
class Mislabelled:
    """Images whose neighbours have another class, the clearest first."""

    indices: Int64[np.ndarray, " m"]
    """Rows with a suspect label."""
    labels: Int64[np.ndarray, " m"]
    """Label of each."""
    suggested: Int64[np.ndarray, " m"]
    """Most common label of its neighbours."""
    own_share: Float32[np.ndarray, " m"]
    """Fraction of the neighbours with the row's own label."""
    suggested_share: Float32[np.ndarray, " m"]
    """Fraction of the neighbours with the suggested label."""
    agreement: float
    """Fraction of all labelled images that agree with most of their neighbours.

    The higher it is, the more the suspicions can be trusted.
    """
    names: Sequence[str] | None = None
    """Name of every row, shown in notebooks; None means its number."""

    def __repr__(self) -> str:
        number, agreeing = len(self.indices), f"{self.agreement:.0%} of all labels agree"
        return f"Mislabelled({number} suspect labels; {agreeing} with their neighbours)"

    def _repr_html_(self) -> str:
        columns = ["row", "label", "suggested", "share with the label", "with the suggested one"]
        shown = [named(self.names, row) for row in self.indices[:SHOWN]]
        numbers = (self.labels, self.suggested, self.own_share, self.suggested_share)
        rows = list(zip(shown, *(each[:SHOWN] for each in numbers), strict=True))
        return rows_html(repr(self), columns, rows)


def mislabelled(
    features: ArrayLike | Tensor, labels: ArrayLike | Tensor, k: int = VOTERS
) -> Mislabelled:
    """Find labelled rows whose k nearest labelled rows have another label; -1 means no label.

    A label is suspect if at least half of the neighbours share another label and at most a fifth
    have the row's own.
    """
    rows, numbers = checked_rows(features), checked_labels(labels)
    if len(numbers) != len(rows):
        raise InputError(f"{len(numbers)} labels for {len(rows)} rows: pass one for each row.")
    labelled = np.flatnonzero(numbers >= 0)
    if len(labelled) < 2:
        raise InputError(f"{len(labelled)} rows have a label: at least 2 are needed.")
    return disagreeing(neighbours(rows[labelled], k), numbers[labelled], labelled)


def checked_labels(labels: ArrayLike | Tensor) -> Int64[np.ndarray, " n"]:
    """Return labels as integers, one for each row."""
    numbers = np.asarray(labels.detach().cpu() if isinstance(labels, Tensor) else labels)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise InputError(
            f"labels are {numbers.dtype} of shape {numbers.shape}: they must be one integer for"
            " each row, -1 if the class is unknown."
        )
    return numbers.astype(np.int64)


def disagreeing(
    near: Neighbours, labels: Int64[np.ndarray, " n"], rows: Int64[np.ndarray, " n"] | None = None
) -> Mislabelled:
    """Return `mislabelled` for neighbours that were found before; all of them have labels.

    `rows` are the indices to return; None means 0, 1, ...
    """
    votes = labels[near.indices]
    number, k = votes.shape
    rows = np.arange(number) if rows is None else rows
    winner, most = _winners(votes)
    own = (votes == labels[:, None]).sum(axis=1)
    agreement = float((winner == labels).mean()) if number else 0.0
    suspect = (winner != labels) & (own <= MOST_OWN * k) & (most >= LEAST_OTHER * k)
    places = np.flatnonzero(suspect)
    places = places[np.lexsort((places, own[places] - most[places]))]
    share, other = ((count[places] / k).astype(np.float32) for count in (own, most))
    return Mislabelled(rows[places], labels[places], winner[places], share, other, agreement)


def _winners(
    votes: Int64[np.ndarray, "n k"],
) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
    """Return the most common label of each row and its count; ties go to the nearest."""
    counts = (votes[:, :, None] == votes[:, None, :]).sum(axis=2)
    best = counts.argmax(axis=1)  # the first, which is the nearest
    here = np.arange(len(votes))
    return votes[here, best], counts[here, best]
