"""Several encoders compared image by image, with labels or without.

With labels: does the vote of an image's nearest neighbours give its class? Without: two views of
every image are made, and an encoder finds the neighbours of each image twice, once among the first
views and once among the second; how many neighbours do the two lists share? Features that see
nothing but the crop give two unrelated lists. The views differ in colour too: otherwise a colour
histogram would be best at this on any images, even better than ImageNet features.

Every encoder sees the same pixels, in one pass, so that differences can be taken image by image.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import normalize

from hardmix.data.image_set import ImageSet
from hardmix.data.loading import ViewLoader
from hardmix.evaluation.features import extract
from hardmix.evaluation.knn import knn_votes
from hardmix.runtime.device import Compute
from hardmix.runtime.distributed import gather_uneven, rank, world_size
from hardmix.settings.config import DataConfig

VOTING = 20
"""Nearest neighbours that vote, of many images; a tenth of few."""
SHARED = 10
"""Nearest neighbours of each view that are compared, of many images; a tenth of few."""
VIEW_STRENGTH = 0.5
"""Strength of the colour changes of the two views, as data.colour_strength."""
VIEW_SCALE = 0.2
"""Smallest area of the two views, as data.min_scale."""
BATCH = 64
"""Images encoded at once on each process."""


class SideBySide(nn.Module):
    """Several encoders on the same images, their features next to each other."""

    def __init__(self, encoders: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.encoders = nn.ModuleDict(encoders)
        self.widths: list[int] = []

    def forward(self, images: Float[Tensor, "batch channels y x"]) -> Float[Tensor, "batch all"]:
        """Return the features of all encoders in a row."""
        found = [encoder(images).float() for encoder in self.encoders.values()]
        self.widths = [each.shape[1] for each in found]
        return torch.cat(found, dim=1)

    def separate(self, features: Float[Tensor, "n all"]) -> dict[str, Tensor]:
        """Return the features of each encoder by its name."""
        return dict(zip(self.encoders, features.split(self.widths, dim=1), strict=True))


class Scores(NamedTuple):
    """How each encoder did, image by image."""

    each: dict[str, Float[Tensor, " images"]]
    """Score of every image by encoder, 0 to 1; the same images in the same order."""
    k: int
    """Number of nearest neighbours."""
    searched: int
    """Number of images in which the neighbours are looked for."""
    chance: float
    """Score of features that know nothing."""


Between = Callable[[], None]
"""Called before each batch, equally often on every process."""


def compare_by_labels(
    encoders: Mapping[str, nn.Module],
    bank: ImageSet,
    test: ImageSet | None,
    data: DataConfig,
    compute: Compute,
    between: Between,
) -> Scores:
    """Score 1 where the neighbours' vote is the image's class, else 0.

    Without `test`, the images of the bank are classified, each by the others.
    """
    together = SideBySide(encoders)
    encode = partial(extract, compute=compute, title="verdict", between=between)
    known = asked = encode(together, bank, data)
    if test is not None:
        asked = encode(together, test, data)
    k = max(1, min(VOTING, len(known.labels) // 10))
    features = together.separate(known.features), together.separate(asked.features)
    right = {
        name: _right(features[0][name], known.labels, features[1][name], asked.labels, k, test)
        for name in encoders
    }
    frequency = known.labels.bincount().max() / len(known.labels)
    return Scores(right, k, len(known.labels), float(frequency))


def _right(
    bank: Tensor, labels: Tensor, asked: Tensor, wanted: Tensor, k: int, test: ImageSet | None
) -> Float[Tensor, " images"]:
    votes = knn_votes(bank, labels, asked, wanted, k=k, leave_one_out=test is None)
    return (votes.argmax(dim=1).cpu() == wanted.cpu()).float()


@torch.no_grad()
def compare_by_views(
    encoders: Mapping[str, nn.Module],
    images: ImageSet,
    data: DataConfig,
    seed: int,
    compute: Compute,
    between: Between,
) -> Scores:
    """Score each image by the share of its nearest neighbours that its two views agree on."""
    together = SideBySide(encoders)
    views = _two_views(together, images, data, seed, compute, between)
    first, second = (together.separate(each) for each in views)
    number = len(next(iter(first.values())))
    k = max(1, min(SHARED, number // 10))
    each = {name: shared_neighbours(first[name], second[name], k) for name in encoders}
    return Scores(each, k, number, k / max(1, number - 1))


def shared_neighbours(
    first: Float[Tensor, "n dim"], second: Float[Tensor, "n dim"], k: int
) -> Float[Tensor, " n"]:
    """Return the share of every row's k nearest other rows that both features agree on."""
    near = [_nearest(features, k) for features in (first, second)]
    same = near[0][:, :, None] == near[1][:, None, :]
    return same.any(dim=2).float().mean(dim=1)


def _nearest(features: Float[Tensor, "n dim"], k: int) -> Int[Tensor, "n k"]:
    unit = normalize(features.float(), dim=1)
    similarity = unit @ unit.T
    return similarity.fill_diagonal_(-torch.inf).topk(k, dim=1).indices


def _two_views(
    together: SideBySide,
    images: ImageSet,
    data: DataConfig,
    seed: int,
    compute: Compute,
    between: Between,
) -> tuple[Tensor, Tensor]:
    """Return the features of two views of every image, in the images' order, on every process."""
    config = replace(
        data,
        augmentation="moco-v2",
        blur=False,
        views=None,
        min_scale=VIEW_SCALE,
        colour_strength=VIEW_STRENGTH,
    )
    batch = min(BATCH, max(1, len(images) // world_size())) * world_size()
    loader = ViewLoader(
        images, config, batch, seed, compute.device, rank(), world_size(), keep_last=True
    )
    rows: list[tuple[Tensor, ...]] = []
    training = together.training
    together.eval()
    batches = loader.epoch(0)
    try:
        for _ in range(loader.steps_per_epoch):
            between()
            views = next(batches)
            with compute.autocast():
                pair = [
                    together(each.contiguous(memory_format=torch.channels_last)).cpu()
                    for each in views.views
                ]
            rows.append((*pair, views.ids.cpu()))
    finally:
        loader.close()
        together.train(training)
    first, second, ids = (gather_uneven(torch.cat(column)) for column in zip(*rows, strict=True))
    order = _first_of_each(ids)
    return first[order], second[order]


def _first_of_each(ids: Int[Tensor, " n"]) -> Int[Tensor, " m"]:
    """Return the place of each image once, in order: unreadable ones are replaced by others."""
    order = ids.argsort(stable=True)
    ordered = ids[order]
    new = torch.ones(len(ids), dtype=torch.bool)
    new[1:] = ordered[1:] != ordered[:-1]
    return order[new]
