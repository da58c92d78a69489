"""Pre-training that is killed, or whose disk is full, ends with the bits of an undisturbed run."""

import contextlib
import os
import resource
import shutil
import signal
import time
from pathlib import Path

from hardmix.runs.checkpoints import load_newest
from hardmix.runs.folder import Run
from hardmix.runtime import console
from hardmix.training.pretrain import pretrain
from ranks import start, state_of, tiny

KILLS = {
    "SIGKILL rank 0": (signal.SIGKILL, (0,)),
    "SIGKILL rank 1": (signal.SIGKILL, (1,)),
    "SIGKILL both": (signal.SIGKILL, (0, 1)),
    "SIGTERM rank 0": (signal.SIGTERM, (0,)),
    "SIGTERM rank 1": (signal.SIGTERM, (1,)),
    "SIGTERM both": (signal.SIGTERM, (0, 1)),
    "SIGUSR1 both": (signal.SIGUSR1, (0, 1)),
}
TIMEOUT = 5.0
CHAIN = 6
"""Kills of one run, which is then trained to its end and compared."""


def config():
    """Return a run of five epochs of six steps, also saved about three times a second."""
    return tiny(train={"epochs": 5, "log_every": 2, "save_minutes": 0.005, "timeout": TIMEOUT})


def go_on(run):
    """Start or resume a run, as every process of a chain does."""
    pretrain(config(), run, resume="auto")


def kill_processes(folder, number, generator, findings):
    """Kill two processes at random moments from their start on, resume them, compare the end."""
    folder.mkdir()
    finish(folder / "whole", findings)
    whole, counts = state_of(folder / "whole"), dict.fromkeys(KILLS, 0)
    slowest = done = chains = 0
    while done < number:
        run = folder / f"chain-{chains}"
        for _ in range(min(CHAIN, number - done)):
            kind = generator.choice(list(KILLS))
            slowest = max(slowest, kill_once(run, kind, generator.uniform(0, 2.5), findings))
            counts[kind] += 1
            done += 1
        finish(run, findings)
        if state_of(run) != whole:
            findings.append(f"{run.name}: ends unlike the unbroken run")
        shutil.rmtree(run)
        chains += 1
    return {"kills": done, **counts, "chains": chains, "slowest_end": round(slowest, 1)}


def kill_once(run, kind, after, findings):
    """Return how long the processes took to end after the signal."""
    signal_number, victims = KILLS[kind]
    processes = start(go_on, run, timeout=TIMEOUT, output=f"{run}.log")
    time.sleep(after)
    struck = time.monotonic()
    for victim in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(processes[victim].pid, signal_number)
    for process in processes:
        process.join(10 * TIMEOUT)
        if process.is_alive():
            findings.append(f"{run.name}: {kind} after {after:.2f} s left a process hanging")
            process.kill()
            process.join()
    statuses = [process.exitcode for process in processes]
    if not set(statuses) <= {0, 75, -signal_number}:
        shown = Path(f"{run}.log-0").read_text()[-2000:]
        findings.append(f"{run.name}: {kind} after {after:.2f} s ends with {statuses}: {shown}")
    return time.monotonic() - struck


def finish(run, findings):
    """Train to the end without being disturbed."""
    processes = start(go_on, run, timeout=60.0, output=f"{run}.log")
    for process in processes:
        process.join(300)
    statuses = [process.exitcode for process in processes]
    if statuses != [0, 0]:
        shown = Path(f"{run}.log-0").read_text()[-2000:]
        findings.append(f"{run.name}: could not be finished {statuses}: {shown}")


def fill_disk(run, which, limit):
    """Fill the disk at `limit` bytes of the save number `which`; it has room again afterwards."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    save, count = Run.save_checkpoint, [0]

    def limited(self, *arguments):
        count[0] += 1
        if count[0] == which:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            return save(self, *arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    Run.save_checkpoint = limited  # type: ignore[method-assign]
    go_on(run)


def fill_disks(folder, number, generator, findings):
    """Check that each run continues, ends as the unbroken one, and has only whole checkpoints."""
    folder.mkdir()
    console.speak_as(1)
    pretrain(config(), folder / "whole")
    whole, warned, tried = state_of(folder / "whole"), 0, 0
    while warned < number and tried < 3 * number:  # a save of the same step writes no weights
        index, tried = tried, tried + 1
        run, limit = folder / f"{index}", generator.randrange(6_400_000)
        which = generator.randint(1, 5)
        (process,) = start(fill_disk, run, which, limit, ranks=1, output=f"{run}.log")
        process.join(120)
        shown = Path(f"{run}.log-0").read_text()
        warned += "no checkpoint at step" in shown
        if process.exitcode == 74 and "its last checkpoint" in shown:  # there was no later one
            (process,) = start(go_on, run, ranks=1, output=f"{run}.log")
            process.join(120)
        if process.exitcode != 0:
            findings.append(f"full disk: ended with {process.exitcode}: {shown[-900:]}")
        elif load_newest(Run(run).checkpoints).broken or state_of(run) != whole:
            findings.append(f"full disk at {limit} bytes of save {which}: not as the unbroken run")
        if list(run.rglob(".*.tmp")):
            findings.append("full disk: half a file was left")
        shutil.rmtree(run)
    console.speak_as(0)
    return {"full_disks": warned, "runs": tried}
