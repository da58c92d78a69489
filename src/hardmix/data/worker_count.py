"""How many worker processes read images, where data.workers leaves it open, and why.

The batches have the same bits with any number; only the speed depends on it.
"""

import os
from typing import NamedTuple

import torch

from hardmix.runtime.cores import cores_per_process, processes_here

MOST_WORKERS = 16
"""They decode 4,000 photographs per second, more than a GPU trains on; each costs memory."""
WAITING = 2
"""Batches that a worker makes in advance (PyTorch's prefetch_factor)."""
SHARED_SHARE = 0.5
"""Share of the free shared memory that waiting batches may fill."""


class WorkerChoice(NamedTuple):
    """A number of worker processes, and the reason for it."""

    number: int
    reason: str

    def __str__(self) -> str:
        noun = "worker" if self.number == 1 else "workers"
        return f"{self.number or 'no'} {noun}: {self.reason}"


def choose_workers(
    asked: int | None, device: torch.device, held: bool = False, batch_bytes: int = 0
) -> WorkerChoice:
    """Return what data.workers asks for or, if it is unset, one fewer than this process's cores.

    `held`: the images are small and in memory. `batch_bytes`: of what a worker sends at a time.
    """
    if asked is not None:
        return WorkerChoice(asked, f"data.workers={asked}")
    if held:
        return WorkerChoice(0, "the images are small and held in memory")
    cores, on_gpu = cores_per_process(), device.type != "cpu"
    if cores == 1 and not on_gpu:
        return WorkerChoice(0, "1 core for each process, which trains on it")
    number = min(max(1, cores - 1), MOST_WORKERS)
    fitting = _fitting(batch_bytes)
    if fitting < number:
        free = f"{batch_bytes / 1e6:.0f} MB per batch, {_free_shared() / 1e6:.0f} MB free"
        return WorkerChoice(fitting, f"more would not fit in /dev/shm ({free})")
    if cores - 1 > number:
        return WorkerChoice(number, f"{cores} cores for each process, more are seldom needed")
    if cores == 1:
        return WorkerChoice(1, "1 core for each process, while the GPU trains")
    return WorkerChoice(number, f"{cores} cores for each process, one trains")


def _fitting(batch_bytes: int) -> int:
    """Return the workers whose waiting batches, and the one in use, fit in shared memory."""
    batches = SHARED_SHARE * _free_shared() / max(1, batch_bytes)
    return int(min(MOST_WORKERS, max(0.0, batches - 1) / WAITING))


def _free_shared() -> float:
    """Return this process's share of the free bytes; infinity if the system has no limit."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return float("inf")
    return found.f_bavail * found.f_frsize / processes_here()
