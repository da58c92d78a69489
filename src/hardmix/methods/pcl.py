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

from typing import cast

import torch
from torch import Tensor, nn

from hardmix.data.batches import Batch
from hardmix.errors import InputError
from hardmix.methods.base import Materials, TrainingPosition
from hardmix.methods.clusters import (
    cluster_numbers,
    clustered,
    embed_images,
    kmeans_library,
    prototype_loss,
)
from hardmix.methods.contrast_measures import ContrastOutcome
from hardmix.methods.moco import Moco
from hardmix.runtime.console import say
from hardmix.runtime.device import send
from hardmix.runtime.distributed import broadcast
from hardmix.runtime.profile import timed
from hardmix.runtime.random_numbers import seed_of
from hardmix.settings.config import PretrainConfig
from hardmix.settings.method_options import PclOptions


class Prototypes(nn.Module):
    """The clusters of one k-means: saved with the run, equal on every rank."""

    centres: Tensor
    """Of unit length, one for each cluster."""
    concentration: Tensor
    """phi of each cluster."""
    cluster: Tensor
    """Number of each image's cluster."""

    def __init__(self, num_images: int, number: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("centres", torch.zeros(number, dim))
        self.register_buffer("concentration", torch.ones(number))
        self.register_buffer("cluster", torch.zeros(num_images, dtype=torch.int64))


class Pcl(Moco):
    """MoCo with prototypes."""

    Options = PclOptions
    clustered: Tensor
    """The epoch of the clusters; -1 before the first."""

    def __init__(self, config: PretrainConfig, materials: Materials) -> None:
        super().__init__(config, materials)
        self.options, images = cast("PclOptions", config.options), materials.num_images
        if images is None:
            raise InputError(
                "method=pcl clusters all images before an epoch, but these shards are a stream"
                " without numbers: use shards on a disk, a folder or a list of images."
            )
        self.library = kmeans_library(
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
        found = embed_images(self.pair.key, config, self.materials)
        for number, each in enumerate(cast("list[Prototypes]", list(self.prototypes))):
            seed = seed_of("clusters", config.train.seed, epoch, number) % 2**31
            size, tau = len(each.centres), config.train.temperature
            made = clustered(found, size, seed, tau, self.library)
            if made is not None:
                each.centres.copy_(made.centres)
                each.concentration.copy_(made.concentration)
                each.cluster[send(found.ids, each.cluster.device)] = send(
                    made.cluster, each.cluster.device
                )
            for buffer in each.buffers():
                broadcast(buffer)
        self.clustered.fill_(epoch)
        say(f"epoch {epoch + 1}: {len(found.ids)} images in {self._sizes()} clusters")

    def loss(self, part: Batch, at: TrainingPosition) -> ContrastOutcome:
        """MoCo's loss and, after the warm-up, that of the prototypes."""
        query, key = self.encode(part, at)
        outcome = self.compare(query, key, part, at)
        if at.epoch < self.options.warm_up_epochs:
            return outcome
        with timed("loss"), torch.autocast(query.device.type, enabled=False):
            terms = [
                self._prototype_loss(query, part.ids, each, at, number)
                for number, each in enumerate(cast("list[Prototypes]", list(self.prototypes)))
            ]
            term = torch.stack(terms).mean()
        outcome.extra = {"prototype_loss": term.detach()}
        outcome.loss = outcome.loss + term
        return outcome

    def _prototype_loss(
        self, query: Tensor, ids: Tensor, each: Prototypes, at: TrainingPosition, number: int
    ) -> Tensor:
        total, most = len(each.centres), self.config.train.queue_size
        columns = torch.arange(total)
        if total > most + 1:
            seed = seed_of("prototypes", self.config.train.seed, at.step, at.part, number)
            generator = torch.Generator().manual_seed(seed)
            columns = torch.randperm(total, generator=generator)[:most]
        columns = send(columns, query.device)
        own = each.cluster.index_select(0, ids)
        return prototype_loss(query, each.centres, each.concentration, own, columns)

    def replicated(self) -> dict[str, Tensor]:
        """The queue, and the clusters."""
        return super().replicated() | dict(self.prototypes.named_buffers(prefix="prototypes"))

    def _sizes(self) -> str:
        return ", ".join(str(len(cast("Prototypes", each).centres)) for each in self.prototypes)
