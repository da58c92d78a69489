"""A recommender: users and items as two towers, with the items a user has seen left out.

python examples/recommender.py [--steps 400]
"""

import torch
import tyro
from torch import nn

from hardmix import MochiLoss
from hardmix.losses import logq_weights
from purchases import recall, shop


def main(steps: int = 400, batch_size: int = 256, seed: int = 0) -> tuple[float, float]:
    """Train on purchases; return the recall of others among the first 20 before and after."""
    torch.manual_seed(seed)
    pairs, held_out, seen = shop()  # your own here: (user, item), and which items a user has
    users, items = (nn.Embedding(number, 32) for number in seen.shape)
    popularity = pairs[:, 1].bincount(minlength=len(seen[0])).clamp(min=1) / len(pairs)
    loss = MochiLoss(1, 0, 0, temperature=0.1, weights=logq_weights(popularity.log()))
    optimizer = torch.optim.AdamW(nn.ModuleList([users, items]).parameters(), lr=1e-2)
    before = recall(users, items, held_out, seen)
    for _ in range(steps):
        user, item = pairs[torch.randint(len(pairs), (batch_size,))].T
        # No negative is the same item (ids), or another item that this user has bought (exclude).
        value = loss.in_batch(users(user), items(item), seen[user][:, item], ids=item)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    after = recall(users, items, held_out, seen)
    print(f"recall of other purchases at 20 items: {before:.1%} before, {after:.1%} after")
    return before, after


if __name__ == "__main__":
    tyro.cli(main)
