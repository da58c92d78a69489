"""Variants take turns in one process, so that ratios hold on a noisy machine."""

import gc
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from benchmarks.jobs import Row, Tell

Block = Callable[[], float]
"""A function that does a fixed amount of work, and returns the milliseconds it took."""


def take_turns(
    setting: str, blocks: Mapping[str, Block], rounds: int, tell: Tell, warm_ups: int = 1
) -> Row:
    """Run every variant once per round, each round starting with another one."""
    names = list(blocks)
    for name in names * warm_ups:
        blocks[name]()
    times: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    busy, own, start = _busy_seconds(), sum(os.times()[:4]), time.perf_counter()
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(blocks[name]())
        tell(f"{setting}, round {number + 1} of {rounds}")
    gc.enable()
    others = None
    if busy is not None:
        # os.times() counts only children that have ended: blocks end those that they start.
        foreign = (_busy_seconds() or 0.0) - busy - (sum(os.times()[:4]) - own)
        others = max(0.0, foreign) / (time.perf_counter() - start) / (os.cpu_count() or 1)
    return {
        "setting": setting,
        "threads": torch.get_num_threads(),
        "others_share": others,
        **summary(times),
    }


def summary(times: Mapping[str, list[float]]) -> Row:
    """Return medians, minima, and paired ratios of all variants, with the single times."""
    return {
        "milliseconds": dict(times),
        "median_ms": {name: statistics.median(values) for name, values in times.items()},
        "min_ms": {name: min(values) for name, values in times.items()},
        "ratio": {
            name: {other: paired_ratio(values, times[other]) for other in times}
            for name, values in times.items()
        },
    }


def paired_ratio(values: list[float], others: list[float]) -> dict[str, float]:
    """Return the ratio to another variant in the same round: median and quartiles."""
    ratios = [value / other for value, other in zip(values, others, strict=True)]
    if len(ratios) == 1:
        return dict.fromkeys(("low", "median", "high"), ratios[0])
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {"low": low, "median": middle, "high": high}


def milliseconds(work: Callable[[], object], device: str) -> float:
    """Return how long a call takes, until the device is done."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return 1000 * (time.perf_counter() - start)


def synchronize(device: str) -> None:
    """Wait for a GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def _busy_seconds() -> float | None:
    """Return the seconds that all cores were busy, or taken from a virtual machine."""
    file = Path("/proc/stat")
    if not file.exists():
        return None
    user, nice, system, _idle, _iowait, *rest = map(int, file.read_text().split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")
