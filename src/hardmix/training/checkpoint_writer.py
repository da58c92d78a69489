"""Checkpoints written while training continues: the state is copied, then a thread writes the copy.

There is one thread at most. Whether it has succeeded is reported by the loop's own thread, between
two steps, and whoever ends a run waits for it first.
"""

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from hardmix.runtime.device import Late

Write = Callable[[dict[str, Tensor]], int]
"""Writes a checkpoint of these tensors; returns its size in bytes."""


class Written(NamedTuple):
    """The end of a write."""

    step: int
    size: int = 0
    """Bytes, if it succeeded."""
    seconds: float = 0.0
    error: BaseException | None = None


class CheckpointWriter:
    """Writes one checkpoint at a time; its methods are called by one thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._written: Written | None = None

    def start(self, step: int, tensors: dict[str, Tensor], write: Write) -> None:
        """Copy the tensors and return; a thread then writes the copy. The last one must be over."""
        assert self._thread is None, "two checkpoints at once"
        copies = {name: _copy(tensor) for name, tensor in tensors.items()}
        self._thread = threading.Thread(target=self._run, args=(step, copies, write))
        self._thread.start()

    def collect(self, *, wait: bool) -> Written | None:
        """Return how the last write ended, once; None if it has not, or has been returned."""
        if self._thread is None or (self._thread.is_alive() and not wait):
            return None
        self._thread.join()
        self._thread = None
        return self._written

    def _run(self, step: int, copies: dict[str, Late], write: Write) -> None:
        started = time.monotonic()
        try:
            size = write({name: copy.read() for name, copy in copies.items()})
            self._written = Written(step, size, time.monotonic() - started)
        except BaseException as error:  # raised again by the loop
            self._written = Written(step, error=error)


def _copy(tensor: Tensor) -> Late:
    """A copy on the host; one from a GPU is on its way, behind the steps already asked for."""
    return Late(tensor.detach().clone() if tensor.device.type == "cpu" else tensor)
