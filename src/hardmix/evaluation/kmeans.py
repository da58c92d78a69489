"""k-means by scikit-learn or faiss, for PCL, clusters that filter negatives, and `explore`.

`k_means` works in parts, so that other processes do not wait in vain: scikit-learn in mini-batches
or, for ImageNet's size, faiss over all images, as PCL's authors use it (salesforce/PCL: 20
iterations). `cluster_labels` uses all rows in every iteration if they are few. Both are functions
of the seed.
"""

import warnings
from collections.abc import Generator
from importlib.util import find_spec

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from hardmix.errors import InputError
from hardmix.runtime.console import warn
from hardmix.settings.named_choices import KMeans

PASSES, ITERATIONS = 10, 20
"""Passes of scikit-learn's mini-batches over all rows, and iterations of faiss."""
STARTS, WHOLE = 3, 10_000
"""Starts of `cluster_labels`, of which the best counts, and the most rows that it uses at once."""
CAREFUL = 1000
"""Most clusters whose first centres are chosen apart from each other; others start at random."""
LARGE = 200_000
"""Fewest images for which faiss is used, if it is installed and nothing else was chosen."""
INSTALL = {"sklearn": "pip install 'hardmix[analysis]'", "faiss": "pip install 'hardmix[faiss]'"}
"""How to install each library."""

Clustering = Generator[None, None, tuple[Float[Tensor, "k dim"], Int[Tensor, " n"]]]
"""k-means in parts: yields after each part, and returns the centres and each row's cluster."""


def k_means(
    features: Float[Tensor, "n dim"], number: int, seed: int, library: KMeans = "sklearn"
) -> Clustering:
    """Cluster rows in parts."""
    return (_by_faiss if library == "faiss" else _by_sklearn)(features, number, seed)


def cluster_labels(features: Float[Tensor, "n dim"], number: int, seed: int) -> Int[Tensor, " n"]:
    """Return each row's cluster."""
    try:
        from sklearn.cluster import KMeans as WholeKMeans, MiniBatchKMeans
        from sklearn.exceptions import ConvergenceWarning
        from threadpoolctl import threadpool_limits
    except ModuleNotFoundError as error:
        raise _missing("sklearn", "clustering") from error
    options = {"n_clusters": number, "random_state": seed % 2**32, "n_init": STARTS}
    many = len(features) > WHOLE
    model = MiniBatchKMeans(**options, batch_size=4096) if many else WholeKMeans(**options)
    # With several threads, sums are rounded in varying order, and clusters differ.
    with threadpool_limits(limits=1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct rows than clusters
        return torch.from_numpy(np.asarray(model.fit_predict(features.numpy()), np.int64))


def _by_sklearn(features: Float[Tensor, "n dim"], number: int, seed: int) -> Clustering:
    from sklearn.cluster import MiniBatchKMeans  # takes a second to import

    init = "k-means++" if number <= CAREFUL else "random"
    model = MiniBatchKMeans(number, init=init, n_init=1, random_state=seed)
    generator = torch.Generator().manual_seed(seed)
    size = min(len(features), max(1024, 4 * number))
    for _ in range(PASSES):
        for rows in torch.randperm(len(features), generator=generator).split(size):
            if len(rows) == size:  # the first part must have as many rows as there are clusters
                model.partial_fit(features[rows].numpy())
                yield None
    nearest = [model.predict(part.numpy()).astype(np.int64) for part in features.split(size)]
    own = torch.from_numpy(np.concatenate(nearest))
    return torch.from_numpy(model.cluster_centers_).float(), own


def _by_faiss(features: Float[Tensor, "n dim"], number: int, seed: int) -> Clustering:
    import faiss

    rows = np.ascontiguousarray(features.numpy(), dtype=np.float32)
    generator = torch.Generator().manual_seed(seed)
    centres = rows[torch.randperm(len(rows), generator=generator)[:number].numpy()]
    # One iteration at a time; by default, faiss would take a sample of the rows and warn of small
    # clusters.
    limits = {"min_points_per_centroid": 1, "max_points_per_centroid": len(rows)}
    model = faiss.Kmeans(rows.shape[1], number, niter=1, seed=seed, **limits)
    for _ in range(ITERATIONS):
        model.train(rows, init_centroids=centres)
        centres = model.centroids
        yield None
    _, own = model.assign(rows)
    return torch.from_numpy(centres.copy()), torch.from_numpy(own).long()


def choose_library(chosen: KMeans, num_rows: int, user: str) -> KMeans:
    """Return the library to use; auto is faiss for many images, if it is installed.

    `user` is what needs it, for messages: a setting, say.
    """
    if chosen == "auto":
        large, installed = num_rows >= LARGE, find_spec("faiss") is not None
        if large and not installed:
            warn(
                f"{user}: scikit-learn clusters {num_rows} images, which may take hours"
                f" before each epoch; faiss is faster: {INSTALL['faiss']}."
            )
        chosen = "faiss" if large and installed else "sklearn"
    if find_spec(chosen) is None:
        raise _missing(chosen, user)
    return chosen


def _missing(library: KMeans, user: str) -> InputError:
    title = "faiss" if library == "faiss" else "scikit-learn"
    return InputError(f"{user} needs {title}, which is not installed: {INSTALL[library]}.")
