"""Runs the parts one after the other, and prints and writes the results."""

import importlib.util
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hardmix.bench import (
    end_to_end,
    growth,
    loader_speed,
    loss_speed,
    memory_use,
    method_speed,
    start,
    step_speed,
)
from hardmix.bench.choices import PARTS, QUICK_ROUNDS, BenchOptions
from hardmix.bench.circumstances import circumstances, load_average
from hardmix.bench.jobs import BenchJob, Row, Setup, Tell, run_job
from hardmix.bench.limits import judge
from hardmix.bench.speed_tables import (
    Table,
    how_busy,
    how_many_met,
    limits_of,
    sections_of,
    tables_of,
)
from hardmix.bench.test_images import small_data
from hardmix.data.datasets import open_images
from hardmix.errors import InputError
from hardmix.runtime.atomic_files import write_atomically
from hardmix.runtime.console import progress, say, table
from hardmix.runtime.cores import available_cores
from hardmix.runtime.device import choose_compute
from hardmix.settings.config import DataConfig

PLANS: dict[str, Callable[[Setup], list[BenchJob]]] = {
    "loss": loss_speed.plan,
    "step": step_speed.plan,
    "methods": method_speed.plan,
    "loader": loader_speed.plan,
    "end-to-end": end_to_end.plan,
    "start": start.plan,
    "memory": memory_use.plan,
    "growth": growth.plan,
}
"""Parts by name."""

RunBenchJob = Callable[[BenchJob, Tell], list[Row]]


def bench(options: BenchOptions, run: RunBenchJob = run_job) -> dict[str, Any]:
    """Run the requested parts; returns what is written to `options.out`."""
    setup = prepare_setup(options)
    began = time.perf_counter()
    report = circumstances(setup)
    for note in report["notes"]:
        say(note)
    names = [name for name in PARTS if name in options.parts]
    parts: dict[str, list[Row]] = {}
    for number, name in enumerate(names, start=1):
        say(f"Part {number} of {len(names)}: {name}")
        parts[name] = measure_part(name, setup, run)
        _show(tables_of(name, parts[name]))
        report |= {"parts": parts, "limits": judge(parts, setup)}
        report["load_average_after"] = load_average()
        report["seconds"] = round(time.perf_counter() - began)
        page = write_report(report, options.out)  # of every part: a later one may fail
    _show([limits_of(report["limits"])])
    say(how_many_met(report["limits"]))
    if busy := how_busy(row for rows in parts.values() for row in rows):
        say(busy)
    say(f"Took {report['seconds']} s. Wrote all results to {options.out} and the tables to {page}")
    return report


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
    return memory_use.combine(rows) if name == "memory" else rows
