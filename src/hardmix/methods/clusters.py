"""Clusters of all images, made before an epoch: the key encoder embeds the images, then k-means.

PCL's prototypes are such clusters. With `loss.filter=same-cluster`, negatives of the query's own
cluster are left out, as likely false ones: as in IFND (Chen et al. 2021), clusters stand for the
unknown classes. From the second epoch on, the clusters are those of the last epoch's encoder. The
queue knows its keys' images, so that keys of the last epoch have the new numbers too. IFND's
growing share of trusted images is left out.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from hardmix.errors import InputError
from hardmix.evaluation.features import Features, extract
from hardmix.evaluation.kmeans import choose_library, k_means
from hardmix.methods.base import Materials
from hardmix.mixing.family import same_labels
from hardmix.mixing.queue import UNKNOWN, MemoryQueue
from hardmix.runtime.console import say
from hardmix.runtime.device import send
from hardmix.runtime.distributed import broadcast, meet, while_main_works
from hardmix.runtime.random_numbers import seed_of
from hardmix.settings.config import PretrainConfig
from hardmix.settings.named_choices import KMeans


class KMeansClusters(NamedTuple):
    """The result of k-means."""

    centres: Float[Tensor, "k dim"]
    """Centre of each cluster."""
    cluster: Int[Tensor, " n"]
    """Cluster of each image."""


def cluster(
    features: Float[Tensor, "n dim"], number: int, seed: int, library: KMeans = "sklearn"
) -> Iterator[KMeansClusters | None]:
    """Yield None after each part of k-means, so that nobody waits in vain, then the clusters."""
    centres, own = yield from k_means(features, number, seed, library)
    yield KMeansClusters(centres, own)


def cluster_on_main(
    features: Features, number: int, seed: int, library: KMeans
) -> KMeansClusters | None:
    """Cluster embedded images on rank 0 while the others wait; return None on these."""
    parts = while_main_works(cluster(features.features, number, seed, library))
    return parts[-1] if parts else None


def embed_images(encoder: nn.Module, config: PretrainConfig, materials: Materials) -> Features:
    """Return the embedding of every image's centre crop, in float32.

    All processes use the batch norm statistics of rank 0, which a checkpoint has too: a resumed run
    then finds the same clusters.
    """
    meet()  # a process that failed since its last step is noticed before the others wait on GPUs
    for buffer in encoder.buffers():
        broadcast(buffer)
    compute = materials.compute._replace(bf16=False, fp16=False)
    assert materials.images is not None
    title = "features for clusters"
    return extract(encoder, materials.images, config.data, compute=compute, title=title)


class ImageClusters(nn.Module):
    """The number of every image's cluster: saved with the run, equal on every rank."""

    number: Int[Tensor, " images"]
    """-1 before the first clusters."""
    epoch: Int[Tensor, ""]
    """The epoch before which the clusters were made; -1 before the first."""

    def __init__(self, config: PretrainConfig, materials: Materials) -> None:
        super().__init__()
        self.config, self.materials = config, materials
        number = config.loss.clusters
        images = materials.count_images("loss.filter=same-cluster clusters all images")
        self.library = choose_library("auto", images, "loss.filter=same-cluster")
        if number > images:
            raise InputError(
                f"loss.clusters={number} exceeds the {images} images: lower it; about the number"
                " of classes that you expect is a start."
            )
        self.register_buffer("number", torch.full((images,), UNKNOWN))
        self.register_buffer("epoch", torch.tensor(-1))

    def update(self, encoder: nn.Module, epoch: int) -> None:
        """Cluster all images, unless this epoch's clusters came with a checkpoint."""
        if epoch == 0 or int(self.epoch) == epoch or self.materials.images is None:
            return
        config, number = self.config, self.config.loss.clusters
        seed = seed_of("filter", config.train.seed, epoch) % 2**31
        features = embed_images(encoder, config, self.materials)
        clusters = cluster_on_main(features, number, seed, self.library)
        if clusters is not None:
            device = self.number.device
            self.number[send(features.ids, device)] = send(clusters.cluster, device)
        broadcast(self.number)
        self.epoch.fill_(epoch)
        say(f"epoch {epoch + 1}: {len(features.ids)} images in {number} clusters")

    def same_cluster(
        self, ids: Int[Tensor, " batch"], memory: MemoryQueue
    ) -> Bool[Tensor, "batch K"]:
        """Return which keys are of an image in the query's cluster; unknown ones are not."""
        of_keys = self.number.index_select(0, memory.ids.clamp(min=0))
        of_keys = of_keys.masked_fill(memory.ids == UNKNOWN, UNKNOWN)
        return same_labels(self.number.index_select(0, ids), of_keys)

    def forget(self) -> None:
        """Forget the clusters, because the images have changed."""
        self.number.fill_(UNKNOWN)
        self.epoch.fill_(-1)
