"""lightly's MoCo with hard negative mixing: its NTXentLoss is replaced, and nothing else.

lightly's loss owns its memory bank and writes it; here both are ours. Without points
(num_pairs=0, num_with_query=0) every step has the loss that lightly's would have.

python examples/lightly_moco.py [--steps 20] [--batch-size 32]
"""

import copy
from collections.abc import Callable

import torch
import torchvision
import tyro
from lightly.models.modules import MoCoProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.transforms import MoCoV2Transform
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision.datasets import FakeData

from hardmix import MemoryQueue, MochiLoss

Criterion = Callable[[Tensor, Tensor], Tensor]


class Mixing:
    """In place of NTXentLoss(temperature=0.2, memory_bank_size=(256, 128))."""

    def __init__(self, num_pairs: int = 64, num_with_query: int = 16) -> None:
        self.loss = MochiLoss(64, num_pairs, num_with_query, temperature=0.2)
        self.memory = MemoryQueue(size=256, dim=128)

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        """The loss; then the queue takes this batch's keys, as lightly's does."""
        value = self.loss(query, key, self.memory)
        self.memory.enqueue(key)
        return value


def train(criterion: Criterion, steps: int, batch_size: int) -> list[float]:
    """lightly's own pieces: transform, projection head, momentum update. Returns the losses."""
    torch.manual_seed(0)
    transform = MoCoV2Transform(input_size=32, min_scale=0.5, gaussian_blur=0.0)
    images = FakeData(steps * batch_size, (3, 32, 32), transform=transform)  # or LightlyDataset
    trunk = torchvision.models.resnet18()
    trunk.fc = nn.Identity()
    encoder = nn.Sequential(trunk, MoCoProjectionHead(512, 512, 128))
    key_encoder = copy.deepcopy(encoder)
    deactivate_requires_grad(key_encoder)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.03, momentum=0.9)
    losses = []
    for (query_view, key_view), _ in DataLoader(images, batch_size):
        update_momentum(encoder, key_encoder, m=0.99)
        query, key = encoder(query_view), key_encoder(key_view)
        value = criterion(query, key)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def main(steps: int = 20, batch_size: int = 32) -> list[float]:
    """Train with mixing."""
    losses = train(Mixing(), steps, batch_size)
    print(f"loss with mixed negatives: {losses[0]:.2f} at first, {losses[-1]:.2f} at last")
    return losses


if __name__ == "__main__":
    tyro.cli(main)
