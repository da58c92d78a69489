"""Inputs of a method's loss, and a slow softmax to compare it with."""

import torch
from torch.nn.functional import log_softmax, normalize

from hardmix.data.batches import Batch
from hardmix.methods.base import TrainingPosition

AT = TrainingPosition(5, 1)


def unit(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return normalize(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1)


def batch_of(number=16, size=32, views=2):
    generator = torch.Generator().manual_seed(3)
    images = [torch.randn(number, 3, size, size, generator=generator) for _ in range(views)]
    return Batch(tuple(images), torch.arange(number) % 4, torch.arange(number) * 5)


def given_embeddings(monkeypatch, method, *outputs):
    """Let the method's networks return these, one call after the other."""
    calls = iter(outputs)
    monkeypatch.setattr(method, "network", lambda name: lambda *images: next(calls))


def slow_softmax(query, key, negatives, temperature, hidden=None):
    """Return -log softmax of the key among key and negatives, query by query."""
    losses = []
    for row in range(len(query)):
        own = [query[row] @ key[row] / temperature]
        for column in range(len(negatives)):
            if hidden is None or not hidden[row][column]:
                own.append(query[row] @ negatives[column] / temperature)
        losses.append(-log_softmax(torch.stack(own), dim=0)[0])
    return torch.stack(losses).mean()
