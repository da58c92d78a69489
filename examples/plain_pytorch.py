"""A plain PyTorch loop with MochiLoss and MemoryQueue: MoCo with mixed hard negatives.

python examples/plain_pytorch.py [--steps 100] [--batch-size 64]
"""

import copy

import torch
import tyro

from digits import DIM, build_encoder, found, read_digits, view
from hardmix import MemoryQueue, MochiLoss


def main(steps: int = 100, batch_size: int = 64) -> tuple[float, float]:
    """Train; return how many views were found among others before and after."""
    torch.manual_seed(0)
    images, _ = read_digits()
    encoder = build_encoder()
    key_encoder = copy.deepcopy(encoder).requires_grad_(False)
    loss = MochiLoss(num_hardest=128, num_pairs=128, num_with_query=16, temperature=0.2)
    memory = MemoryQueue(size=1024, dim=DIM)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-3)
    before = found(encoder)

    for _ in range(steps):
        batch = images[torch.randint(len(images), (batch_size,))]
        query = encoder(view(batch))
        with torch.no_grad():  # the key encoder follows the query encoder slowly: by momentum
            pairs = zip(key_encoder.parameters(), encoder.parameters(), strict=True)
            for slow, fast in pairs:
                slow.lerp_(fast, 0.05)
            key = key_encoder(view(batch))
        value = loss(query, key, memory)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        memory.enqueue(key)  # after the loss: no key is its own negative

    after = found(encoder)
    print(f"the other view found among 500: {before:.0%} before, {after:.0%} after {steps} steps")
    return before, after


if __name__ == "__main__":
    tyro.cli(main)
