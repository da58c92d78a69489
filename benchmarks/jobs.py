"""A measurement is a job for a fresh process, unaffected by the memory of earlier ones.

The process is `python -m benchmarks.worker JOB`. It writes JSON lines: {"turn": words} after
each turn, {"result": rows} at the end, or {"refused": message}. Other lines are ignored.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hardmix.errors import InputError

SEED = 0
ROOT = Path(__file__).parent.parent

Row = dict[str, Any]
"""Measurements at one setting: times of each variant and round, and derived numbers."""
Tell = Callable[[str], None]
"""Called after each turn with the progress in words."""

ALLOCATORS: dict[str, dict[str, str]] = {
    "heap": {
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": "17179869184",
        "MALLOC_TOP_PAD_": "268435456",
    },
    "default": {},
}
"""glibc's settings. By default it returns large blocks after each use, and page faults rather than
arithmetic dominate the time of the variant that allocates most; "heap" keeps them for all."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings that all parts of a benchmark share."""

    rounds: int
    quick: bool
    device: str
    """cpu or cuda."""
    precisions: tuple[str, ...]
    """fp32, and bf16 if the hardware supports it."""
    precision_reason: str
    lightly: bool
    """Whether lightly is installed."""
    cores: int
    cifar: str | None
    jpeg: str | None

    @property
    def allocators(self) -> list[str]:
        """Allocators; the one that limits are judged with comes first."""
        if self.device != "cpu" or sys.platform != "linux":
            return ["default"]
        return ["heap"] if self.quick else list(ALLOCATORS)

    @property
    def common(self) -> dict[str, Any]:
        """Settings of every job."""
        return {"device": self.device, "seed": SEED, "rounds": self.rounds}


@dataclass(frozen=True, kw_only=True)
class BenchJob:
    """One process: what it measures, and with which allocator."""

    title: str
    kind: str
    """Name of a function in worker.MEASURES."""
    settings: dict[str, Any]
    turns: int
    """Number of its reports of progress."""
    allocator: str = "default"
    seconds: float | None = None
    """Time after which the process is ended, with all that it has started; None: never."""


def run_job(job: BenchJob, tell: Tell) -> list[Row]:
    """Return the job's rows, measured in a separate process."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    environment |= ALLOCATORS[job.allocator]
    paths = [str(ROOT), os.environ.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    task = json.dumps({"kind": job.kind, "settings": job.settings})
    command = [sys.executable, "-P", "-m", "benchmarks.worker", task]
    rows: list[Row] | None = None
    apart = job.seconds is not None
    with (
        subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=apart,
        ) as process,
        _ended_in_time(process, job.seconds) as late,
    ):
        for line in process.stdout or ():
            message = _message(line)
            if "turn" in message:
                tell(message["turn"])
            if "refused" in message:
                raise InputError(message["refused"])
            rows = message.get("result", rows)
        process.wait()
    if late.is_set():
        raise RuntimeError(f"{job.title}: was ended after {job.seconds:.0f} s without a result")
    if rows is None:
        raise RuntimeError(f"{job.title}: ended with status {process.returncode} and no result")
    return rows


@contextmanager
def _ended_in_time(
    process: subprocess.Popen[str], seconds: float | None
) -> Iterator[threading.Event]:
    """End a process and its children if it takes longer, and in any case when the context ends.

    Such a process leads a session of its own, so that nothing else is ended.
    """
    late = threading.Event()
    if seconds is None:
        yield late
        return

    def end() -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def end_late() -> None:
        late.set()
        end()

    timer = threading.Timer(seconds, end_late)
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()
        end()


def _message(line: str) -> dict[str, Any]:
    """Return the message in a line; empty if the line is for people."""
    try:
        message = json.loads(line)
    except json.JSONDecodeError:
        return {}
    return message if isinstance(message, dict) else {}
