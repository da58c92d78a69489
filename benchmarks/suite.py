"""Runs the parts of the benchmark one after the other, and prints and writes the results."""

import difflib
import importlib.util
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from benchmarks import end_to_end, growth, loader, loss, memory, methods, start, steps
from benchmarks.images import small_data
from benchmarks.jobs import ALLOCATORS, SEED, BenchJob, Row, Setup, Tell, run_job
from benchmarks.limits import judge
from benchmarks.tables import Table, how_busy, how_many_met, limits_of, sections_of, tables_of
from hardmix.data.sources import open_images
from hardmix.errors import InputError
from hardmix.runtime.console import progress, say, table
from hardmix.runtime.device import choose_compute, cpu_name
from hardmix.runtime.files import write_atomically
from hardmix.runtime.launch import available_cores
from hardmix.settings.config import DataConfig

PLANS: dict[str, Callable[[Setup], list[BenchJob]]] = {
    "loss": loss.plan,
    "step": steps.plan,
    "methods": methods.plan,
    "loader": loader.plan,
    "end-to-end": end_to_end.plan,
    "start": start.plan,
    "memory": memory.plan,
    "growth": growth.plan,
}
"""Parts by name."""

QUICK_ROUNDS = 2
LIBRARIES = {
    "hardmix": "hardmix",
    "torch": "torch",
    "torchvision": "torchvision",
    "numpy": "numpy",
    "pillow": "PIL",
    "lightly": "lightly",
}
"""Libraries whose versions are written down, with the names of their modules."""
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""Environment variables that affect times."""


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Measure hardmix's performance on this machine.

    Variants take turns in every round; ratios are medians over the rounds. Close other programs
    first. lightly is compared if it is installed: pip install 'hardmix[peers]'.
    """

    parts: Annotated[
        tyro.conf.Positional[tuple[str, ...]],
        tyro.conf.arg(metavar="PART...", help=f"Any of {', '.join(PLANS)}. Default: all."),
    ] = ()
    out: Path = Path("bench.json")
    """JSON file of all results; tables go to a .md of the same name. Overwrites."""
    rounds: int = 15
    """Number of rounds, in each of which every variant takes a turn."""
    quick: bool = False
    """Use tiny sizes and two rounds, to check that it works; the numbers mean nothing."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda when available, otherwise cpu."""
    cifar: Path | None = None
    """Folder of CIFAR-10. Unset: generated shapes of the same size."""
    jpeg: Path | None = None
    """Folder of photographs, with or without subfolders. Unset: generated ones."""


RunBenchJob = Callable[[BenchJob, Tell], list[Row]]


def bench(options: BenchOptions, run: RunBenchJob = run_job) -> dict[str, Any]:
    """Run the requested parts; returns what is written to `options.out`."""
    check(options)
    setup = prepare_setup(options)
    began = time.perf_counter()
    report = circumstances(setup)
    for note in report["notes"]:
        say(note)
    names = [name for name in PLANS if name in (options.parts or PLANS)]
    parts: dict[str, list[Row]] = {}
    for number, name in enumerate(names, start=1):
        say(f"Part {number} of {len(names)}: {name}")
        parts[name] = measure_part(name, setup, run)
        _show(tables_of(name, parts[name]))
        report |= {"parts": parts, "limits": judge(parts, setup)}
        report["load_average_after"] = load_average()
        report["seconds"] = round(time.perf_counter() - began)
        page = write_report(report, options.out)  # after every part: a later one may fail
    _show([limits_of(report["limits"])])
    say(how_many_met(report["limits"]))
    if busy := how_busy(row for rows in parts.values() for row in rows):
        say(busy)
    say(f"Took {report['seconds']} s. Wrote all results to {options.out} and the tables to {page}")
    return report


def check(options: BenchOptions) -> None:
    """Raise InputError for options that cannot work, before anything is measured."""
    for name in options.parts:
        if name not in PLANS:
            known = difflib.get_close_matches(name, PLANS, n=len(PLANS), cutoff=0.0)
            raise InputError(f"there is no part {name!r}: choose from {', '.join(known)}.")
    if options.rounds < 2:
        raise InputError(f"--rounds {options.rounds} must be at least 2, for quartiles.")
    if options.out.suffix == ".md":
        raise InputError(f"--out {options.out} must not end in .md, as the tables do: use .json.")
    if options.out.is_dir() or not options.out.absolute().parent.is_dir():
        raise InputError(f"--out {options.out} must be a file in an existing folder.")
    for option, folder in [("cifar", options.cifar), ("jpeg", options.jpeg)]:
        if folder is not None and not folder.is_dir():
            raise InputError(
                f"--{option} {folder} is not a folder: choose one, or omit the option to use"
                " generated images."
            )


