"""A program: MochiLoss as one graph, with every strategy and fill; raises unless it equals eager.

A program of its own, because the tests' type checks cannot be compiled.
"""

import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import normalize

from hardmix import STRATEGIES, MemoryQueue, MochiLoss
from hardmix.methods.base import TrainingPosition
from hardmix.methods.mixing_schedule import MixingSchedule
from hardmix.methods.moco import _contrast
from hardmix.settings.config import MixConfig, PretrainConfig

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


def training(start: str, **mix: object) -> None:
    """As the training step calls it: a loss and random numbers for each step, into one graph."""
    config = PretrainConfig(mix=MixConfig(**SMALL, **mix))
    schedule, memory = MixingSchedule(config), MemoryQueue(100, 16, start=start)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_contrast, fullgraph=True, backend=counter)
    seen = []
    for step in range(6):
        memory.enqueue(data(25 - step))
        at = TrainingPosition(step, epoch=step // 2)
        query, key = normalize(data(6), dim=1).requires_grad_(), normalize(data(6), dim=1)
        exclude, found = torch.rand(6, 100, generator=DATA) < 0.2, []
        for each in (compiled, _contrast):
            numbers = {"mix": True, "generator": schedule.generator(at)}
            outcome, plan = each(schedule.loss(at.epoch), query, key, memory, exclude, **numbers)
            gradient = torch.autograd.grad(outcome.loss, query)
            found.append([outcome.loss, outcome.real, *gradient, plan.base, plan.share])
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
        seen.append(plan.share)
    assert all(not torch.equal(seen[0], each) for each in seen[1:]), "draws of every step differ"
    assert counter.frame_count == 1, counter.frame_count


if __name__ == "__main__":
    for start in ("random", "empty"):
        fills(start)
        training(start)
    training("random", strategy="softmax-sampled")
    for each in STRATEGIES:
        strategy(each)
