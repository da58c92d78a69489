"""lightly's MoCo with hard negative mixing: its NTXentLoss is replaced, and nothing else.

Both losses see the same projections and the same queue, so that they can be compared; yours keeps
the second. With `--num-pairs 0 --num-with-query 0` they are the same number at every step.

python examples/lightly_moco.py [--steps 10] [--folder IMAGES] [--num-pairs 64]
"""

import copy
from itertools import islice

import torch
import torchvision
import tyro
from lightly.loss import NTXentLoss
from lightly.models.modules import MoCoProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.transforms import MoCoV2Transform
from torch import nn
from torch.utils.data import DataLoader
from torchvision.datasets import FakeData, ImageFolder

from hardmix import MemoryQueue, MochiLoss


def main(
    steps: int = 10,
    batch_size: int = 16,
    folder: str | None = None,
    num_pairs: int = 64,
    num_with_query: int = 16,
) -> list[tuple[float, float]]:
    """Train on images in class folders, or on noise; return lightly's and our loss of each step."""
    torch.manual_seed(0)
    transform = MoCoV2Transform(input_size=32, gaussian_blur=0.0)
    noise = FakeData(steps * batch_size, (3, 32, 32), transform=transform)
    images = ImageFolder(folder, transform) if folder else noise
    loader = DataLoader(images, batch_size, shuffle=True, drop_last=True)
    trunk = torchvision.models.resnet18()
    trunk.fc = nn.Identity()
    encoder = nn.Sequential(trunk, MoCoProjectionHead(512, 512, 128))
    key_encoder = copy.deepcopy(encoder)
    deactivate_requires_grad(key_encoder)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.03, momentum=0.9)

    before = NTXentLoss(temperature=0.2, memory_bank_size=(256, 128))
    loss = MochiLoss(64, num_pairs, num_with_query, temperature=0.2)
    memory = MemoryQueue(size=256, dim=128)
    memory.keys.copy_(before.memory_bank.bank)  # only to compare: both begin with the same noise
    losses = []
    for (query_view, key_view), _ in islice(loader, steps):
        update_momentum(encoder, key_encoder, m=0.99)
        query, key = encoder(query_view), key_encoder(key_view)
        value = loss(query, key, memory)
        memory.enqueue(key)  # lightly's loss does this inside
        losses.append((before(query, key).item(), value.item()))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()

    theirs, ours = losses[-1]
    print(f"step {len(losses)}: lightly's NTXentLoss {theirs:.4f}, MochiLoss {ours:.4f}")
    return losses


if __name__ == "__main__":
    tyro.cli(main)
