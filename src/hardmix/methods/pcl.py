"""PCL (Li et al. 2021): MoCo, and prototypes that are clusters of the whole data set.

Before each epoch the momentum encoder embeds every image, and k-means clusters them, M times with
different k. A query is then also contrasted with its image's prototype c_s, each with its own
concentration phi in place of a temperature:

    L = L_MoCo - 1/M sum_m log exp(q.c_s / phi_s) / sum_j exp(q.c_j / phi_j)
    phi = mean distance of a cluster's members to its centre / log(size + 10), scaled to mean tau

Read in salesforce/PCL (main_pcl.py, pcl/builder.py): centre crops in evaluation mode, phi clipped
to its 10th and 90th percentile, clusters of one image get the largest phi, r prototypes sampled as
negatives, plain MoCo for the first epochs. Decided: scikit-learn's MiniBatchKMeans, or faiss for
many images (`pcl.kmeans`), both on the CPU; the number of clusters follows that of the images; the
r negatives are drawn for a step (all, if there are no more), without regard to the batch, so that
they do not depend on the number of processes. Every prototype counts once: where two images of a
batch share a cluster, the authors' sum has that prototype once for each, so that the positive is
its own negative as well, and the loss depends on which images share a process. With `mix.*`, points
join MoCo's term. PCL v1 differs from v2 in settings alone.
"""

import math
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from hardmix.data.batches import Batch
from hardmix.errors import InputError
from hardmix.evaluation.features import Features
from hardmix.evaluation.kmeans import choose_library
from hardmix.methods.base import Materials, TrainingPosition
from hardmix.methods.clusters import KMeansClusters, cluster_on_main, embed_images
from hardmix.methods.contrast_measures import ContrastOutcome
from hardmix.methods.moco import Moco
from hardmix.runtime.console import say
from hardmix.runtime.device import send
from hardmix.runtime.distributed import broadcast
from hardmix.runtime.profile import timed
from hardmix.runtime.random_numbers import seed_of
from hardmix.settings.config import PretrainConfig
from hardmix.settings.methods import PclOptions

IMAGENET, CLUSTERS = 1_281_167, (25_000, 50_000, 100_000)
"""Images of ImageNet-1k, and the published numbers of clusters for them."""


