"""A program: MochiLoss as one graph, with every strategy and fill; raises unless it equals eager.

A program of its own, because the tests' type checks cannot be compiled.
"""

import torch
from torch._dynamo.testing import CompileCounterWithBackend

from hardmix import STRATEGIES, MemoryQueue, MochiLoss

DATA = torch.Generator().manual_seed(0)
"""Apart from the loss's own random numbers: of equal keys either may be ranked first."""
SMALL = {"num_hardest": 20, "num_pairs": 30, "num_with_query": 10}


def data(rows: int) -> torch.Tensor:
    return torch.randn(rows, 16, generator=DATA)


def compare(loss: MochiLoss, compiled, negatives, **options) -> None:
    query, key = data(6).requires_grad_(), data(6)
    found = []
    for each in (compiled, loss):
        torch.manual_seed(1)  # the same random numbers
        value = each(query, key, negatives, **options)
        found.append([value, *torch.autograd.grad(value, query)])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def one_graph(loss: MochiLoss):
    """Compiled as a whole or not at all, and a counter of graphs."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(loss, fullgraph=True, backend=counter), counter


def fills(start: str) -> None:
    loss, memory = MochiLoss(**SMALL), MemoryQueue(100, 16, start=start)
    compiled, counter = one_graph(loss)
    for step in range(6):
        memory.enqueue(data(25 - step))
        compare(loss, compiled, memory)
    assert memory.unfilled() is None
    assert counter.frame_count == 1, counter.frame_count


def strategy(name: str) -> None:
    loss = MochiLoss(**SMALL, strategy=name, real_negatives="drop_hardest")
    compiled, counter = one_graph(loss)
    exclude = torch.rand(6, 100, generator=DATA) < 0.2
    compare(loss, compiled, data(100), exclude=exclude)
    assert counter.frame_count == 1, counter.frame_count


if __name__ == "__main__":
    for start in ("random", "empty"):
        fills(start)
    for each in STRATEGIES:
        strategy(each)
