"""lightly's MoCo with mixed hard negatives: one import is changed, and counts are added.

python examples/lightly_moco.py [--steps 100] [--batch-size 64]
"""

import copy

import torch
import tyro
from lightly.models.utils import deactivate_requires_grad, update_momentum

from digits import DIM, build_encoder, found, read_digits, view
from hardmix.integrations import NTXentLoss  # in place of lightly.loss's


def main(steps: int = 100, batch_size: int = 64) -> tuple[float, float]:
    """Train; return how many views were found among others before and after."""
    torch.manual_seed(0)
    images, encoder = read_digits()[0], build_encoder()
    key_encoder = copy.deepcopy(encoder)
    deactivate_requires_grad(key_encoder)
    criterion = NTXentLoss(0.2, (1024, DIM), num_hardest=128, num_pairs=128, num_with_query=16)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-3)
    before = found(encoder)
    for _ in range(steps):
        batch = images[torch.randint(len(images), (batch_size,))]
        update_momentum(encoder, key_encoder, m=0.95)
        loss = criterion(encoder(view(batch)), key_encoder(view(batch)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = found(encoder)
    print(f"the other view found among 500: {before:.0%} before, {after:.0%} after {steps} steps")
    return before, after


if __name__ == "__main__":
    tyro.cli(main)