class Prototypes(nn.Module):
    """The clusters of one k-means: saved with the run, equal on every rank."""

    centres: Tensor
    """Centre of each cluster, of unit length."""
    concentration: Tensor
    """phi of each cluster."""
    cluster: Tensor
    """Number of each image's cluster."""

    def __init__(self, num_images: int, number: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("centres", torch.zeros(number, dim))
        self.register_buffer("concentration", torch.ones(number))
        self.register_buffer("cluster", torch.zeros(num_images, dtype=torch.int64))

    def take(self, features: Features, clusters: KMeansClusters, temperature: float) -> None:
        """Take over new clusters of these images."""
        distance = (features.features - clusters.centres[clusters.cluster]).norm(dim=1)
        number, device = len(self.centres), self.cluster.device
        self.centres.copy_(normalize(clusters.centres, dim=1))
        self.concentration.copy_(concentrations(distance, clusters.cluster, number, temperature))
        self.cluster[send(features.ids, device)] = send(clusters.cluster, device)


class Pcl(Moco):
    """MoCo with prototypes."""

    options: PclOptions
    clustered: Tensor
    """The epoch of the clusters; -1 before the first."""

    def __init__(self, config: PretrainConfig, materials: Materials) -> None:
        super().__init__(config, materials)
        images = materials.count_images("method=pcl clusters all images")
        self.library = choose_library(
            self.options.kmeans, images, f"pcl.kmeans={self.options.kmeans}"
        )
        numbers = cluster_numbers(self.options.clusters, images)
        self.prototypes = nn.ModuleList(
            Prototypes(images, number, config.model.dim) for number in numbers
        )
        self.register_buffer("clustered", torch.tensor(-1))

    def begin_epoch(self, epoch: int) -> None:
        """Cluster all images, unless this epoch's clusters came with a checkpoint."""
        super().begin_epoch(epoch)
        images, config = self.materials.images, self.config
        if epoch < self.options.warm_up_epochs or int(self.clustered) == epoch or images is None:
            return
        features = embed_images(self.pair.key, config, self.materials)
        for number, prototypes in enumerate(cast("list[Prototypes]", list(self.prototypes))):
            seed = seed_of("clusters", config.train.seed, epoch, number) % 2**31
            clusters = cluster_on_main(features, len(prototypes.centres), seed, self.library)
            if clusters is not None:
                prototypes.take(features, clusters, config.train.temperature)
            for buffer in prototypes.buffers():
                broadcast(buffer)
        self.clustered.fill_(epoch)
        say(f"epoch {epoch + 1}: {len(features.ids)} images in {self._sizes()} clusters")

    def loss(self, part: Batch, at: TrainingPosition) -> ContrastOutcome:
        """Return MoCo's loss and, after the warm-up, that of the prototypes."""
        query, key = self.encode(part, at)
        outcome = self.compare(query, key, part, at)
        if at.epoch < self.options.warm_up_epochs:
            return outcome
        with timed("loss"), torch.autocast(query.device.type, enabled=False):
            terms = [
                self._prototype_loss(query, part.ids, prototypes, at, number)
                for number, prototypes in enumerate(cast("list[Prototypes]", list(self.prototypes)))
            ]
            term = torch.stack(terms).mean()
        outcome.measures["prototype_loss"] = term.detach()
        outcome.loss = outcome.loss + term
        return outcome

    def _prototype_loss(
        self, query: Tensor, ids: Tensor, prototypes: Prototypes, at: TrainingPosition, number: int
    ) -> Tensor:
        total, most = len(prototypes.centres), self.config.train.queue_size
        columns = torch.arange(total)
        if total > most + 1:
            seed = seed_of("prototypes", self.config.train.seed, at.step, at.part, number)
            generator = torch.Generator().manual_seed(seed)
            columns = torch.randperm(total, generator=generator)[:most]
        columns = send(columns, query.device)
        own = prototypes.cluster.index_select(0, ids)
        return prototype_loss(query, prototypes.centres, prototypes.concentration, own, columns)

    def replicated(self) -> dict[str, Tensor]:
        """Return the queue and the clusters."""
        return super().replicated() | dict(self.prototypes.named_buffers(prefix="prototypes"))

    def _sizes(self) -> str:
        return ", ".join(str(len(cast("Prototypes", each).centres)) for each in self.prototypes)


def prototype_loss(
    query: Float[Tensor, "batch dim"],
    centres: Float[Tensor, "k dim"],
    concentration: Float[Tensor, " k"],
    own: Int[Tensor, " batch"],
    columns: Int[Tensor, " r"],
) -> Float[Tensor, ""]:
    """Return the cross-entropy of each query's own prototype among it and those of `columns`."""
    positive = (query * centres[own]).sum(dim=1) / concentration[own]
    others = query @ centres[columns].T / concentration[columns]
    others = others.masked_fill(own[:, None] == columns, -torch.inf)
    logits = torch.cat([positive[:, None], others], dim=1)
    return cross_entropy(logits, torch.zeros_like(own))


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


def cluster_numbers(chosen: tuple[int, ...], num_images: int) -> tuple[int, ...]:
    """Return the numbers of clusters: as chosen, or as published, in proportion to the images."""
    scaled = tuple(max(2, math.ceil(each * num_images / IMAGENET)) for each in CLUSTERS)
    if chosen and max(chosen) > num_images:
        raise InputError(
            f"pcl.clusters={chosen} exceeds the {num_images} images: lower it, or leave it unset"
            f" for {scaled}."
        )
    return chosen or scaled
