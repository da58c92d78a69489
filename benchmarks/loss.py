"""Measures the time of the loss, compared with plain MoCo and MoCHi as usually written.

Forward and backward, float32, once for each allocator, with 1 thread and with 2: limits are judged
with the first allocator and the most threads. Every variant starts from the same raw query and key,
normalises them, and ends with the gradient of the query; the negatives have unit length already, as
a queue's keys have.
"""

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from benchmarks.jobs import BenchJob, Row, Setup, Tell
from benchmarks.rounds import milliseconds, take_turns
from hardmix.mixing.loss import MochiLoss
from hardmix.mixing.queue import MemoryQueue

DIM = 128
TEMPERATURE = 0.2
WARM_UPS = 4


class LossShape(NamedTuple):
    """Sizes of a measurement: batch, K, and MoCHi's N, s, s'."""

    batch: int
    num_negatives: int
    num_hardest: int
    num_pairs: int
    num_with_query: int


SMALL, LARGE = LossShape(128, 16384, 1024, 1024, 128), LossShape(256, 65536, 1024, 1024, 512)
"""The shapes of the paper's ImageNet-100 runs, and shapes near those of its ImageNet-1k runs."""
TINY = LossShape(8, 64, 16, 16, 8)
"""Shape for --quick, and to run every line once before memory is measured."""

Loss = Callable[[Tensor, Tensor], Tensor]
"""Raw query and key to the mean loss."""


# -- variants


def plain_moco(_: LossShape, negatives: Tensor) -> Loss:
    """MoCo as it is usually written. Its layout, (dim, K) or (K, dim), made no difference."""

    def loss(query: Tensor, key: Tensor) -> Tensor:
        query, key = normalize(query, dim=1), normalize(key, dim=1)
        positive = torch.einsum("bd,bd->b", query, key).unsqueeze(1)
        real = torch.einsum("bd,kd->bk", query, negatives)
        return _label_zero(torch.cat([positive, real], dim=1) / TEMPERATURE)

    return loss


def materialised_mochi(shape: LossShape, negatives: Tensor) -> Loss:
    """MoCHi as it is usually written: every synthetic point is a vector, detached."""

    def loss(query: Tensor, key: Tensor) -> Tensor:
        query, key = normalize(query, dim=1), normalize(key, dim=1)
        positive = torch.einsum("bd,bd->b", query, key).unsqueeze(1)
        real = torch.einsum("bd,kd->bk", query, negatives)
        with torch.no_grad():
            hardest = real.topk(shape.num_hardest, dim=1).indices
            pairs = _pair_points(shape, negatives, hardest)
            with_query = _query_points(shape, negatives, hardest, query)
            points = torch.cat([pairs, with_query], dim=1)
        synthetic = torch.einsum("bd,bsd->bs", query, points)
        return _label_zero(torch.cat([positive, real, synthetic], dim=1) / TEMPERATURE)

    return loss


def _pair_points(shape: LossShape, negatives: Tensor, hardest: Tensor) -> Tensor:
    size, device = (len(hardest), shape.num_pairs), hardest.device
    first = torch.randint(shape.num_hardest, size, device=device)
    offset = torch.randint(1, shape.num_hardest, size, device=device)
    second = (first + offset) % shape.num_hardest
    alpha = torch.rand(*size, 1, device=device)
    left = negatives[hardest.gather(1, first)]
    right = negatives[hardest.gather(1, second)]
    return normalize(alpha * left + (1 - alpha) * right, dim=-1)


def _query_points(shape: LossShape, negatives: Tensor, hardest: Tensor, query: Tensor) -> Tensor:
    size, device = (len(hardest), shape.num_with_query), hardest.device
    ranks = torch.randint(shape.num_hardest, size, device=device)
    beta = 0.5 * torch.rand(*size, 1, device=device)
    chosen = negatives[hardest.gather(1, ranks)]
    return normalize(beta * query.unsqueeze(1) + (1 - beta) * chosen, dim=-1)


def _label_zero(logits: Tensor) -> Tensor:
    return cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=logits.device))


def lightly_bank(shape: LossShape, negatives: Tensor) -> Loss:
    """Plain MoCo by lightly. Unlike the others it copies the bank and enqueues in each call."""
    size = (shape.num_negatives, DIM)
    make = import_module("lightly.loss").NTXentLoss
    loss = make(temperature=TEMPERATURE, memory_bank_size=size).to(negatives.device)
    loss.memory_bank.bank.copy_(negatives)
    return cast("Loss", loss)


