"""Clusters of all images by k-means; for PCL also their concentration and prototypes' loss.

k-means is scikit-learn's in mini-batches or, for ImageNet's size, faiss's, as the authors use it
(salesforce/PCL: 20 iterations over all images). Both work in parts, are functions of the seed, and
start from images that are drawn by it.
"""

import math
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from hardmix.errors import InputError
from hardmix.evaluation.features import Features, extract
from hardmix.methods.base import Materials
from hardmix.runtime.console import warn
from hardmix.runtime.distributed import broadcast, meet, while_main_works
from hardmix.settings.config import PretrainConfig
from hardmix.settings.named_choices import KMeans

PASSES, ITERATIONS = 10, 20
"""How often scikit-learn's k-means sees every image, and faiss's."""
CAREFUL = 1000
"""Clusters up to which their first centres are chosen apart from each other; else at random."""
LARGE = 200_000
"""Images from which on faiss is taken, if it is installed and nothing else was chosen."""
INSTALL = {"sklearn": "pip install 'hardmix[analysis]'", "faiss": "pip install 'hardmix[faiss]'"}
"""How to get each library."""
IMAGENET, CLUSTERS = 1_281_167, (25_000, 50_000, 100_000)
"""Images of ImageNet-1k, and the published numbers of clusters for them."""


class PrototypeClusters(NamedTuple):
    """What k-means found."""

    centres: Float[Tensor, "k dim"]
    """Of unit length."""
    concentration: Float[Tensor, " k"]
    """phi of each cluster, with mean tau."""
    cluster: Int[Tensor, " n"]
    """Each image's."""


def prototype_loss(
    query: Float[Tensor, "batch dim"],
    centres: Float[Tensor, "k dim"],
    concentration: Float[Tensor, " k"],
    own: Int[Tensor, " batch"],
    columns: Int[Tensor, " r"],
) -> Float[Tensor, ""]:
    """Cross-entropy of each query's own prototype among it and those of `columns`."""
    positive = (query * centres[own]).sum(dim=1) / concentration[own]
    others = query @ centres[columns].T / concentration[columns]
    others = others.masked_fill(own[:, None] == columns, -torch.inf)
    logits = torch.cat([positive[:, None], others], dim=1)
    return cross_entropy(logits, torch.zeros_like(own))


Means = Generator[None, None, tuple[Float[Tensor, "k dim"], Int[Tensor, " n"]]]
"""k-means in parts: yields after each, and returns centres and each image's cluster."""


def cluster(
    features: Float[Tensor, "n dim"],
    number: int,
    seed: int,
    temperature: float,
    library: KMeans = "sklearn",
) -> Iterator[PrototypeClusters | None]:
    """Yield None after each part of k-means, so that nobody waits in vain, then the clusters."""
    means = _by_faiss if library == "faiss" else _by_sklearn
    centres, own = yield from means(features, number, seed)
    distance = (features - centres[own]).norm(dim=1)
    phi = concentrations(distance, own, number, temperature)
    yield PrototypeClusters(normalize(centres, dim=1), phi, own)


def _by_sklearn(features: Tensor, number: int, seed: int) -> Means:
    from sklearn.cluster import MiniBatchKMeans  # not before it is needed: it takes a second

    init = "k-means++" if number <= CAREFUL else "random"
    means = MiniBatchKMeans(number, init=init, n_init=1, random_state=seed)
    generator = torch.Generator().manual_seed(seed)
    size = min(len(features), max(1024, 4 * number))
    for _ in range(PASSES):
        for rows in torch.randperm(len(features), generator=generator).split(size):
            if len(rows) == size:  # the first part must have as many images as there are clusters
                means.partial_fit(features[rows].numpy())
                yield None
    nearest = [means.predict(part.numpy()).astype(np.int64) for part in features.split(size)]
    own = torch.from_numpy(np.concatenate(nearest))
    return torch.from_numpy(means.cluster_centers_).float(), own


