"""`python -m benchmarks gpu`, or `make gpu`: everything that needs a GPU to be known.

Each check runs in a process of its own, which is ended after its time limit: a check that fails,
crashes or hangs does not stop those after it. After every check the results are written to a JSON
file and a page of the same name, in the form of docs/performance.md. The last line says what
failed; the exit status is 1 if anything did. `--device cpu` lets the CPU stand in, with small
sizes, to see that every check works.
"""

import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
import tyro

from benchmarks.gpu_checks import CHECKS, GPU_LIMITS, Check, Machine
from benchmarks.jobs import BenchJob, Row, Tell, run_job
from benchmarks.limits import judge
from benchmarks.suite import (
    BenchOptions,
    RunBenchJob,
    check,
    circumstances,
    prepare_setup,
    write_report,
)
from hardmix.errors import InputError
from hardmix.runtime.console import QUIET_SECONDS, say

STAND_IN_PROCESSES = 2
"""Processes that stand in for as many GPUs with --device cpu."""


@dataclass(frozen=True, kw_only=True)
class GpuOptions:
    """Check and measure on a machine with CUDA what is only counted and calculated elsewhere."""

    out: Path = Path("gpu.json")
    """JSON file of all results; the page is a .md of the same name. Overwrites."""
    only: tuple[str, ...] = ()
    """Names of checks, or their first words. Unset: all."""
    list: bool = False
    """Print the names of the checks and what each claims, and end."""
    rounds: int = 7
    """Number of rounds of the measurements, in each of which every variant takes a turn."""
    device: Literal["cuda", "cpu"] = "cuda"
    """cpu: the CPU stands in, with small sizes; the numbers mean nothing."""
    cifar: Path | None = None
    """Folder of CIFAR-10. Unset: generated shapes of the same size."""
    jpeg: Path | None = None
    """Folder of photographs, with or without subfolders. Unset: generated ones."""
    voc: Path | None = None
    """Folder VOCdevkit, for the detector. Unset: the detector is not checked."""


def main(arguments: Sequence[str]) -> None:
    """Check everything; end with status 1 if a check failed."""
    options = tyro.cli(GpuOptions, prog="python -m benchmarks gpu", args=arguments)
    if options.list:
        for each in CHECKS:
            say(f"{each.name}: {each.claim}")
        return
    checks = chosen(options.only)
    report = check_gpu(machine_of(options), checks, options.out)
    if any(each["result"] == "failed" for each in report["checks"]):
        sys.exit(1)


def chosen(names: Sequence[str]) -> list[Check]:
    """Return the checks that these names begin; all if there are none."""
    for name in names:
        if not any(each.name.startswith(name) for each in CHECKS):
            known = ", ".join(each.name for each in CHECKS)
            raise InputError(f"there is no check {name!r}: choose from {known}.")
    return [each for each in CHECKS if each.name.startswith(tuple(names) or "")]


