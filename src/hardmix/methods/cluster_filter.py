"""Negatives of the query's own cluster are left out, as likely false ones (loss.filter).

As in IFND (Chen et al. 2021), clusters stand for the unknown classes. From the second epoch on, the
key encoder embeds every image before the epoch, and k-means clusters them once: the clusters are
those of the last epoch's encoder. The queue knows its keys' images, so that keys of the last epoch
have the new numbers too. IFND's growing share of trusted images is left out.
"""

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from hardmix.errors import InputError
from hardmix.methods.base import Materials
from hardmix.methods.clusters import clustered, embed_images, kmeans_library
from hardmix.mixing.family import same_labels
from hardmix.mixing.queue import UNKNOWN, MemoryQueue
from hardmix.runtime.console import say
from hardmix.runtime.device import send
from hardmix.runtime.distributed import broadcast
from hardmix.runtime.random_numbers import seed_of
from hardmix.settings.config import PretrainConfig


class ImageClusters(nn.Module):
    """The number of every image's cluster: saved with the run, equal on every rank."""

    number: Int[Tensor, " images"]
    """-1 before the first clusters."""
    epoch: Int[Tensor, ""]
    """The epoch before which the clusters were made; -1 before the first."""

    def __init__(self, config: PretrainConfig, materials: Materials) -> None:
        super().__init__()
        self.config, self.materials = config, materials
        wanted, images = config.loss.clusters, materials.num_images
        if images is None:
            raise InputError(
                "loss.filter=same-cluster clusters all images before an epoch, but these shards"
                " are a stream without numbers: use shards on a disk, a folder or a list of"
                " images."
            )
        self.library = kmeans_library("auto", images, "loss.filter=same-cluster")
        if wanted > images:
            raise InputError(
                f"loss.clusters={wanted} exceeds the {images} images: lower it; about the number"
                " of classes that you expect is a start."
            )
        self.register_buffer("number", torch.full((images,), UNKNOWN))
        self.register_buffer("epoch", torch.tensor(-1))

    def update(self, encoder: nn.Module, epoch: int) -> None:
        """Cluster all images, unless this epoch's clusters came with a checkpoint."""
        if epoch == 0 or int(self.epoch) == epoch or self.materials.images is None:
            return
        config, wanted = self.config, self.config.loss.clusters
        seed = seed_of("filter", config.train.seed, epoch) % 2**31
        found = embed_images(encoder, config, self.materials)
        made = clustered(found, wanted, seed, config.train.temperature, self.library)
        if made is not None:
            device = self.number.device
            self.number[send(found.ids, device)] = send(made.cluster, device)
        broadcast(self.number)
        self.epoch.fill_(epoch)
        say(f"epoch {epoch + 1}: {len(found.ids)} images in {wanted} clusters")

    def same_cluster(
        self, ids: Int[Tensor, " batch"], memory: MemoryQueue
    ) -> Bool[Tensor, "batch K"]:
        """Return which keys are of an image in the query's cluster; unknown ones are not."""
        of_keys = self.number.index_select(0, memory.ids.clamp(min=0))
        of_keys = of_keys.masked_fill(memory.ids == UNKNOWN, UNKNOWN)
        return same_labels(self.number.index_select(0, ids), of_keys)

    def forget(self) -> None:
        """Forget the clusters: the images have changed."""
        self.number.fill_(UNKNOWN)
        self.epoch.fill_(-1)
