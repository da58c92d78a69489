"""The encoders f of Sec. 3.1: trunk and head; a query encoder, and a key encoder that follows it.

Every embedding that leaves an encoder has unit length, in float32. Batch normalisation must not
reveal to a query which key is its own (MoCo, Sec. 3.3, "Shuffling BN"): keys are normalised in
groups that are drawn again at every step, over several processes or within one.
"""

import copy
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torch.nn.functional import normalize

from hardmix.errors import InputError
from hardmix.models.backbones import build_backbone, feature_width
from hardmix.models.batch_norm import batch_norms, split_batch_norm
from hardmix.runtime.distributed import Exchange, ranks_by_host, world_size
from hardmix.settings.config import ModelConfig
from hardmix.settings.named_choices import Head


def batch_norm_mlp(width: int, hidden: int, dim: int) -> nn.Sequential:
    """Two layers with batch norm between them: the heads of BYOL and SwAV."""
    return nn.Sequential(
        nn.Linear(width, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, dim)
    )


HEADS: dict[Head, Callable[[int, int], nn.Module]] = {
    "linear": nn.Linear,
    "mlp": lambda width, dim: nn.Sequential(
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, dim)
    ),
    "mlp-bn": lambda width, dim: nn.Sequential(
        nn.Linear(width, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, dim, bias=False),
        nn.BatchNorm1d(dim),
    ),
}
"""Projection heads from width to dim: MoCo-v1's layer, MoCo-v2's two with `width` hidden units, and
SimCLR's with batch norm after both (official code, `proj_head_mode` nonlinear)."""

UNSPLIT_WARNING = (
    "model.key_bn_splits=1 on one process: queries and keys are normalised with the statistics of"
    " the same images, from which an encoder can find the answer without learning anything (MoCo,"
    " Sec. 3.3); set model.key_bn_splits to 2 or more."
)
"""Warning of a run with `QueryKeyPair.shares_statistics`, printed once."""

Images = Float[Tensor, "batch channels y x"]


class Encoder(nn.Module):
    """f of Sec. 3.1: images to unit vectors, by a trunk and a projection head."""

    def __init__(self, trunk: nn.Module, width: int, *, dim: int = 128, head: Head = "mlp") -> None:
        super().__init__()
        self.width = width
        self.trunk = trunk
        self.head = HEADS[head](width, dim)

    def forward(self, images: Images) -> Float[Tensor, "batch dim"]:
        """Return embeddings of unit length, in float32 even inside autocast."""
        # A zero vector becomes NaN, which training notices: no loss normalises it again.
        return normalize(self.head(self.features(images)).float(), dim=1, eps=0.0)

    def features(self, images: Images) -> Float[Tensor, "batch width"]:
        """Return the trunk's features: the representation that is evaluated, without the head."""
        features: Tensor = self.trunk(images)
        return features


def build_encoder(
    config: ModelConfig,
    channels: int = 3,
    trunk: nn.Module | None = None,
    image_size: int = 224,
) -> Encoder:
    """Build the encoder of a run, with random weights, or with your own `trunk`.

    Your own trunk must return (batch, width) features; its width is found by running a copy in
    evaluation mode on two black images of `image_size`.
    """
    if trunk is None:
        trunk, width = build_backbone(config.backbone, channels, image_size)
    else:
        width = feature_width(trunk, channels, image_size)
    return Encoder(trunk, width, dim=config.dim, head=config.head)


class QueryKeyPair(nn.Module):
    """Sec. 3.1: the query encoder, and the key encoder that follows it slowly.

    The key encoder starts as an exact copy. It never receives gradients, and only its parameters
    follow: the running statistics of its batch normalisation are those of the keys it has seen, as
    in official MoCo. With several processes, the groups of its batch normalisation are divided
    among them, at least one per process.
    """

    def __init__(self, query: Encoder, momentum: float = 0.999, key_bn_splits: int = 4) -> None:
        super().__init__()
        self.momentum = momentum
        self.query = query
        self.key = copy.deepcopy(query).requires_grad_(False).train()
        split_batch_norm(self.key, _splits_here(key_bn_splits))
        self.shares_statistics = (
            key_bn_splits == 1 and world_size() == 1 and bool(batch_norms(self.key))
        )
        """Whether batch normalisation can give the answer away; see `UNSPLIT_WARNING`."""
        self._both: tuple[list[Tensor], list[Tensor]] | None = None

    @torch.no_grad()
    def update_key(self) -> None:
        """MoCo's Eq. 2: key = m * key + (1 - m) * query, for parameters only.

        Computed as key + (1 - m) * (query - key): equal parameters stay equal.
        """
        if self._both is None:  # walking through all modules takes longer than the update
            self._both = list(self.key.parameters()), list(self.query.parameters())
        torch._foreach_lerp_(*self._both, 1 - self.momentum)


