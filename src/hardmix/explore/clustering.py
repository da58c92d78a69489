"""Clusters: k-means on features at unit length, and names for the clusters.

A cluster is named by the words of file names that are common in it and rare elsewhere.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float32, Int64
from numpy.typing import ArrayLike
from torch import Tensor
from torch.nn.functional import normalize

from hardmix.errors import InputError
from hardmix.evaluation.kmeans import cluster_labels
from hardmix.explore.neighbourhoods import SHOWN, named, unit_rows
from hardmix.settings.small_html import rows_html

FEWEST, MOST = 2, 64
"""Fewest and most clusters by default, since a person looks at each."""
LEAST_SHARE = 0.3
"""Smallest fraction of a cluster's images that must have a word in their name that names it."""
LEAST_LIFT = 2.0
"""How many times more common the word must be in the cluster than among all images."""
WORDS = 2
"""Most words of a cluster's name."""
WORD = re.compile(r"[^\W\d_]{2,}")
CAMERA = frozenset(
    {"img", "image", "dsc", "dcim", "pxl", "photo", "pic", "picture", "file", "copy"}
)
"""Words written by cameras and programs, which say nothing about the image."""


@dataclass(frozen=True, eq=False)
class Clusters:
    """Every row's cluster. The largest cluster is number 0."""

    labels: Int64[np.ndarray, " n"]
    """Cluster of each row."""
    similarities: Float32[np.ndarray, " n"]
    """Similarity of each row to the centre of its cluster."""
    centres: Float32[np.ndarray, "k dim"]
    """Centres of the clusters, at unit length."""
    names: Sequence[str] | None = None
    """Name of every row, shown in notebooks; None means its number."""

    def members(self, cluster: int) -> Int64[np.ndarray, " m"]:
        """Return a cluster's rows, the most typical first."""
        rows = np.flatnonzero(self.labels == cluster)
        return rows[np.lexsort((rows, -self.similarities[rows]))]

    def __repr__(self) -> str:
        return f"Clusters({len(self.centres)} clusters of {len(self.labels)} rows)"

    def _repr_html_(self) -> str:
        rows = []
        for cluster in range(min(SHOWN, len(self.centres))):
            members = self.members(cluster)
            rows.append(
                [cluster, len(members), ", ".join(named(self.names, m) for m in members[:SHOWN])]
            )
        return rows_html(repr(self), ["cluster", "rows", "the most typical"], rows)


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
    number = num_clusters
    if number is None:
        number = min(number_of_clusters(len(rows)), len(rows))
    if not 1 <= number <= len(rows):
        raise InputError(f"num_clusters={number} for {len(rows)} rows: choose 1 to {len(rows)}.")
    return _sorted_by_size(rows, cluster_labels(rows, number, seed))


def _sorted_by_size(rows: Float32[Tensor, "n dim"], cluster: Int64[Tensor, " n"]) -> Clusters:
    """Number clusters from the largest to the smallest, without empty ones."""
    names, labels, counts = torch.unique(cluster, return_inverse=True, return_counts=True)
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


def cluster_names(labels: Int64[np.ndarray, " n"], names: Sequence[str]) -> list[str]:
    """Return up to two words for each cluster, joined by a comma; empty if no word fits."""
    words_of_names = [words_of(name) for name in names]
    everywhere = Counter(word for words in words_of_names for word in words)
    titles = []
    for cluster in range(int(labels.max()) + 1 if len(labels) else 0):
        rows = np.flatnonzero(labels == cluster)
        here = Counter(word for row in rows for word in words_of_names[row])
        scores = {
            word: (count / len(rows)) * (count / everywhere[word])
            for word, count in here.items()
            if count >= LEAST_SHARE * len(rows)
            and count / len(rows) >= LEAST_LIFT * everywhere[word] / len(names)
        }
        best = sorted(scores, key=lambda word: (-scores[word], word))[:WORDS]
        titles.append(", ".join(best))
    return titles


def distinct_names(
    grouped: Clusters | None,
    names: Sequence[str],
    labels: Int64[np.ndarray, " n"],
    classes: Sequence[str],
) -> list[str]:
    """Name clusters by their most common class or words of the files, each differently.

    A class names a cluster if half of its images have it, and twice as many as elsewhere; labels
    below 0 are unknown.
    """
    if grouped is None:
        return []
    everywhere = np.bincount(labels[labels >= 0], minlength=1)
    taken: Counter[str] = Counter()
    titles = []
    for cluster, words in enumerate(cluster_names(grouped.labels, names)):
        members = grouped.labels == cluster
        size, counts = int(members.sum()), np.bincount(labels[members & (labels >= 0)], minlength=1)
        best = int(counts.argmax())
        common = classes[best] if classes and 2 * counts[best] >= size else ""
        telling = counts[best] * everywhere.sum() >= LEAST_LIFT * everywhere[best] * size
        name = (common if telling else "") or words or common or f"cluster {cluster + 1}"
        taken[name] += 1
        titles.append(f"{name} ({taken[name]})" if taken[name] > 1 else name)
    return titles


def words_of(name: str) -> set[str]:
    """Return the words of a path in lower case, without numbers, suffixes and camera words."""
    stem = re.sub(r"\.\w{1,5}$", "", name)
    return {word for word in map(str.lower, WORD.findall(stem)) if word not in CAMERA}
