"""How long the loss takes, compared with plain MoCo and MoCHi as usually written.

Forward and backward, float32, once for each allocator, with 1 thread and with 2: limits are judged
with the first allocator and the most threads.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hardmix.bench.jobs import BenchJob, Row, Setup, Tell
from hardmix.bench.loss_variants import VARIANTS, Loss, LossShape, embeddings
from hardmix.bench.rounds import milliseconds, take_turns

WARM_UPS = 4
SMALL, LARGE = LossShape(128, 16384, 1024, 1024, 128), LossShape(256, 65536, 1024, 1024, 512)
"""Those of the paper's ImageNet-100 runs, and near its ImageNet-1k runs."""
TINY = LossShape(8, 64, 16, 16, 8)
"""For --quick, and to run every line once before memory is measured."""


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
    """A job of `measure`: these variants at these shapes, by name."""
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
