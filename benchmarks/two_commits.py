"""Compares the loss of two checkouts: numbers, CPU time, memory.

    git worktree add ../before 463cbe3
    python benchmarks/two_commits.py ../before/src numbers      # losses and gradients in float64
    python benchmarks/two_commits.py ../before/src time         # in turns, one thread
    python benchmarks/two_commits.py ../before/src memory       # peak of a process for each

Both packages are imported into one process, one after the other, under the same name.
"""

import gc
import importlib
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

HERE = Path(__file__).resolve().parents[1] / "src"
COUNTS = {"num_hardest": 20, "num_pairs": 30, "num_with_query": 10}


def load(source: Path) -> ModuleType:
    """Import the package of a checkout, whatever was imported under its name before."""
    for name in [each for each in sys.modules if each.partition(".")[0] == "hardmix"]:
        del sys.modules[name]
    sys.path.insert(0, str(source))
    package = importlib.import_module("hardmix")
    for name in ("MochiLoss", "MemoryQueue"):
        getattr(package, name)
    losses = getattr(package, "losses", package)
    package.weighted_by = losses.hcl
    sys.path.pop(0)
    assert str(package.__file__).startswith(str(source)), package.__file__
    return package


def cases() -> dict[str, dict[str, Any]]:
    """Every strategy, weight, denominator and filter, with masks, own negatives and positives."""
    strategies = [
        *("mochi", "ranked-by-key", "mixed-with-key", "beta-weighted", "one-minus-beta-weighted"),
        *("log-beta-weighted", "softmax-sampled", "fixed-percentage", "synco", "mixcse"),
        *("feature-transformation", "extrapolated-positives", "mixed-queue"),
    ]
    made: dict[str, dict[str, Any]] = {}
    for name in strategies:
        for real in ("keep", "drop_hardest", "drop_all"):
            made[f"{name}, {real}"] = {"strategy": name, "real_negatives": real}
        made[f"{name}, through the query"] = {"strategy": name, "through_query": True}
    for denominator in ("infonce", "decoupled", "debiased", "hcl", "dual-temperature"):
        for weights in ("none", "hcl", "hardness", "ring"):
            for chosen in ("none", "above-positive", "share-of-positive"):
                made[f"{denominator}, {weights}, {chosen}"] = {
                    "denominator": denominator,
                    "weights": weights,
                    "filter_negatives": chosen,
                }
    return made


def numbers(before: ModuleType, after: ModuleType) -> None:
    """Print the largest difference of losses and gradients of query, key, negatives and tau."""
    worst: dict[str, float] = {}
    for name, options in cases().items():
        for call in ("plain", "masked", "own", "positives", "in_batch", "filling", "contrast"):
            if call == "positives" and options.get("denominator", "infonce") != "infonce":
                continue
            for seed in range(4):
                found = [_numbers(each, options, call, seed) for each in (before, after)]
                for one, two in zip(*found, strict=True):
                    scale = one.abs().max().clamp(min=1)
                    difference = float((one - two).abs().max() / scale)
                    if not torch.equal(one.isnan(), two.isnan()):
                        difference = float("inf")
                    worst[f"{name}; {call}"] = max(worst.get(f"{name}; {call}", 0), difference)
    for name, difference in sorted(worst.items(), key=lambda each: -each[1])[:25]:
        print(f"{difference:.1e}  {name}")
    print(f"{len(worst)} cases, largest difference {max(worst.values()):.1e}")


def _numbers(
    package: ModuleType, options: dict[str, Any], call: str, seed: int
) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    batch, width, dim = 6, 60, 12
    query, key = (torch.randn(batch, dim, dtype=torch.float64) for _ in range(2))
    negatives = torch.randn(width, dim, dtype=torch.float64)
    own = torch.randn(batch, 4, dim, dtype=torch.float64)
    exclude, positives = torch.rand(batch, width) < 0.3, torch.rand(batch, width) < 0.1
    tau = torch.tensor(0.25, dtype=torch.float64)
    inputs = [each.requires_grad_() for each in (query, key, negatives, own, tau)]
    loss = package.MochiLoss(**COUNTS, temperature=tau, **options)
    more: dict[str, Any] = {"generator": torch.Generator().manual_seed(seed)}
    if call == "in_batch":
        value = loss.in_batch(query, key, reduction="none", **more)
    else:
        if call == "masked":
            more["exclude"] = exclude
        if call == "own":
            more |= {"own_negatives": own, "exclude": exclude}
        if call == "positives":
            more["positives"] = positives
        bank = negatives
        if call == "filling":
            bank = package.MemoryQueue(width, dim, generator=torch.Generator().manual_seed(1))
            bank = bank.double()
            bank.enqueue(negatives.detach()[:15])
        if call == "contrast":
            outcome, _ = loss.contrast(query, key, bank, **more)
            value = outcome.per_query
        else:
            value = loss(query, key, bank, reduction="none", **more)
    gradients = torch.autograd.grad(
        (value * torch.arange(1.0, batch + 1)).sum(), inputs, allow_unused=True
    )
    return [value.detach(), *(torch.zeros(()) if each is None else each for each in gradients)]


