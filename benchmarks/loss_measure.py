"""One part of `benchmarks/loss.py`, measured in a process of its own.

`python benchmarks/loss_measure.py JOB`, where JOB is the JSON that `loss.py` makes. Lines that
say how far it is come first; the last line is the result, as JSON.

Every variant starts from the same raw query and key, normalises them, and ends with the gradient
of the query; the negatives have unit length already, as a queue's keys have.
"""

import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from hardmix import MemoryQueue, MochiLoss

DIM = 128
TEMPERATURE = 0.2
WARM_UPS = 4


class Shape(NamedTuple):
    """What is measured: batch, K, and MoCHi's N, s, s'."""

    batch: int
    num_negatives: int
    num_hardest: int
    num_pairs: int
    num_with_query: int


TINY = Shape(8, 64, 16, 16, 8)
"""Runs every line once, so that what libraries set up on first use is not counted as memory."""

Loss = Callable[[Tensor, Tensor], Tensor]
"""Raw query and key to the mean loss."""


def plain_moco(_: Shape, negatives: Tensor) -> Loss:
    """MoCo as it is usually written. Its layout, (dim, K) or (K, dim), made no difference."""

    def loss(query: Tensor, key: Tensor) -> Tensor:
        query, key = normalize(query, dim=1), normalize(key, dim=1)
        positive = torch.einsum("bd,bd->b", query, key).unsqueeze(1)
        real = torch.einsum("bd,kd->bk", query, negatives)
        return _label_zero(torch.cat([positive, real], dim=1) / TEMPERATURE)

    return loss


def materialised_mochi(shape: Shape, negatives: Tensor) -> Loss:
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


def _pair_points(shape: Shape, negatives: Tensor, hardest: Tensor) -> Tensor:
    size, device = (len(hardest), shape.num_pairs), hardest.device
    first = torch.randint(shape.num_hardest, size, device=device)
    offset = torch.randint(1, shape.num_hardest, size, device=device)
    second = (first + offset) % shape.num_hardest
    alpha = torch.rand(*size, 1, device=device)
    left = negatives[hardest.gather(1, first)]
    right = negatives[hardest.gather(1, second)]
    return normalize(alpha * left + (1 - alpha) * right, dim=-1)


def _query_points(shape: Shape, negatives: Tensor, hardest: Tensor, query: Tensor) -> Tensor:
    size, device = (len(hardest), shape.num_with_query), hardest.device
    which = torch.randint(shape.num_hardest, size, device=device)
    beta = 0.5 * torch.rand(*size, 1, device=device)
    chosen = negatives[hardest.gather(1, which)]
    return normalize(beta * query.unsqueeze(1) + (1 - beta) * chosen, dim=-1)


def _label_zero(logits: Tensor) -> Tensor:
    return cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=logits.device))


def lightly_bank(shape: Shape, negatives: Tensor) -> Loss:
    """Plain MoCo by lightly. Unlike the others it copies the bank and enqueues in each call."""
    from lightly.loss import NTXentLoss

    size = (shape.num_negatives, DIM)
    loss = NTXentLoss(temperature=TEMPERATURE, memory_bank_size=size).to(negatives.device)
    loss.memory_bank.bank.copy_(negatives)
    return loss


def hardmix_mochi(shape: Shape, negatives: Tensor) -> Loss:
    """Ours."""
    mochi = MochiLoss(*shape[2:], temperature=TEMPERATURE)
    memory = MemoryQueue.prefilled(negatives)
    return lambda query, key: mochi(query, key, memory)


def hardmix_moco(shape: Shape, negatives: Tensor) -> Loss:
    """Ours without synthetic points."""
    return hardmix_mochi(shape._replace(num_pairs=0, num_with_query=0), negatives)


VARIANTS: dict[str, Callable[[Shape, Tensor], Loss]] = {
    "plain_moco": plain_moco,
    "materialised": materialised_mochi,
    "lightly": lightly_bank,
    "hardmix": hardmix_mochi,
    "hardmix_moco": hardmix_moco,
}


