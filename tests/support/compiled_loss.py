"""A program: MochiLoss as one graph, with every strategy and fill; raises unless it equals eager.

A program of its own, because the tests' type checks cannot be compiled.
"""

from functools import partial

import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import normalize

from hardmix import MemoryQueue, MochiLoss
from hardmix.losses import DENOMINATORS, FILTERS, WEIGHTS
from hardmix.methods.base import TrainingPosition
from hardmix.methods.mixing_schedule import MixingSchedule
from hardmix.methods.moco import _contrast
from hardmix.settings.config import MixConfig, PretrainConfig
from hardmix.strategies import STRATEGIES, plan_fixed_percentage

DATA = torch.Generator().manual_seed(0)
"""Generator of the data, apart from the loss's own: of equal keys either may rank first."""
SMALL = {"num_hardest": 20, "num_pairs": 30, "num_with_query": 10}


def data(rows: int) -> torch.Tensor:
    return torch.randn(rows, 16, generator=DATA)


def compare(loss: MochiLoss, compiled, negatives, **options) -> None:
    query, key = data(6).requires_grad_(), data(6)
    results = []
    for each in (compiled, loss):
        torch.manual_seed(1)  # the same random numbers
        value = each(query, key, negatives, **options)
        results.append([value, *torch.autograd.grad(value, query)])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def one_graph(loss: MochiLoss):
    """Return the function compiled as a whole, and a counter of graphs."""
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
    """Call the loss as the training step does, with numbers and progress, as one graph."""
    config = PretrainConfig(mix=MixConfig(**SMALL, **mix))
    schedule, memory = MixingSchedule(config), MemoryQueue(100, 16, start=start)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_contrast, fullgraph=True, backend=counter)
    shares = []
    for step in range(6):
        memory.enqueue(data(25 - step))
        at = TrainingPosition(step, epoch=step * config.train.epochs / 5)
        query, key = normalize(data(6), dim=1).requires_grad_(), normalize(data(6), dim=1)
        exclude, results = torch.rand(6, 100, generator=DATA) < 0.2, []
        for each in (compiled, _contrast):
            outcome, plan = each(
                schedule.loss,
                query,
                key,
                memory,
                exclude,
                mix=True,
                generator=schedule.generator(at),
                progress=schedule.progress(at.epoch),
            )
            gradient = torch.autograd.grad(outcome.loss, query)
            results.append([outcome.loss, outcome.real, *gradient, plan.base, plan.share])
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)
        shares.append(plan.share)
    assert all(not torch.equal(shares[0], each) for each in shares[1:]), "every step draws anew"
    assert counter.frame_count == 1, counter.frame_count


def curriculum() -> None:
    """Check a strategy that changes with progress: points appear in training, in one graph."""
    options = {"percentage": 0.0, "percentage_end": 100.0}
    strategy = partial(plan_fixed_percentage, **options)
    loss = MochiLoss(**SMALL, strategy=strategy)
    compiled, counter = one_graph(loss)
    for step in range(6):
        compare(loss, compiled, data(100), progress=torch.tensor([step / 5]))
    assert counter.frame_count == 1, counter.frame_count
    numbers = []
    for progress in (0.0, 0.5, 1.0):
        _, plan = loss.contrast(data(6), data(6), data(100), progress=progress)
        numbers.append(int((plan.base >= 0).sum()))
    assert numbers == sorted(set(numbers)), numbers


def family(**options: object) -> None:
    """Check weights, denominators and filters, with a learnt temperature and own negatives."""
    temperature = torch.nn.Parameter(torch.tensor(0.3))
    loss = MochiLoss(**SMALL, temperature=temperature, **options)
    compiled, counter = one_graph(loss)
    inputs = {"own_negatives": torch.randn(6, 3, 16, generator=DATA)}
    if options.get("denominator", "infonce") in ("infonce", "supcon-in"):
        inputs["positives"] = torch.rand(6, 100, generator=DATA) < 0.1
    compare(loss, compiled, data(100), **inputs)
    assert counter.frame_count == 1, counter.frame_count


if __name__ == "__main__":
    for each in DENOMINATORS:
        family(denominator=each)
    for each in WEIGHTS:
        family(weights=each, filter_negatives="share-of-positive")
    for each in FILTERS:
        family(filter_negatives=each)
    for start in ("random", "empty"):
        fills(start)
        training(start)
    training("random", strategy="softmax-sampled")
    training("empty", strategy="fixed-percentage", percentage=0.0, percentage_end=100.0)
    curriculum()
    for each in STRATEGIES:
        strategy(each)
