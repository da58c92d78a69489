"""Peak memory of the loss and of the whole step, compared with other libraries.

Each variant runs in a fresh process, which has no memory to reuse, with the default allocator. On a
CPU, it is the resident memory reported by Linux; on a GPU, what torch has allocated.
"""

import ctypes
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks import loss, steps
from benchmarks.jobs import BenchJob, Row, Setup, Tell
from benchmarks.loss import VARIANTS, LossShape, embeddings
from benchmarks.rounds import paired_ratio
from benchmarks.steps import TINY, StepSize, build_step, random_batch, variants

LOSSES = ("plain_moco", "materialised", "hardmix")
STEPS = 2
"""Steps to measure; the second has the momentum buffers that the first creates."""


def can_measure(device: str) -> bool:
    """Return whether peak memory can be measured; on a CPU, only on Linux."""
    return device == "cuda" or sys.platform == "linux"


def plan(setup: Setup) -> list[BenchJob]:
    """Return a process for each variant at each shape or size."""
    if not can_measure(setup.device):
        return []
    threads = loss.thread_counts(setup)[-1]
    jobs = [
        _job(
            setup,
            "loss-memory",
            name,
            loss.label(shape),
            {"shape": shape, "threads": threads},
        )
        for shape in loss.shapes(setup)
        for name in LOSSES
    ]
    jobs += [
        _job(setup, "step-memory", name, steps.label(size), {"size": size})
        for size in steps.sizes(setup)
        for name in variants(setup.precisions, setup.lightly)
    ]
    return jobs


def _job(setup: Setup, kind: str, variant: str, setting: str, more: dict[str, Any]) -> BenchJob:
    what = kind.removesuffix("-memory")
    settings = {**setup.common, **more, "variant": variant, "setting": f"{what} {setting}"}
    return BenchJob(
        title=f"memory of {variant}, {what} {setting}", kind=kind, settings=settings, turns=1
    )


PAGE_MB = 4 / 1024
"""The smallest amount that can be measured."""


def measure_loss(settings: dict[str, Any], tell: Tell) -> list[Row]:
    """Measure the MB that a variant's forward and backward passes add."""
    device, make = settings["device"], VARIANTS[settings["variant"]]
    torch.set_num_threads(settings["threads"])
    torch.manual_seed(settings["seed"])
    query, key, negatives = embeddings(loss.TINY, device)
    make(loss.TINY, negatives)(query, key).backward()
    shape = LossShape(*settings["shape"])
    query, key, negatives = embeddings(shape, device)
    variant = make(shape, negatives)
    return [_row(settings, peak_mb(lambda: variant(query, key).backward(), device), tell)]


def measure_step(settings: dict[str, Any], tell: Tell) -> list[Row]:
    """Measure the MB of training at its peak: networks, gradients, momentum, queue, activations."""
    device, variant, size = settings["device"], settings["variant"], StepSize(*settings["size"])
    with TemporaryDirectory() as folder:

        def train(size: StepSize) -> None:
            batch = random_batch(size, device)
            take_step = build_step(variant, size, device, Path(folder))
            for _ in range(STEPS):
                take_step(batch)

        train(TINY)
        return [_row(settings, peak_mb(lambda: train(size), device), tell)]


def _row(settings: dict[str, Any], peak: float, tell: Tell) -> Row:
    tell(f"{peak:.0f} MB")
    return {"setting": settings["setting"], "peak_mb": {settings["variant"]: peak}}


def peak_mb(call: Callable[[], object], device: str) -> float:
    """Return the peak MB that a call adds."""
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        there = torch.cuda.memory_allocated()
        call()
        return (torch.cuda.max_memory_allocated() - there) / 2**20
    ctypes.CDLL(None).malloc_trim(0)  # free memory must not hide what the call takes
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM, the peak, back to VmRSS
    before = _status_mb("VmRSS")
    call()
    return max(PAGE_MB, _status_mb("VmHWM") - before)


def _status_mb(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def combine(rows: list[Row]) -> list[Row]:
    """Combine the variants' rows of a setting to one, with their ratios."""
    peaks: dict[str, dict[str, float]] = {}
    for row in rows:
        peaks.setdefault(row["setting"], {}).update(row["peak_mb"])
    return [
        {
            "setting": setting,
            "judged": True,
            "peak_mb": peak,
            "ratio": {
                name: {other: paired_ratio([mb], [peak[other]]) for other in peak}
                for name, mb in peak.items()
            },
        }
        for setting, peak in peaks.items()
    ]
