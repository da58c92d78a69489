"""Jigsaws of PIRL and InfoMin: tiles of an image in random order, and an encoder of both.

Read in HobbitLong/PyContrast (datasets/util.py, networks/util.py), where both methods have the same
one: a crop of 0.6 to 1 of the image, only flipped, is cut into 3 x 3 cells, and a tile is taken
from each cell at a random place. Tiles have a head of their own, and a layer joins the nine.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import normalize

from hardmix.data.views import ViewKind
from hardmix.methods.base import TrainingPosition
from hardmix.mixing.random_draws import uniform_rows
from hardmix.models.encoders import HEADS, Encoder
from hardmix.runtime.distributed import rank
from hardmix.runtime.random_numbers import seed_of
from hardmix.settings.named_choices import Head

GRID = 3
TILES = GRID * GRID


class JigsawEncoder(Encoder):
    """An encoder that embeds tiles, too, by the same trunk and a head of their own."""

    def __init__(self, encoder: Encoder, dim: int, head: Head) -> None:
        nn.Module.__init__(self)  # it takes over trunk and head of the encoder, with their weights
        self.width, self.trunk, self.head = encoder.width, encoder.trunk, encoder.head
        self.tile_head = HEADS[head](encoder.width, dim)
        self.join = nn.Linear(TILES * dim, dim)

    def forward(  # type: ignore[override]
        self,
        images: Float[Tensor, "batch channels y x"],
        tiles: Float[Tensor, "batch 9 channels v u"] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the embeddings of images and, with `tiles`, of their jigsaws, in float32."""
        if tiles is None:
            return super().forward(images)
        parts = self.tile_head(self.features(tiles.flatten(0, 1)))
        joined = self.join(parts.unflatten(0, (-1, TILES)).flatten(1))
        return super().forward(images), normalize(joined.float(), dim=1)


def jigsaw_view(size: int) -> ViewKind:
    """Return the kind of view that is cut into tiles."""
    return ViewKind(1, size, (0.6, 1.0), "plain")


def draw_tiles(
    images: Float[Tensor, "batch channels size size"], tile: int, seed: int, at: TrainingPosition
) -> Float[Tensor, "batch 9 channels {tile} {tile}"]:
    """Cut tiles at places drawn by (seed, step, row of the global batch)."""
    number = len(images)
    draws = uniform_rows(
        seed_of("tiles", seed, at.step, at.part),
        rank() * number,
        number,
        3 * TILES,
        torch.float32,
        images.device,
    )
    return cut_tiles(images, tile, draws)


def cut_tiles(
    images: Float[Tensor, "batch channels size size"],
    tile: int,
    draws: Float[Tensor, "batch 27"],
) -> Float[Tensor, "batch 9 channels {tile} {tile}"]:
    """Cut one tile out of each of 3 x 3 cells, at a random place, and shuffle them."""
    cell = images.shape[2] // GRID
    down, across, order = draws.chunk(3, dim=1)
    place = order.argsort(dim=1)
    offsets = torch.stack([down, across]).mul(cell - tile + 1).long()  # draws are below 1
    starts = offsets + cell * torch.stack([place // GRID, place % GRID])
    y, x = starts.unsqueeze(-1) + torch.arange(tile, device=images.device)
    rows = torch.arange(len(images), device=images.device).view(-1, 1, 1, 1)
    tiles = images[rows, :, y[:, :, :, None], x[:, :, None, :]]
    return tiles.permute(0, 1, 4, 2, 3).contiguous()