def machine_of(options: GpuOptions) -> Machine:
    """Return what can be checked on this machine; raise InputError if it has no GPU."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "torch finds no GPU here, and `gpu` checks one: run it on a machine with CUDA, or add"
            " --device cpu to see with small sizes that every check works."
        )
    if options.voc is not None and not options.voc.is_dir():
        raise InputError(f"--voc {options.voc} is not a folder: choose VOCdevkit, or omit it.")
    stand_in = options.device == "cpu"
    bench = BenchOptions(
        out=options.out,
        rounds=options.rounds,
        quick=stand_in,
        device=options.device,
        cifar=options.cifar,
        jpeg=options.jpeg,
    )
    check(bench)
    return Machine(
        device=options.device,
        gpus=STAND_IN_PROCESSES if stand_in else torch.cuda.device_count(),
        small=stand_in,
        setup=prepare_setup(bench),
        voc=None if options.voc is None else str(options.voc.absolute()),
    )


def check_gpu(
    machine: Machine, checks: Sequence[Check], out: Path, run: RunBenchJob = run_job
) -> dict[str, Any]:
    """Do these checks, write the report after each, and return it; `run` does a job."""
    began = time.perf_counter()
    report = circumstances(machine.setup)
    report["command"] = shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])
    report |= {"gpus": describe_gpus(machine), "checks": [], "parts": {}}
    for note in report["notes"]:
        say(note)
    for number, each in enumerate(checks, start=1):
        left = minutes_left(checks[number - 1 :], time.perf_counter() - began, checks)
        say(f"Check {number} of {len(checks)}, {left} left: {each.name}: {each.claim}")
        found = do(each, machine, run)
        say(f"  {found['result']} in {found['seconds']} s: {found['words']}")
        report["parts"] |= found.pop("parts", {})
        report["checks"].append(found)
        report["limits"] = judge(report["parts"], machine.setup, GPU_LIMITS)
        report["seconds"] = round(time.perf_counter() - began)
        page = write_report(report, out)  # after every check: the machine may fail
    say(f"Took {report['seconds']} s. Wrote all results to {out} and the page to {page}")
    say(verdict(report["checks"], report["notes"]))
    return report


def describe_gpus(machine: Machine) -> list[dict[str, Any]]:
    """Return name, memory and capability of every GPU."""
    if machine.device != "cuda":
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": facts.name,
                "memory_gb": round(facts.total_memory / 1e9, 1),
                "capability": f"{facts.major}.{facts.minor}",
                "cuda": torch.version.cuda,
            }
        )
    return found


def minutes_left(left: Sequence[Check], taken: float, checks: Sequence[Check]) -> str:
    """Return the time that the remaining checks will take, by what the first ones took."""
    expected = sum(each.seconds for each in checks) - sum(each.seconds for each in left)
    pace = taken / expected if expected else 1.0
    return f"about {max(1, round(pace * sum(each.seconds for each in left) / 60))} min"


def do(each: Check, machine: Machine, run: RunBenchJob) -> dict[str, Any]:
    """Return how a check ended: passed, failed or skipped, in which words, after how long."""
    started = time.perf_counter()
    reason = each.skipped(machine)
    if reason:
        found: Row = {"result": "skipped", "words": reason}
    else:
        with TemporaryDirectory(prefix="gpu-") as folder:
            job = BenchJob(
                title=each.name,
                kind="gpu",
                settings={"check": each.name, "machine": asdict(machine), "folder": folder},
                turns=1,
                seconds=each.limit,
            )
            try:
                (found,) = run(job, _telling())
            except Exception as error:  # the process crashed, was killed, or took too long
                found = {"result": "failed", "words": f"{error}"}
    seconds = round(time.perf_counter() - started, 1)
    return {"check": each.name, "claim": each.claim, **found, "seconds": seconds}


def _telling() -> Tell:
    """Return a function that prints the progress within a check, from time to time."""
    said = time.monotonic()

    def tell(words: str) -> None:
        nonlocal said
        if time.monotonic() - said > QUIET_SECONDS:
            say(f"  {words}")
            said = time.monotonic()

    return tell


def verdict(checks: list[dict[str, Any]], notes: Sequence[str]) -> str:
    """Return the last line: how many checks passed, which failed, and what was left out and why."""
    by_result: dict[str, list[dict[str, Any]]] = {"passed": [], "failed": [], "skipped": []}
    for each in checks:
        by_result[each["result"]].append(each)
    failed = ", ".join(each["check"] for each in by_result["failed"]) or "nothing"
    reasons: dict[str, list[str]] = {}
    for each in by_result["skipped"]:
        reasons.setdefault(each["words"], []).append(each["check"])
    skipped = "; ".join(f"{', '.join(names)} ({why})" for why, names in reasons.items())
    left_out = " ".join(note for note in notes if "not " in note)
    return (
        f"{len(by_result['passed'])} of {len(checks)} checks passed. Failed: {failed}."
        f" Skipped: {skipped or 'nothing'}. {left_out}"
    ).strip()


def measure(settings: dict[str, Any], tell: Tell) -> list[Row]:
    """Do one check in this process: the worker's part. Whatever is raised is a result."""
    machine = Machine.restored(settings["machine"])
    (each,) = (each for each in CHECKS if each.name == settings["check"])
    return [json.loads(json.dumps(each.attempt(machine, Path(settings["folder"]), tell)))]
