"""Two towers, as in CLIP: one sees the left half of each digit, the other the right half.

python examples/two_towers.py [--steps 300]         # with open_clip: in place of its ClipLoss
"""

import torch
import tyro
from torch import nn
from torch.nn.functional import normalize

from digits import read_digits
from hardmix.integrations import TwoTowerLoss


def main(steps: int = 300, batch_size: int = 128, seed: int = 0) -> tuple[float, float]:
    """Train on 1500 digits; return how many other halves of 297 others were found."""
    torch.manual_seed(seed)
    halves = [half.flatten(1) for half in read_digits()[0].view(-1, 8, 8).chunk(2, dim=2)]
    towers = [nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in halves]
    loss = TwoTowerLoss(num_hardest=32, num_pairs=32, num_with_query=4)  # its scale is learnt
    optimizer = torch.optim.AdamW(nn.ModuleList([*towers, loss]).parameters(), lr=1e-3)
    shares = []
    for step in range(steps + 1):
        if step in (0, steps):
            left, right = (normalize(f(x[1500:])) for f, x in zip(towers, halves, strict=True))
            best = (left @ right.T).topk(10).indices
            shares.append((best == torch.arange(297)[:, None]).any(dim=1).float().mean().item())
        rows = torch.randint(1500, (batch_size,))
        value = loss(*(f(x[rows]) for f, x in zip(towers, halves, strict=True)))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    print("the other half among the first 10 of 297: {:.0%} before, {:.0%} after".format(*shares))
    return shares[0], shares[1]


if __name__ == "__main__":
    tyro.cli(main)
