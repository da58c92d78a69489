"""SimCLR with mixed hard negatives: no queue, no second encoder, the batch itself is enough.

Each view is a query once. Its key is the image's other view, and the negatives are all other views
of the batch. Without points (num_pairs=0, num_with_query=0) this is SimCLR's loss.

python examples/simclr_in_batch.py [--steps 100] [--batch-size 128]
"""

import torch
import tyro
from torch import Tensor

from digits import build_encoder, found, read_digits, view
from hardmix import MochiLoss


def both_ways(loss: MochiLoss, first: Tensor, second: Tensor) -> Tensor:
    """Return the loss of two views' embeddings, each of which is a query for the other."""
    query, key = torch.cat([first, second]), torch.cat([second, first])
    # The negatives are the keys. The own key is left out already; here, the query itself.
    itself = torch.eye(len(query), dtype=torch.bool, device=query.device).roll(len(first), dims=1)
    return loss.in_batch(query, key, exclude=itself)


def main(steps: int = 100, batch_size: int = 128) -> tuple[float, float]:
    """Train; return how many views were found among others before and after."""
    torch.manual_seed(0)
    images, _ = read_digits()
    encoder = build_encoder()
    loss = MochiLoss(num_hardest=32, num_pairs=32, num_with_query=8, temperature=0.2)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-3)
    before = found(encoder)

    for _ in range(steps):
        batch = images[torch.randint(len(images), (batch_size,))]
        value = both_ways(loss, encoder(view(batch)), encoder(view(batch)))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()

    after = found(encoder)
    print(f"the other view found among 500: {before:.0%} before, {after:.0%} after {steps} steps")
    return before, after


if __name__ == "__main__":
    tyro.cli(main)