def embeddings(shape: Shape, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Random query, key and unit negatives."""
    query = torch.randn(shape.batch, DIM, device=device, requires_grad=True)
    key = torch.randn(shape.batch, DIM, device=device)
    negatives = normalize(torch.randn(shape.num_negatives, DIM, device=device), dim=1)
    return query, key, negatives


def milliseconds(loss: Loss, query: Tensor, key: Tensor) -> tuple[float, float]:
    """How long forward and backward take, and the loss."""
    query.grad = None
    _synchronize(query)
    start = time.perf_counter()
    value = loss(query, key)
    value.backward()
    _synchronize(query)
    return 1000 * (time.perf_counter() - start), value.item()


def _synchronize(tensor: Tensor) -> None:
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)


def time_shape(shape: Shape, job: dict[str, Any], label: str) -> dict[str, Any]:
    """Milliseconds of each variant and round. Round by round, each time from another variant on."""
    query, key, negatives = embeddings(shape, job["device"])
    losses = {name: VARIANTS[name](shape, negatives) for name in job["variants"]}
    names = list(losses)
    values: dict[str, float] = {}
    for name in names * WARM_UPS:
        value = milliseconds(losses[name], query, key)[1]
        values.setdefault(name, value)  # the first: lightly's bank changes with every call
    times: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    busy, own, start = _busy_seconds(), time.process_time(), time.perf_counter()
    for number in range(job["rounds"]):
        print(f"{label}, round {number + 1} of {job['rounds']}", flush=True)
        first = number % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(milliseconds(losses[name], query, key)[0])
    gc.enable()
    others = None
    if busy is not None:
        theirs = (_busy_seconds() or 0.0) - busy - (time.process_time() - own)
        others = max(0.0, theirs) / (time.perf_counter() - start) / (os.cpu_count() or 1)
    return {"shape": shape, "loss": values, "milliseconds": times, "others_share": others}


def _busy_seconds() -> float | None:
    """Seconds all cores were busy for anybody, or were taken from a virtual machine."""
    file = Path("/proc/stat")
    if not file.exists():
        return None
    user, nice, system, _idle, _iowait, *rest = map(int, file.read_text().split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def run_times(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Every shape with every number of threads."""
    results = []
    # Before the threads are set: an import may set them too.
    for name in job["variants"]:
        VARIANTS[name](TINY, embeddings(TINY, job["device"])[2])
    for threads in job["threads"]:
        torch.set_num_threads(threads)
        for number, shape in enumerate(job["shapes"]):
            label = f"threads {threads}, shape {number + 1} of {len(job['shapes'])}"
            torch.manual_seed(job["seed"])
            timed = time_shape(Shape(*shape), job, label)
            results.append({"threads": torch.get_num_threads(), **timed})
    return results


def run_memory(job: dict[str, Any]) -> float:
    """MB that one variant takes at its peak beyond what is there before the call."""
    device, shape = job["device"], Shape(*job["shape"])
    torch.set_num_threads(job["threads"])
    torch.manual_seed(job["seed"])
    make = VARIANTS[job["variant"]]
    query, key, negatives = embeddings(TINY, device)
    make(TINY, negatives)(query, key).backward()
    query, key, negatives = embeddings(shape, device)
    loss = make(shape, negatives)
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        there = torch.cuda.memory_allocated()
        loss(query, key).backward()
        return (torch.cuda.max_memory_allocated() - there) / 2**20
    ctypes.CDLL(None).malloc_trim(0)  # free memory must not hide what the call takes
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM, the peak, back to VmRSS
    before = _status_mb("VmRSS")
    loss(query, key).backward()
    return _status_mb("VmHWM") - before


def _status_mb(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    result = run_memory(task) if task["kind"] == "memory" else run_times(task)
    print(json.dumps({"result": result}), flush=True)
