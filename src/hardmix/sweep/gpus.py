"""The GPUs of a machine, shared by the processes of a sweep: each takes free ones by lock.

A process sees only those that it has taken, for training and evaluations alike. With several GPUs
for each run, torchrun trains and evaluates it on them. On a CPU, processes stand for GPUs.
"""

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from hardmix.errors import InputError, LockedError, UnfinishedError
from hardmix.runs.folder import Run
from hardmix.runtime.console import say
from hardmix.runtime.files import locked_folder
from hardmix.runtime.own_code import allowed_code
from hardmix.runtime.signals import StopRequest
from hardmix.sweep.sweep_folder import state_of

VISIBLE = "CUDA_VISIBLE_DEVICES"
RETRY_SECONDS = 2.0
"""Pause between attempts while all GPUs are taken."""


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, by CUDA's names for them."""
    count = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
    return named[:count] if named else [str(number) for number in range(count)]


def check_gpus(gpus_per_run: int, device: str, *, here: bool = True) -> None:
    """Raise InputError if a run cannot have as many GPUs as asked for.

    Unless it is to run `here`, the GPUs of this machine do not matter.
    """
    if gpus_per_run < 1:
        raise InputError(f"--gpus-per-run {gpus_per_run} must be at least 1.")
    if gpus_per_run == 1 or device == "cpu":
        return
    if device not in ("auto", "cuda"):
        raise InputError(
            f"--gpus-per-run {gpus_per_run} with --device {device}: leave out --device, or give"
            " --device cpu for as many processes on the CPU."
        )
    available = len(visible_gpus()) if here else gpus_per_run
    if gpus_per_run > available:
        raise InputError(
            f"--gpus-per-run {gpus_per_run}, but this process sees {available} GPUs: lower it, or"
            " start the sweep where there are more."
        )


@contextmanager
def taken_gpus(gpus_per_run: int, device: str, stop: StopRequest) -> Iterator[list[str]]:
    """Hold free GPUs; none on a machine with fewer than two, or if a device is named.

    On a CPU, each of several processes is named "cpu".
    """
    visible = visible_gpus()
    if device == "cpu" and gpus_per_run > 1:
        yield ["cpu"] * gpus_per_run
        return
    if device not in ("auto", "cuda") or len(visible) < 2:
        yield []
        return
    before = os.environ.get(VISIBLE)
    with ExitStack() as locks:
        taken = _take(gpus_per_run, visible, locks, stop)
        os.environ[VISIBLE] = ",".join(taken)  # before CUDA is first used: later it is ignored
        say(f"GPU {', '.join(taken)} of {len(visible)}: taken by this process.")
        try:
            yield taken
        finally:
            os.environ.pop(VISIBLE)
            if before is not None:
                os.environ[VISIBLE] = before


def _take(number: int, visible: list[str], locks: ExitStack, stop: StopRequest) -> list[str]:
    announced = False
    while True:
        taken: list[str] = []
        with ExitStack() as attempt:
            for name in visible:
                try:
                    attempt.enter_context(locked_folder(_place(name)))
                except LockedError:
                    continue
                taken.append(name)
                if len(taken) == number:
                    locks.push(attempt.pop_all())
                    return taken
        if stop:
            raise UnfinishedError(f"stopped by {stop.name}: the same sweep command resumes.")
        if not announced:
            say(f"Waiting for {number} of the {len(visible)} GPUs: others are using them.")
            announced = True
        time.sleep(RETRY_SECONDS)


def _place(name: str) -> Path:
    """Return the folder whose lock stands for a GPU, in all processes of this user."""
    return Path(tempfile.gettempdir()) / f"hardmix-gpus-{os.getuid()}" / name.replace("/", "_")


def train_by_torchrun(run: Run, config: Path, gpus: Sequence[str], stop: StopRequest) -> Run:
    """Train a run on several GPUs; it saves before it stops."""
    words = ["pretrain", "--config", str(config), "--out", str(run.path), "--resume", "auto"]
    status = run_by_torchrun(words, len(gpus), stop)
    if state_of(run) == "finished" and status == 0:
        return run
    if stop:
        raise UnfinishedError(f"stopped by {stop.name}: the same sweep command resumes it.")
    raise InputError(
        f"torchrun ended with status {status} before {run.path.name} was finished: see its messages"
        f" above, and {run.path / 'status.json'}."
    )


def evaluate_by_torchrun(words: Sequence[str], gpus: Sequence[str], stop: StopRequest) -> None:
    """Run the command of an evaluation on several GPUs; the command resumes what it has saved."""
    say(
        f"On {len(gpus)} {'processes' if gpus[0] == 'cpu' else 'GPUs'}: hardmix {shlex.join(words)}"
    )
    status = run_by_torchrun(words, len(gpus), stop)
    if stop:
        raise UnfinishedError(f"stopped by {stop.name}: the same sweep command resumes.")
    if status:
        raise InputError(
            f"torchrun ended with status {status}: see its messages above; the command was hardmix"
            f" {shlex.join(words)}."
        )


def run_by_torchrun(words: Sequence[str], processes: int, stop: StopRequest) -> int:
    """Run a command of hardmix in several processes, pass signals on, return torchrun's status."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    start += ["-m", "hardmix", "--", *words]
    start += [word for name in allowed_code() for word in ("--allow-code", name)]
    # No modules of the current folder: -P is for torchrun, the variable for its ranks.
    safe = os.environ | {"PYTHONSAFEPATH": "1"}
    process = subprocess.Popen([sys.executable, "-P", *start], env=safe, start_new_session=True)
    signalled = False
    while process.poll() is None:
        if stop and not signalled:
            os.killpg(process.pid, signal.SIGTERM)
            signalled = True
        time.sleep(0.2)
    return int(process.returncode)