def _splits_here(splits: int) -> int:
    """Return the number of groups on this process; the groups do not depend on the processes."""
    if splits > world_size() and splits % world_size():
        raise InputError(
            f"model.key_bn_splits={splits} is not a multiple of the {world_size()} processes, which"
            f" must have equally many groups: choose {world_size()} or a multiple."
        )
    return -(-splits // world_size())  # rounded up: at least one group per process


class ShuffledImages:
    """Images being sent to the process that encodes their keys: MoCo's shuffled batch norm.

    `permutation` orders the batch of all processes and must be the same on each: draw it from a
    generator seeded by (seed, step). Create this before the queries are encoded, so that images are
    sent in the meantime.
    """

    def __init__(self, images: Images, permutation: Int[Tensor, " all"]) -> None:
        _check_permutation(permutation, len(images))
        self._there, self._back = Exchange(images, permutation), permutation.argsort()

    @torch.no_grad()
    def encode(self, key_encoder: nn.Module) -> Float[Tensor, "batch dim"]:
        """Return their keys, in the original order, without gradient."""
        return Exchange(key_encoder(self._there.arrived()), self._back).arrived()


@torch.no_grad()
def encode_keys(
    key_encoder: nn.Module, images: Images, permutation: Int[Tensor, " all"] | None = None
) -> Float[Tensor, "batch dim"]:
    """Return the keys of `images`, in order, without gradient, by `ShuffledImages`.

    Without a permutation, images are not shuffled.
    """
    if permutation is not None:
        return ShuffledImages(images, permutation).encode(key_encoder)
    keys: Tensor = key_encoder(images)
    return keys


def shuffled_rows(
    number: int, groups: Sequence[Sequence[int]], generator: torch.Generator
) -> Int[Tensor, " all"]:
    """Return an order of the batch of all processes in which rows stay within their group of ranks.

    `number` is that of the rows of each process. One group is MoCo's shuffled batch norm.
    """
    order = torch.empty(number * sum(map(len, groups)), dtype=torch.int64)
    for ranks in groups:
        rows = (number * torch.tensor(ranks)[:, None] + torch.arange(number)).flatten()
        order[rows] = rows[torch.randperm(len(rows), generator=generator)]
    return order


def shuffling_groups(config: ModelConfig) -> list[list[int]]:
    """Return the groups of ranks among which keys are shuffled; all ranks must call this together.

    Raise InputError if a process would normalise its keys with the statistics of its own queries.
    """
    if config.key_shuffle == "all":
        return [list(range(world_size()))]
    groups = ranks_by_host()
    alone = [ranks[0] for ranks in groups if len(ranks) == 1]
    if alone and world_size() > 1 and _splits_here(config.key_bn_splits) == 1:
        raise InputError(
            f"model.key_shuffle=node, but rank {alone[0]} is the only process of its node: its"
            " keys would be normalised with the same images as their queries, which gives the"
            " answer away; start at least two processes on each node, or choose all."
        )
    return groups


def shuffle_across(
    rows: Shaped[Tensor, "batch ..."], permutation: Int[Tensor, " all"]
) -> Shaped[Tensor, "batch ..."]:
    """Permute the rows of all processes and return this one's (official `_batch_shuffle_ddp`).

    The inverse, `permutation.argsort()`, undoes it.
    """
    _check_permutation(permutation, len(rows))
    return Exchange(rows, permutation).arrived()


def _check_permutation(permutation: Tensor, batch: int) -> None:
    if len(permutation) != batch * world_size():
        raise InputError(
            f"permutation has {len(permutation)} entries for {world_size()} x {batch} rows: it must"
            " order the batch of all processes."
        )
