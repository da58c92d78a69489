"""PIRL's jigsaws: tiles of an image in random order, and the encoder of both."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import normalize

from hardmix.models.encoders import Encoder
from hardmix.models.heads import HEADS
from hardmix.settings.named_choices import Head

GRID = 3
TILES = GRID * GRID


class JigsawEncoder(nn.Module):
    """Images and their tiles to embeddings of unit length, by one trunk and two heads."""

    def __init__(self, encoder: Encoder, dim: int, head: Head) -> None:
        super().__init__()
        self.image = encoder
        self.tile_head = HEADS[head](encoder.width, dim)
        self.join = nn.Linear(TILES * dim, dim)

    def forward(
        self,
        images: Float[Tensor, "batch channels y x"],
        tiles: Float[Tensor, "batch 9 channels v u"],
    ) -> tuple[Float[Tensor, "batch dim"], Float[Tensor, "batch dim"]]:
        """Return the embeddings of the images and of their jigsaws, in float32."""
        parts = self.tile_head(self.image.features(tiles.flatten(0, 1)))
        joined = self.join(parts.unflatten(0, (-1, TILES)).flatten(1))
        return self.image(images), normalize(joined.float(), dim=1)


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
