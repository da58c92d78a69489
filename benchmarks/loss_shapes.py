"""Measures the loss at more shapes and in more ways than `python -m benchmarks loss`, as JSON.

PYTHONPATH=CHECKOUT/src python benchmarks/loss_shapes.py measures the code of any checkout; two of
them in turns, several times, show whether a change cost anything (results/versions.json). To keep
the heap as the benchmark does, set the MALLOC_ variables of jobs.py.
"""

import json
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from hardmix import MemoryQueue, MochiLoss

SHAPES = (
    (128, 16384, 1024, 1024, 128),
    (256, 65536, 1024, 1024, 512),
    (128, 4096, 256, 256, 32),
    (128, 2048, 128, 128, 16),
    (64, 512, 32, 32, 4),
    (256, 16384, 64, 64, 0),
)
"""Batch, K, N, s, s'."""
DIM = 128

Loss = Callable[[Tensor], Tensor]


def plain_moco(query: Tensor, key: Tensor, negatives: Tensor) -> Tensor:
    """Eq. 1 without points, as it is usually written."""
    query, key = normalize(query, dim=1), normalize(key, dim=1)
    positive = (query * key).sum(dim=1, keepdim=True)
    logits = torch.cat([positive, query @ negatives.T], dim=1) / 0.2
    return cross_entropy(logits, torch.zeros(len(query), dtype=torch.long))


def ways(batch: int, size: int, *counts: int) -> dict[str, Loss]:
    """Plain MoCo; MoCHi with a queue, a plain tensor, a mask; with its diagnostics."""
    key, negatives = torch.randn(batch, DIM), normalize(torch.randn(size, DIM))
    mochi, memory = MochiLoss(*counts), MemoryQueue.prefilled(negatives)
    exclude = torch.rand(batch, size) < 0.02
    return {
        "plain MoCo": lambda query: plain_moco(query, key, negatives),
        "queue": lambda query: mochi(query, key, memory),
        "tensor": lambda query: mochi(query, key, negatives),
        "contrast": lambda query: mochi.contrast(query, key, memory)[0].loss,
        "mask": lambda query: mochi(query, key, memory, exclude),
    }


def milliseconds(loss: Loss, query: Tensor) -> float:
    """Forward and backward, after one that does not count."""
    for _ in range(2):
        start = time.perf_counter()
        loss(query.clone().requires_grad_()).backward()
    return 1000 * (time.perf_counter() - start)


def main() -> None:
    """Print the median of each, all of a shape in turns."""
    torch.manual_seed(0)
    medians = {}
    for shape in SHAPES:
        query, losses = torch.randn(shape[0], DIM), ways(*shape)
        times: dict[str, list[float]] = {name: [] for name in losses}
        for _ in range(4 if shape[1] > 20000 else 12):
            for name, loss in losses.items():
                times[name].append(milliseconds(loss, query))
        label = "{} x {} ({}, {}, {})".format(*shape)
        medians[label] = {name: round(median(each), 2) for name, each in times.items()}
    print(json.dumps(medians, indent=1))


if __name__ == "__main__":
    main()
