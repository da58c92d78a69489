"""Worker processes that read and crop images: how many, started once, and shielded from signals.

Batches have the same bits with any number of workers; only the speed depends on it. A scheduler's
SIGTERM and a user's Ctrl-C reach every process of a job, but only the main one may act on them: if
its workers died first, it could not save a last checkpoint.
"""

import atexit
import math
import multiprocessing
import os
import signal
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from jaxtyping import Float32
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hardmix.errors import InputError
from hardmix.runtime.launch import cores_per_process, processes_here

MOST_WORKERS = 16
"""Most workers by default: they decode 4,000 photographs per second, more than a GPU trains on."""
WAITING = 2
"""Batches that a worker prepares in advance (PyTorch's prefetch_factor)."""
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
    """Return the number of workers, by default one fewer than this process's cores.

    Args:
        asked: data.workers; None if it is unset.
        device: the device that trains.
        held: whether the images are small and in memory.
        batch_bytes: size of a batch that a worker sends.
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
    """Return the number of workers whose waiting batches fit in shared memory."""
    batches = SHARED_SHARE * _free_shared() / max(1, batch_bytes)
    return int(min(MOST_WORKERS, max(0.0, batches - 1) / WAITING))


def _free_shared() -> float:
    """Return this process's share of the free bytes; infinity if the system has no limit."""
    try:
        facts = os.statvfs("/dev/shm")
    except OSError:
        return float("inf")
    return facts.f_bavail * facts.f_frsize / processes_here()


STUCK = 600
"""Seconds without a batch after which the disk or network counts as stuck."""

Job = TypeVar("Job")
Result = TypeVar("Result")


class WorkerPool(Generic[Job, Result]):
    """Runs `function` on jobs in `workers` processes, or in this one if 0; results are in order.

    None means as many as `choose_workers` chooses. `function` must be picklable, as a
    `functools.partial` of a top-level function is.
    """

    def __init__(
        self, function: Callable[[Job], Result], workers: int | None, device: torch.device
    ) -> None:
        workers = choose_workers(workers, device).number
        self._jobs: list[Job] = []
        self._loader: DataLoader[Any] = DataLoader(
            _Jobs(function),
            batch_size=None,
            sampler=self._jobs,  # this list, which is filled anew for each epoch
            num_workers=workers,
            prefetch_factor=WAITING if workers else None,
            persistent_workers=workers > 0,
            collate_fn=_unchanged,
            worker_init_fn=_start_worker,
            pin_memory=device.type == "cuda",
            timeout=STUCK if workers else 0,
            multiprocessing_context=_context() if workers else None,
        )
        # At exit multiprocessing waits for its children, having sent a SIGTERM that ours ignore.
        atexit.register(_close, weakref.ref(self))

    def run(self, jobs: Sequence[Job]) -> Iterator[Result]:
        """Yield the results of these jobs; a run may be left early, but two must not overlap."""
        self._jobs[:] = jobs
        with dead_workers_named():
            for result in self._loader:
                if isinstance(result, InputError):
                    raise result
                yield result

    def close(self) -> None:
        """End the workers, including those that hang."""
        iterator = self._loader._iterator
        self._loader._iterator = None
        workers = getattr(iterator, "_workers", [])
        if workers:
            iterator._shutdown_workers()  # type: ignore[union-attr]
        for worker in workers:
            worker.kill()


def empty_to_send(shape: Sequence[int]) -> Float32[Tensor, "..."]:
    """Return memory that a worker can pass to the main process without a copy."""
    size = math.prod(shape) * torch.float32.itemsize
    memory: torch.UntypedStorage = torch.UntypedStorage._new_shared(size)
    return torch.empty(0).set_(memory).view(*shape)


@contextmanager
def dead_workers_named() -> Iterator[None]:
    """Turn torch's errors about dead or stuck workers into an InputError with a remedy.

    Torch may raise them at any time, even during a training step, so wrap the whole loop.
    """
    try:
        yield
    except RuntimeError as error:
        first_line = str(error).strip().split("\n")[0]
        if "DataLoader worker" in first_line:
            raise InputError(
                f"A worker process died: {first_line} The usual cause is a lack of memory: lower"
                " data.workers or train.batch_size, or give the job more memory (and /dev/shm)."
            ) from error
        if "DataLoader timed out" in first_line:
            raise InputError(
                f"No images arrived for {STUCK} seconds: the disk or network that holds them is"
                " stuck, or data.workers is too low for images of this size."
            ) from error
        raise


def _context() -> str | None:
    """Return "fork" if it is available, so that workers are children of this process.

    With Python 3.14's default, a signal to the whole job would end the fork server between the two,
    and workers whose parent is gone end silently.
    """
    return "fork" if "fork" in multiprocessing.get_all_start_methods() else None


class _Jobs(Dataset[Any]):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def __getitem__(self, job: Any) -> Any:
        try:
            return self._function(job)
        except InputError as error:  # a result, because torch would add a traceback to the message
            return error


def _unchanged(result: Result) -> Result:
    return result


def _start_worker(_: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)


def _close(reference: "weakref.ref[WorkerPool[Any, Any]]") -> None:
    pool = reference()
    if pool is not None:
        pool.close()