def _by_faiss(features: Tensor, number: int, seed: int) -> Means:
    import faiss

    rows = np.ascontiguousarray(features.numpy(), dtype=np.float32)
    generator = torch.Generator().manual_seed(seed)
    centres = rows[torch.randperm(len(rows), generator=generator)[:number].numpy()]
    # One iteration at a time; by default faiss would take a sample of the images, and warn of small
    # clusters.
    limits = {"min_points_per_centroid": 1, "max_points_per_centroid": len(rows)}
    means = faiss.Kmeans(rows.shape[1], number, niter=1, seed=seed, **limits)
    for _ in range(ITERATIONS):
        means.train(rows, init_centroids=centres)
        centres = means.centroids
        yield None
    _, own = means.assign(rows)
    return torch.from_numpy(centres.copy()), torch.from_numpy(own).long()


def embed_images(encoder: nn.Module, config: PretrainConfig, materials: Materials) -> Features:
    """Return every image's embedding, of its centre, in float32: what k-means clusters.

    On all processes with the batch norm statistics of rank 0, which a checkpoint has too: a resumed
    run then finds the same clusters.
    """
    meet()  # a process that failed since its last step is noticed before the others wait on GPUs
    for buffer in encoder.buffers():
        broadcast(buffer)
    compute = materials.compute._replace(bf16=False, fp16=False)
    assert materials.images is not None
    title = "features for clusters"
    return extract(encoder, materials.images, config.data, compute=compute, title=title)


def clustered(
    features: Features, number: int, seed: int, tau: float, library: KMeans
) -> PrototypeClusters | None:
    """Cluster embedded images on rank 0, while the others wait; None on these."""
    found = while_main_works(cluster(features.features, number, seed, tau, library))
    return found[-1] if found else None


def concentrations(
    distance: Float[Tensor, " n"], own: Int[Tensor, " n"], number: int, temperature: float
) -> Float[Tensor, " k"]:
    """The paper's Eq. 12: phi of each cluster, in the authors' clipped and scaled form."""
    size = torch.bincount(own, minlength=number).double()
    total = torch.zeros(number, dtype=torch.float64).index_add_(0, own, distance.double())
    phi = total / size.clamp(min=1) / torch.log(size + 10)
    several = size > 1
    largest = phi[several].max() if bool(several.any()) else phi.new_tensor(1.0)
    phi = torch.where(several, phi, largest)
    phi = phi.clamp(*(float(torch.quantile(phi, share)) for share in (0.1, 0.9)))
    return (temperature * phi / phi.mean()).float()


def kmeans_library(chosen: KMeans, num_images: int, what: str) -> KMeans:
    """The library as chosen; with auto, faiss for many images, if it is installed.

    `what` needs it: the setting that messages name.
    """
    there = {name for name in INSTALL if find_spec(name) is not None}
    if chosen == "auto":
        if num_images >= LARGE and "faiss" not in there:
            warn(
                f"{what}: scikit-learn clusters {num_images} images, which may take hours"
                f" before each epoch; faiss is faster: {INSTALL['faiss']}."
            )
        chosen = "faiss" if num_images >= LARGE and "faiss" in there else "sklearn"
    if chosen not in there:
        title = "faiss" if chosen == "faiss" else "scikit-learn"
        raise InputError(f"{what} needs {title} for k-means: {INSTALL[chosen]}.")
    return chosen


def cluster_numbers(chosen: tuple[int, ...], num_images: int) -> tuple[int, ...]:
    """The numbers of clusters: as chosen, or the published ones in proportion to the images."""
    scaled = tuple(max(2, math.ceil(each * num_images / IMAGENET)) for each in CLUSTERS)
    if chosen and max(chosen) > num_images:
        raise InputError(
            f"pcl.clusters={chosen} exceeds the {num_images} images: lower it, or leave it unset"
            f" for {scaled}."
        )
    return chosen or scaled


def check_kmeans(what: str) -> None:
    """Refuse what needs clusters if nothing can make them."""
    if find_spec("sklearn") is None:
        raise InputError(f"{what} needs scikit-learn for k-means: pip install 'hardmix[analysis]'.")
