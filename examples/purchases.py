"""Data of recommender.py: generated purchases of users with a few tastes each."""

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

USERS, ITEMS, TASTES = 400, 500, 20


def shop() -> tuple[Tensor, Tensor, Tensor]:
    """Return pairs (user, item) to train on, pairs held out, and a mask of what users have."""
    generator = torch.Generator().manual_seed(0)
    tastes = torch.rand(USERS, TASTES, generator=generator).argsort(dim=1)[:, :3]
    likes = (tastes.unsqueeze(2) == torch.arange(ITEMS) % TASTES).any(dim=1)
    popularity = 1 / torch.arange(1.0, ITEMS + 1) ** 0.5
    bought = torch.multinomial((likes + 0.01) * popularity, 30, generator=generator)
    pairs = torch.stack([torch.arange(USERS).repeat_interleave(30), bought.flatten()], dim=1)
    held_out = torch.arange(len(pairs)) % 30 >= 25
    seen = torch.zeros(USERS, ITEMS, dtype=torch.bool)
    train = pairs[~held_out]
    seen[train[:, 0], train[:, 1]] = True
    return train, pairs[held_out], seen


def recall(users: nn.Embedding, items: nn.Embedding, held_out: Tensor, seen: Tensor) -> float:
    """Return the share of held-out purchases among each user's first 20 items not yet bought."""
    with torch.no_grad():
        scores = normalize(users.weight) @ normalize(items.weight).T
    first = scores.masked_fill(seen, -2).topk(20).indices
    user, item = held_out.T
    return float((first[user] == item.unsqueeze(1)).any(dim=1).float().mean())