def prepare_setup(options: BenchOptions) -> Setup:
    """Return what can be measured on this machine."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch finds no GPU here; omit it, or use cpu.")
    compute = choose_compute(options.device)
    if options.cifar is not None:
        open_images(small_data(str(options.cifar)))  # now, not after the parts that need no images
    if options.jpeg is not None:
        open_images(DataConfig(name="folder", root=str(options.jpeg)))
    return Setup(
        rounds=QUICK_ROUNDS if options.quick else options.rounds,
        quick=options.quick,
        device=compute.device.type,
        precisions=("fp32", "bf16") if compute.bf16 else ("fp32",),
        precision_reason=compute.reason,
        lightly=importlib.util.find_spec("lightly") is not None,
        cores=available_cores(),
        cifar=None if options.cifar is None else str(options.cifar.absolute()),
        jpeg=None if options.jpeg is None else str(options.jpeg.absolute()),
    )


def circumstances(setup: Setup) -> dict[str, Any]:
    """Return machine, versions, command, and what else a reader needs to judge the numbers."""
    versions = {
        name: version(name)
        for name, module in LIBRARIES.items()
        if importlib.util.find_spec(module) is not None
    }
    return {
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": SEED,
        "rounds": setup.rounds,
        "quick": setup.quick,
        "device": setup.device,
        "gpu": torch.cuda.get_device_name() if setup.device == "cuda" else None,
        "precision": setup.precision_reason,
        "cpu": cpu_name(),
        "cores": setup.cores,
        "platform": platform.platform(),
        "versions": {"python": platform.python_version(), **versions},
        "allocators": {name: ALLOCATORS[name] for name in setup.allocators},
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "load_average_before": load_average(),
        "notes": notes(setup),
    }


def notes(setup: Setup) -> list[str]:
    """Return sentences on what is not measured here, or measured differently."""
    sentences = []
    if setup.quick:
        sentences.append("--quick: tiny sizes, only to check that it works; no limit is judged.")
    if not setup.lightly:
        sentences.append("lightly is not compared, since it is not installed: 'hardmix[peers]'.")
    if "bf16" not in setup.precisions:
        sentences.append(f"bf16 is not measured ({setup.precision_reason}).")
    if setup.cifar is None:
        sentences.append("no --cifar: generated shapes of 32 px replace CIFAR-10.")
    if setup.jpeg is None:
        sentences.append("no --jpeg: generated pictures of 500 x 375 replace photographs.")
    if setup.cores < 2 and setup.device == "cpu":
        sentences.append("1 core: training with 2 processes is not measured.")
    if not memory.can_measure(setup.device):
        sentences.append("memory on a CPU is only measured on Linux.")
    return sentences


def load_average() -> list[float] | None:
    """Return the load averages of 1, 5 and 15 minutes, if the system has them."""
    return list(os.getloadavg()) if hasattr(os, "getloadavg") else None


def measure_part(name: str, setup: Setup, run: RunBenchJob) -> list[Row]:
    """Run all jobs of a part, with progress and remaining time."""
    jobs = PLANS[name](setup)
    rows: list[Row] = []
    turns = sum(job.turns for job in jobs)
    with progress(name, turns) as meter:
        done = 0
        for job in jobs:

            def tell(words: str, title: str = job.title) -> None:
                nonlocal done
                done += 1
                meter.advance(done, f"{title}: {words}")

            rows += run(job, tell)
    return memory.combine(rows) if name == "memory" else rows


def write_report(report: dict[str, Any], file: Path) -> Path:
    """Write what was measured so far, and its tables next to it; returns their path."""
    write_atomically(file, json.dumps(report, indent=1).encode() + b"\n")
    page = file.with_suffix(".md")
    write_atomically(page, "\n\n".join(sections_of(report).values()).encode() + b"\n")
    return page


def _show(tables: list[Table]) -> None:
    for each in tables:
        if each.lines:
            table(*each)