def hardmix_mochi(shape: LossShape, negatives: Tensor) -> Loss:
    """Return the loss of hardmix with a queue."""
    mochi = MochiLoss(*shape[2:], temperature=TEMPERATURE)
    memory = MemoryQueue.prefilled(negatives)
    return lambda query, key: mochi(query, key, memory)


def hardmix_tensor(shape: LossShape, negatives: Tensor) -> Loss:
    """Return the loss of hardmix with a plain tensor, whose vectors it must normalise itself."""
    mochi = MochiLoss(*shape[2:], temperature=TEMPERATURE)
    return lambda query, key: mochi(query, key, negatives)


def hardmix_moco(shape: LossShape, negatives: Tensor) -> Loss:
    """Return the loss of hardmix without synthetic points."""
    return hardmix_mochi(shape._replace(num_pairs=0, num_with_query=0), negatives)


VARIANTS: dict[str, Callable[[LossShape, Tensor], Loss]] = {
    "plain_moco": plain_moco,
    "materialised": materialised_mochi,
    "lightly": lightly_bank,
    "hardmix": hardmix_mochi,
    "hardmix_tensor": hardmix_tensor,
    "hardmix_moco": hardmix_moco,
}


def embeddings(
    shape: LossShape, device: str
) -> tuple[Float[Tensor, "batch dim"], Float[Tensor, "batch dim"], Float[Tensor, "K dim"]]:
    """Random query, key and unit negatives."""
    query = torch.randn(shape.batch, DIM, device=device, requires_grad=True)
    key = torch.randn(shape.batch, DIM, device=device)
    negatives = normalize(torch.randn(shape.num_negatives, DIM, device=device), dim=1)
    return query, key, negatives


# -- measuring


def label(shape: Sequence[int]) -> str:
    """Return a shape as text: batch x K (N, s, s')."""
    batch, negatives, *mochi = shape
    return f"{batch} x {negatives} ({', '.join(map(str, mochi))})"


def shapes(setup: Setup) -> list[LossShape]:
    """Return the shapes to measure the loss at."""
    return [TINY] if setup.quick else [SMALL, LARGE]


def thread_counts(setup: Setup) -> list[int]:
    """Return the numbers of threads: 1 and 2 on a CPU."""
    return sorted({1, min(2, setup.cores)}) if setup.device == "cpu" else [1]


def plan(setup: Setup) -> list[BenchJob]:
    """Every variant at every shape, once for each allocator."""
    variants = [name for name in VARIANTS if setup.lightly or name != "lightly"]
    items = {label(shape): shape for shape in shapes(setup)}
    threads = thread_counts(setup)
    return [
        loss_job(f"loss, allocator {name}", setup, variants, items, setup.rounds, threads, name)
        for name in setup.allocators
    ]


def loss_job(
    title: str,
    setup: Setup,
    variants: list[str],
    items: dict[str, LossShape],
    rounds: int,
    threads: list[int],
    allocator: str,
) -> BenchJob:
    """Return a job of `measure`: these variants at these shapes, by name."""
    settings = {
        **setup.common,
        "rounds": rounds,
        "variants": variants,
        "items": items,
        "threads": threads,
        "allocator": allocator,
        "judged_threads": threads[-1] if allocator == setup.allocators[0] else None,
    }
    turns = rounds * len(items) * len(threads)
    return BenchJob(title=title, kind="loss", settings=settings, turns=turns, allocator=allocator)


def measure(settings: dict[str, Any], tell: Tell) -> list[Row]:
    """Every shape with every number of threads."""
    rows, before = [], torch.get_num_threads()
    for threads in settings["threads"]:
        torch.set_num_threads(threads)
        for name, shape in settings["items"].items():
            torch.manual_seed(settings["seed"])
            row = _measure_shape(name, LossShape(*shape), settings, tell)
            judged = threads == settings["judged_threads"]
            rows.append({**row, "allocator": settings["allocator"], "judged": judged})
    torch.set_num_threads(before)
    return rows


def _measure_shape(name: str, shape: LossShape, settings: dict[str, Any], tell: Tell) -> Row:
    device = settings["device"]
    query, key, negatives = embeddings(shape, device)
    losses = {each: VARIANTS[each](shape, negatives) for each in settings["variants"]}
    # Before the turns: lightly's bank changes with every call.
    values = {each: _step(loss, query, key).item() for each, loss in losses.items()}
    blocks = {
        each: partial(milliseconds, partial(_step, loss, query, key), device)
        for each, loss in losses.items()
    }
    row = take_turns(name, blocks, settings["rounds"], tell, WARM_UPS)
    return {**row, "loss": values}


def _step(loss: Loss, query: Tensor, key: Tensor) -> Tensor:
    """Forward and backward."""
    query.grad = None
    value = loss(query, key)
    value.backward()
    return value.detach()