SHAPES = {"128 x 16384": (128, 16384, 3), "256 x 65536": (256, 65536, 1), "64 x 512": (64, 512, 50)}
MEMBERS: dict[str, dict[str, Any]] = {
    "MoCHi": {},
    "plain MoCo": {"points": False},
    "decoupled": {"denominator": "decoupled"},
    "debiased": {"denominator": "debiased"},
    "hcl": {"denominator": "hcl"},
    "hcl, beta 2": {"beta": 2.0},
    "dual temperature": {"denominator": "dual-temperature"},
    "hcl weights": {"weights": "hcl"},
    "hardness weights": {"weights": "hardness"},
    "ring weights": {"weights": "ring"},
    "above-positive": {"filter_negatives": "above-positive"},
    "share-of-positive": {"filter_negatives": "share-of-positive"},
    "mixed with the key": {"strategy": "mixed-with-key"},
    "SynCo": {"strategy": "synco"},
    "learnt temperature": {"learnt": True},
    "own negatives": {"own": True},
    "SupCon, out": {"positives": True},
    "SupCon, in": {"positives": True, "denominator": "supcon-in"},
    "mask": {"masked": True},
    "in the batch": {"in_batch": True},
    "through the query": {"through_query": True},
    "with similarities": {"kept": True},
}


def member(package: ModuleType, shape: str, name: str) -> Any:
    """Return a step of one member of the family: forward and backward."""
    batch, width, _ = SHAPES[shape]
    torch.manual_seed(0)
    query, key = torch.randn(batch, 128, requires_grad=True), torch.randn(batch, 128)
    memory = package.MemoryQueue.prefilled(torch.randn(width, 128))
    options, more = dict(MEMBERS[name]), {}
    counts = (64, 64, 16) if width == 512 else (1024, 1024, 128)
    if not options.pop("points", True):
        counts = counts[0], 0, 0
    tau = torch.nn.Parameter(torch.tensor(0.2)) if options.pop("learnt", False) else 0.2
    if options.pop("own", False):
        more["own_negatives"] = torch.randn(batch, 8, 128)
    if options.pop("positives", False):
        more["positives"] = torch.rand(batch, width) < 0.01
    if options.pop("masked", False):
        more["exclude"] = torch.rand(batch, width) < 0.01
    in_batch, kept = options.pop("in_batch", False), options.pop("kept", False)
    if "beta" in options:
        options["denominator"] = package.weighted_by(options.pop("beta"))
    loss = package.MochiLoss(*counts, tau, **options)
    if in_batch:
        number = 256 if width == 512 else 1024
        first, second = (torch.randn(number, 128, requires_grad=True) for _ in range(2))
        return lambda: loss.in_batch(first, second).backward()
    if kept:
        return lambda: loss.contrast(query, key, memory, **more)[0].loss.backward()
    return lambda: loss(query, key, memory, **more).backward()


def times(before: ModuleType, after: ModuleType, rounds: int = 7) -> None:
    """Print CPU time after over before: the median of ratios of rounds that alternate."""
    torch.set_num_threads(1)
    for shape, (*_, number) in SHAPES.items():
        for name in MEMBERS:
            if sys.argv[3:] and shape not in sys.argv[3:] and name not in sys.argv[3:]:
                continue
            if shape == "256 x 65536" and name not in ("MoCHi", "plain MoCo", "hcl", "mask"):
                continue
            steps = [member(each, shape, name) for each in (before, after)]
            for each in steps:
                each()
            ratios, best = [], [float("inf")] * 2
            for _ in range(rounds):
                taken = []
                for which, each in enumerate(steps):
                    start = time.process_time()
                    for _ in range(number):
                        each()
                    taken.append((time.process_time() - start) / number)
                    best[which] = min(best[which], taken[-1])
                ratios.append(taken[1] / taken[0])
            ratio = sorted(ratios)[rounds // 2]
            low = best[1] / best[0]
            print(
                f"{shape:12} {name:20} {1000 * best[0]:8.2f} {1000 * best[1]:8.2f} ms,"
                f" ratio {ratio:.3f}, of the best {low:.3f}",
                flush=True,
            )


ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "0",
    "MALLOC_ARENA_MAX": "1",
}
"""Make glibc return freed memory at once, so that the peak is the memory in use."""


def memory(before: Path, after: Path) -> None:
    """Print the peak memory of three steps, before, after and as a ratio (Linux)."""
    for shape, name in itertools.product(SHAPES, ("MoCHi", "plain MoCo", "hcl", "mask")):
        peaks = []
        for source in (before, after):
            words = [sys.executable, __file__, str(source), "peak", shape, name]
            done = subprocess.run(
                words, capture_output=True, text=True, check=True, env=os.environ | ALLOCATOR
            )
            peaks.append(json.loads(done.stdout))
        first, second = peaks
        print(f"{shape:12} {name:12} {first:7.1f} and {second:7.1f} MB, {second / first:.2f}")


def peak(source: Path, shape: str, name: str) -> None:
    """Print what three steps add at most to the memory in use before them, in MB."""
    torch.set_num_threads(1)
    step = member(load(source), shape, name)
    step()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    start = _in_use("VmRSS")
    for _ in range(3):
        step()
    print(_in_use("VmHWM") - start)


def _in_use(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


if __name__ == "__main__":
    other, what = Path(sys.argv[1]).resolve(), sys.argv[2]
    if what == "peak":
        peak(other, sys.argv[3], sys.argv[4])
    elif what == "memory":
        memory(other, HERE)
    else:
        both = load(other), load(HERE)
        numbers(*both) if what == "numbers" else times(*both)
