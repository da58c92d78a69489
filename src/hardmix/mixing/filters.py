"""Filters against false negatives, without labels: each gives an `exclude` mask.

A filter sees the similarities of the loss itself. With a guide, as in GISTEmbed, call it with the
guide's similarities, and pass the mask as `exclude`.
"""

import math
from functools import partial
from typing import Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int
from torch import Tensor

from hardmix.errors import InputError
from hardmix.mixing.checks import check_labels
from hardmix.mixing.queue import equal_and_known


@runtime_checkable
class NegativeFilter(Protocol):
    """The signature of a filter: any such callable may be passed in place of a name."""

    def __call__(
        self, similarity: Float[Tensor, "batch columns"], *, positive: Float[Tensor, " batch"]
    ) -> Bool[Tensor, "batch columns"]:
        """Return the mask of negatives to leave out; `similarity` is q.n, `positive` q.k."""


def above_positive(margin: float = 0.0) -> NegativeFilter:
    """GISTEmbed (Solatorio 2024): drop q.n > q.k - margin."""
    if not math.isfinite(margin):
        raise InputError(f"margin={margin} must be a finite number, such as 0.1.")
    return partial(_above, margin=margin)


def share_of_positive(share: float = 0.95) -> NegativeFilter:
    """NV-Retriever (Moreira et al. 2024): drop q.n above a share of q.k.

    Where q.k is negative, its distance below 0 grows by the rest: q.k - (1 - share) |q.k|, as in
    sentence-transformers.
    """
    if not (math.isfinite(share) and share > 0):
        raise InputError(
            f"share={share} must be a finite number above 0: negatives above this share of the"
            " positive's similarity are dropped; NV-Retriever uses 0.95."
        )
    return partial(_above_share, share=share)


def same_labels(
    labels: Int[Tensor, " batch"], of_negatives: Int[Tensor, " K"]
) -> Bool[Tensor, "batch K"]:
    """Return where a negative has the query's label; a negative label is unknown, and matches none.

    Labels may be classes, the numbers of clusters (IFND, Chen et al. 2021: `enqueue(labels=...)`
    with those of the last epoch), or images. As `exclude`, or as `positives`.
    """
    check_labels("labels", labels)
    check_labels("of_negatives", of_negatives, of="negatives")
    return equal_and_known(labels, of_negatives)


def _above(similarity: Tensor, *, positive: Tensor, margin: float) -> Tensor:
    return similarity > (positive - margin).unsqueeze(1)


def _above_share(similarity: Tensor, *, positive: Tensor, share: float) -> Tensor:
    return similarity > (positive - (1 - share) * positive.abs()).unsqueeze(1)


FILTERS: dict[str, NegativeFilter] = {
    "above-positive": above_positive(),
    "share-of-positive": share_of_positive(),
}
"""The filters by name, as in `MochiLoss(filter_negatives=...)`."""
