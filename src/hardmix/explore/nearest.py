"""Exact nearest neighbours by cosine similarity, some rows at a time.

Every similarity here is a cosine in float32. Nothing is approximated: 50,000 images are compared
with each other in less than a minute on two cores.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float32, Int64
from numpy.typing import ArrayLike
from torch import Tensor
from torch.nn.functional import normalize

from hardmix.errors import InputError

BLOCK = 1 << 24
"""Similarities held at once: 64 MB."""


@dataclass(frozen=True, eq=False)
class Neighbours:
    """The nearest rows of every row, the most similar first."""

    indices: Int64[np.ndarray, "n k"]
    """Indices of the nearest rows."""
    similarities: Float32[np.ndarray, "n k"]
    """Their cosine similarities."""


def neighbours(
    features: ArrayLike | Tensor, k: int = 12, *, queries: ArrayLike | Tensor | None = None
) -> Neighbours:
    """Find the k most similar rows of `features` for each of its rows, or for each query.

    Without `queries`, a row is not its own neighbour. There are fewer than k if there are fewer
    rows. Equal similarities are ordered by row.
    """
    if k < 1:
        raise InputError(f"k={k} must be at least 1: the number of neighbours.")
    rows = unit_rows(features)
    asked = rows if queries is None else unit_rows(queries, "queries")
    if asked.shape[1] != rows.shape[1]:
        raise InputError(
            f"queries have {asked.shape[1]} columns and features have {rows.shape[1]}: both must"
            " come from the same encoder."
        )
    most = min(k, len(rows) - (queries is None))
    indices = np.empty((len(asked), most), np.int64)
    similarities = np.empty((len(asked), most), np.float32)
    for some in blocks(len(asked), len(rows)):
        similarity = asked[some] @ rows.T
        if queries is None:
            own = torch.arange(some.start, some.stop)
            similarity[own - some.start, own] = -torch.inf
        found = similarity.topk(most)
        value, index = found.values.numpy(), found.indices.numpy()
        order = np.lexsort((index, -value), axis=1)
        indices[some] = np.take_along_axis(index, order, axis=1)
        similarities[some] = np.take_along_axis(value, order, axis=1)
    return Neighbours(indices, similarities)


def centred(features: ArrayLike | Tensor) -> Float32[Tensor, "n dim"]:
    """Return features minus their mean, at unit length.

    After a ReLU, all features are positive and all cosines high; without the mean, unrelated images
    have a similarity near 0.
    """
    rows = checked_rows(features)
    return normalize(rows - rows.double().mean(dim=0).float(), dim=1)


def unit_rows(features: ArrayLike | Tensor, name: str = "features") -> Float32[Tensor, "n dim"]:
    """Return rows at unit length, on the CPU; a row of zeros stays zero, similar to nothing."""
    return normalize(checked_rows(features, name), dim=1)


def checked_rows(features: ArrayLike | Tensor, name: str = "features") -> Float32[Tensor, "n dim"]:
    """Return a NumPy or torch array as rows; raises InputError if a cosine is undefined."""
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


def blocks(rows: int, columns: int) -> Iterator[slice]:
    """Yield slices of `rows` such that a block of similarities stays within BLOCK."""
    step = max(1, BLOCK // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))
