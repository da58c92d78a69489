"""Worker processes that read and crop images: started once, and shielded from signals.

A scheduler's SIGTERM and a user's Ctrl-C reach every process of a job. Only the main one may act on
them: workers that died first would take the last checkpoint with them.
"""

import atexit
import math
import multiprocessing
import signal
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Float32
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hardmix.data.worker_count import WAITING, choose_workers
from hardmix.errors import InputError

STUCK = 600
"""Seconds without a batch after which the disk or network counts as stuck."""

Job = TypeVar("Job")
Result = TypeVar("Result")


class WorkerPool(Generic[Job, Result]):
    """Runs `function` over jobs in `workers` processes, or in this one if 0; results in order.

    None: as many as there are cores for (worker_count.py). `function` must be picklable, as
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
            sampler=self._jobs,  # this very list, filled anew for each epoch
            num_workers=workers,
            prefetch_factor=WAITING if workers else None,
            persistent_workers=workers > 0,
            collate_fn=_unchanged,
            worker_init_fn=_start_worker,
            pin_memory=device.type == "cuda",
            timeout=STUCK if workers else 0,
            multiprocessing_context=_context() if workers else None,
        )
        # At exit multiprocessing waits for its children, after sending a SIGTERM that ours ignore.
        atexit.register(_close, weakref.ref(self))

    def run(self, jobs: Sequence[Job]) -> Iterator[Result]:
        """The results of these jobs; leaving early is allowed, two runs at a time are not."""
        self._jobs[:] = jobs
        with dead_workers_named():
            for result in self._loader:
                if isinstance(result, InputError):
                    raise result
                yield result

    def close(self) -> None:
        """End the workers, those that hang included."""
        iterator = self._loader._iterator
        self._loader._iterator = None
        workers = getattr(iterator, "_workers", [])
        if workers:
            iterator._shutdown_workers()  # type: ignore[union-attr]
        for worker in workers:
            worker.kill()


def empty_to_send(shape: Sequence[int]) -> Float32[Tensor, "..."]:
    """Memory for numbers that a worker gives to the main process, which need not be copied then."""
    size = math.prod(shape) * torch.float32.itemsize
    memory: torch.UntypedStorage = torch.UntypedStorage._new_shared(size)
    return torch.empty(0).set_(memory).view(*shape)


@contextmanager
def dead_workers_named() -> Iterator[None]:
    """Turn torch's errors about dead or stuck workers into an InputError with a remedy.

    Torch may raise them at any time, even during a training step: wrap the whole loop.
    """
    try:
        yield
    except RuntimeError as error:
        said = str(error).strip().split("\n")[0]
        if "DataLoader worker" in said:
            raise InputError(
                f"A worker process died: {said} The usual cause is a lack of memory: lower"
                " data.workers or train.batch_size, or give the job more memory (and /dev/shm)."
            ) from error
        if "DataLoader timed out" in said:
            raise InputError(
                f"No images arrived for {STUCK} seconds: the disk or network that holds them is"
                " stuck, or data.workers is too low for images of this size."
            ) from error
        raise


def _context() -> str | None:
    """Children of this very process, where that can be.

    A fork server between the two, Python 3.14's way, would die by a signal to the whole job, and
    workers whose parent is gone end without a word.
    """
    return "fork" if "fork" in multiprocessing.get_all_start_methods() else None


class _Jobs(Dataset[Any]):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def __getitem__(self, job: Any) -> Any:
        try:
            return self._function(job)
        except InputError as error:  # as a result: torch would put a traceback into its words
            return error


def _unchanged(result: Result) -> Result:
    return result


def _start_worker(_: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)


def _close(pool: "weakref.ref[WorkerPool[Any, Any]]") -> None:
    alive = pool()
    if alive is not None:
        alive.close()
