"""A plain PyTorch loop with MochiLoss and MemoryQueue: MoCo with mixed hard negatives.

python examples/plain_pytorch.py [--steps 100] [--batch-size 64]
"""

import copy

import torch
import tyro

from digits import DIM, build_encoder, follow, found, read_digits, view
from hardmix import MemoryQueue, MochiLoss


def main(steps: int = 100, batch_size: int = 64, seed: int = 0) -> tuple[float, float]:
    """Train; return how many views were found among others before and after."""
    torch.manual_seed(seed)
    images, encoder = read_digits()[0], build_encoder()
    key_encoder = copy.deepcopy(encoder).requires_grad_(False)
    loss, memory = MochiLoss(128, 128, 16, temperature=0.2), MemoryQueue(size=1024, dim=DIM)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-3)
    before = found(encoder)
    for _ in range(steps):
        rows = torch.randint(len(images), (batch_size,))
        query = encoder(view(images[rows]))
        follow(key_encoder, encoder)  # slowly, by momentum; it gets no gradient
        key = key_encoder(view(images[rows]))
        optimizer.zero_grad()
        value = loss(query, key, memory, ids=rows)  # an older key of a digit is no negative of it
        value.backward()
        optimizer.step()
        memory.enqueue(key, ids=rows)  # after the loss: no key is its own negative
    after = found(encoder)
    print(f"the other view found among 500: {before:.0%} before, {after:.0%} after")
    return before, after


if __name__ == "__main__":
    tyro.cli(main)
