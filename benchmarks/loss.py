"""How long the loss takes, and how much memory, beside plain MoCo and MoCHi as usually written.

`python benchmarks/loss.py [--out FILE.json] [--rounds 15] [--quick] [--device cpu|cuda]`

Forward and backward, float32. Variants take turns round by round in one process, and ratios are
medians over the rounds: that is what stays true on a noisy machine. Limits are judged with 2
threads and the allocator set to "heap": by default glibc gives large blocks back after each use,
and page faults, more than arithmetic, make up the time of whoever allocates most.
"""

import argparse
import datetime
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.status import Status

from loss_report import show, summary

HERE = Path(__file__).parent
SEED = 0
SHAPES = [(128, 16384, 1024, 1024, 128), (256, 65536, 1024, 1024, 512)]
"""Batch, K, N, s, s'."""
BASE = {"batch": 64, "K": 16384, "N": 1024, "s": 1024, "s'": 128}
GROWTH = {
    "K": [4096, 16384, 65536, 131072],
    "N": [64, 256, 1024, 4096],
    "s": [0, 256, 1024, 4096],
    "s'": [0, 128, 512, 1024],
    "batch": [16, 64, 256],
}
GROWTH_ROUNDS = 7
MEASURED_MEMORY = ["plain_moco", "materialised", "hardmix"]
ALLOCATORS: dict[str, dict[str, str]] = {
    "heap": {
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": "17179869184",
        "MALLOC_TOP_PAD_": "268435456",
    },
    "default": {},
}


@dataclass(frozen=True)
class Part:
    """One process: what it measures, and with which allocator."""

    title: str
    job: dict[str, Any]
    allocator: str = "default"


def time_parts(options: argparse.Namespace) -> list[Part]:
    """Every variant at the shapes, once for each allocator."""
    variants = ["plain_moco", "materialised", "lightly", "hardmix", "hardmix_moco"]
    if importlib.util.find_spec("lightly") is None:
        variants.remove("lightly")
    job = _job(options, variants, _shapes(options), options.rounds, _thread_counts(options))
    return [Part(f"times, allocator {name}", job, name) for name in _allocators(options)]


def memory_parts(options: argparse.Namespace) -> list[Part]:
    """One variant at one shape each: a fresh process has no memory to reuse."""
    if options.device == "cpu" and sys.platform != "linux":
        return []
    threads = _thread_counts(options)[-1]
    common = {"kind": "memory", "device": options.device, "threads": threads, "seed": SEED}
    return [
        Part(f"memory of {name} at {shape}", {**common, "variant": name, "shape": shape})
        for shape in _shapes(options)
        for name in MEASURED_MEMORY
    ]


def growth_parts(options: argparse.Namespace) -> list[Part]:
    """One factor at a time; the base belongs to every factor and is measured once."""
    if options.quick:
        return []
    changed = [{**BASE, name: value} for name, values in GROWTH.items() for value in values]
    shapes = list(dict.fromkeys(tuple(setting.values()) for setting in changed))
    rounds = min(GROWTH_ROUNDS, options.rounds)
    threads = _thread_counts(options)[-1:]
    job = _job(options, ["plain_moco", "hardmix"], shapes, rounds, threads)
    return [Part("growth", job, _allocators(options)[0])]


def _job(
    options: argparse.Namespace,
    variants: list[str],
    shapes: list[tuple[int, ...]],
    rounds: int,
    threads: list[int],
) -> dict[str, Any]:
    return {
        "kind": "time",
        "device": options.device,
        "seed": SEED,
        "variants": variants,
        "shapes": shapes,
        "rounds": rounds,
        "threads": threads,
    }


def _shapes(options: argparse.Namespace) -> list[tuple[int, ...]]:
    return list(SHAPES[:1] if options.quick else SHAPES)


def _allocators(options: argparse.Namespace) -> list[str]:
    """The one that limits are judged with comes first."""
    return list(ALLOCATORS) if options.device == "cpu" and sys.platform == "linux" else ["default"]


