"""Names of clusters: the words of file names that are common in one and rare elsewhere."""

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64

LEAST_SHARE = 0.3
"""Fraction of a cluster's images that must have a word that names it."""
LEAST_LIFT = 2.0
"""How many times more common it must be there than among all images."""
WORDS = 2
WORD = re.compile(r"[^\W\d_]{2,}")
CAMERA = frozenset(
    {"img", "image", "dsc", "dcim", "pxl", "photo", "pic", "picture", "file", "copy"}
)
"""Words written by cameras and programs, which say nothing about the image."""


def cluster_names(labels: Int64[np.ndarray, " n"], names: Sequence[str]) -> list[str]:
    """Return up to two words for each cluster, joined by a comma; empty if no word fits."""
    found = [words_of(name) for name in names]
    everywhere = Counter(word for words in found for word in words)
    chosen = []
    for cluster in range(int(labels.max()) + 1 if len(labels) else 0):
        rows = np.flatnonzero(labels == cluster)
        here = Counter(word for row in rows for word in found[row])
        scores = {
            word: (count / len(rows)) * (count / everywhere[word])
            for word, count in here.items()
            if count >= LEAST_SHARE * len(rows)
            and count / len(rows) >= LEAST_LIFT * everywhere[word] / len(names)
        }
        best = sorted(scores, key=lambda word: (-scores[word], word))[:WORDS]
        chosen.append(", ".join(best))
    return chosen


def words_of(name: str) -> set[str]:
    """Return the words of a path in lower case, without numbers, suffixes and camera words."""
    stem = re.sub(r"\.\w{1,5}$", "", name)
    return {word for word in map(str.lower, WORD.findall(stem)) if word not in CAMERA}
