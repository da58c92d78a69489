"""Clusters: k-means on features at unit length."""

import math
import warnings
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float32, Int64
from numpy.typing import ArrayLike
from torch import Tensor
from torch.nn.functional import normalize

from hardmix.errors import InputError
from hardmix.explore.nearest import unit_rows

FEWEST, MOST = 2, 64
"""Most clusters by default, since a person inspects each."""
WHOLE = 10_000
"""Most rows for which k-means uses all rows in every iteration; above it, batches."""


@dataclass(frozen=True, eq=False)
class Clusters:
    """Every row's cluster. The largest cluster is number 0."""

    labels: Int64[np.ndarray, " n"]
    """Cluster of each row."""
    similarities: Float32[np.ndarray, " n"]
    """Similarity of each row to the centre of its cluster."""
    centres: Float32[np.ndarray, "k dim"]
    """Centres of the clusters, at unit length."""

    def members(self, cluster: int) -> Int64[np.ndarray, " m"]:
        """Return a cluster's rows, the most typical first."""
        rows = np.flatnonzero(self.labels == cluster)
        return rows[np.lexsort((rows, -self.similarities[rows]))]


def number_of_clusters(rows: int) -> int:
    """Return the square root of half the rows, from 2 to 64: 10 for 200 images, 45 for 4,000."""
    return max(FEWEST, min(MOST, round(math.sqrt(rows / 2))))


def clusters(
    features: ArrayLike | Tensor, num_clusters: int | None = None, *, seed: int = 0
) -> Clusters:
    """Cluster the rows at unit length by k-means; by default into `number_of_clusters`.

    The same seed gives the same clusters. There are fewer clusters if fewer rows are distinct.
    """
    rows = unit_rows(features)
    wanted = number_of_clusters(len(rows)) if num_clusters is None else num_clusters
    if num_clusters is None:
        wanted = min(wanted, len(rows))
    if not 1 <= wanted <= len(rows):
        raise InputError(f"num_clusters={wanted} for {len(rows)} rows: choose 1 to {len(rows)}.")
    found = torch.from_numpy(_kmeans(rows.numpy(), wanted, seed))
    return _sorted_by_size(rows, found)


def _kmeans(rows: Float32[np.ndarray, "n dim"], number: int, seed: int) -> Int64[np.ndarray, " n"]:
    try:
        from sklearn.cluster import KMeans, MiniBatchKMeans
        from sklearn.exceptions import ConvergenceWarning
        from threadpoolctl import threadpool_limits
    except ModuleNotFoundError as error:
        raise InputError(
            "clustering needs scikit-learn, which is not installed: pip install"
            " 'hardmix[analysis]'."
        ) from error
    common = {"n_clusters": number, "random_state": seed % 2**32, "n_init": 3}
    many = len(rows) > WHOLE
    model = MiniBatchKMeans(**common, batch_size=4096) if many else KMeans(**common)
    # With several threads, sums are rounded in varying order, and clusters differ.
    with threadpool_limits(limits=1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct rows than clusters
        return np.asarray(model.fit_predict(rows), np.int64)


def _sorted_by_size(rows: Float32[Tensor, "n dim"], found: Int64[Tensor, " n"]) -> Clusters:
    """Number clusters from the largest to the smallest, without empty ones."""
    names, labels, counts = torch.unique(found, return_inverse=True, return_counts=True)
    firsts = torch.full((len(names),), len(rows)).scatter_reduce(
        0, labels, torch.arange(len(rows)), "amin"
    )
    order = np.lexsort((firsts.numpy(), -counts.numpy()))
    place = torch.empty(len(order), dtype=torch.int64)
    place[torch.from_numpy(order)] = torch.arange(len(order))
    labels = place[labels]
    sums = torch.zeros(len(order), rows.shape[1], dtype=torch.float64)
    centres = normalize(sums.index_add_(0, labels, rows.double()), dim=1).float()
    similarities = (rows * centres[labels]).sum(dim=1)
    return Clusters(labels.numpy(), similarities.numpy(), centres.numpy())