def _thread_counts(options: argparse.Namespace) -> list[int]:
    return sorted({1, min(2, os.cpu_count() or 1)}) if options.device == "cpu" else [1]


def run(part: Part, status: Status, heading: str) -> Any:
    """The part's result; meanwhile `status` shows what it says."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    environment |= ALLOCATORS[part.allocator]
    command = [sys.executable, str(HERE / "loss_measure.py"), json.dumps(part.job)]
    result = None
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            if line.startswith('{"result"'):
                result = json.loads(line)["result"]
            else:
                status.update(f"{heading}: {line.strip()}")
    if process.returncode != 0:
        sys.exit(f"{part.title}: stopped with exit code {process.returncode}; its words are above.")
    return result


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run every part: times, memory and growth."""
    kinds = {
        "times": time_parts(options),
        "memory": memory_parts(options),
        "growth": growth_parts(options),
    }
    total = sum(len(parts) for parts in kinds.values())
    results: dict[str, Any] = {kind: [] for kind in kinds}
    number = 0
    for kind, parts in kinds.items():
        for part in parts:
            number += 1
            heading = f"part {number} of {total}, {part.title}"
            start = time.perf_counter()
            with console.status(heading) as status:
                outcome = run(part, status, heading)
            console.print(f"{heading}: {time.perf_counter() - start:.0f} s")
            results[kind] += _rows(kind, part, outcome)
    return results


def _rows(kind: str, part: Part, outcome: Any) -> list[dict[str, Any]]:
    if kind == "memory":
        job = part.job
        return [{"variant": job["variant"], "shape": list(job["shape"]), "peak_extra_mb": outcome}]
    return [{"allocator": part.allocator, **summary(timed)} for timed in outcome]


def circumstances(options: argparse.Namespace) -> dict[str, Any]:
    """What a reader must know to repeat this."""
    names = ["hardmix", "torch", "numpy", "rich", "lightly"]
    installed = [name for name in names if importlib.util.find_spec(name) is not None]
    return {
        "command": [Path(sys.executable).name, *sys.argv],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seed": SEED,
        "rounds": options.rounds,
        "device": options.device,
        "growth_base": BASE,
        "growth_factors": GROWTH,
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "load_average_before": _load_average(),
        "platform": platform.platform(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in installed},
        },
        "allocators": {name: ALLOCATORS[name] for name in _allocators(options)},
    }


def _load_average() -> tuple[float, ...] | None:
    return os.getloadavg() if hasattr(os, "getloadavg") else None


def _cpu_name() -> str:
    """The model's name; family and model number too, as a virtual machine may hide the rest."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    pairs = [line.split(":", 1) for line in info.read_text().splitlines() if ":" in line]
    first = {name.strip(): value.strip() for name, value in reversed(pairs)}
    known = [first.get("model name", platform.machine())]
    known += [f"{name} {first[name]}" for name in ("cpu family", "model") if name in first]
    return ", ".join(known)


def arguments() -> argparse.Namespace:
    """What the user asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file (benchmarks/loss[-quick].json)")
    parser.add_argument("--rounds", type=int, default=15, help="at each shape (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="3 rounds, one shape, no growth")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    if options.quick:
        options.rounds = 3
    if options.rounds < 2:
        parser.error(f"--rounds {options.rounds}: a median takes 2 or more.")
    options.out = options.out or HERE / ("loss-quick.json" if options.quick else "loss.json")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    return options


def main() -> None:
    """Measure, write, show."""
    options = arguments()
    console = Console(highlight=False)
    start = time.perf_counter()
    report = {**circumstances(options), **measure(options, console)}
    report["load_average_after"] = _load_average()
    report["seconds"] = round(time.perf_counter() - start)
    report["limits"] = show(report, console)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    console.print(f"{report['seconds']} s; everything is in {options.out}")


if __name__ == "__main__":
    main()
