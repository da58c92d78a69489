"""SIGTERM, SIGINT and SLURM's SIGUSR1 set a flag that the loop checks between steps.

A second SIGINT ends the process at once: a user who presses Ctrl-C twice means it. In a notebook it
raises KeyboardInterrupt, so that the kernel and its variables stay.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from hardmix.runtime.console import in_notebook

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    """The signal that has asked this process to stop, if any."""

    name: str | None = None

    def __bool__(self) -> bool:
        return self.name is not None


@contextmanager
def listening() -> Iterator[StopRequest]:
    """Record signals instead of being ended by them; Python allows this in the main thread only."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(number: int, _: FrameType | None) -> None:
        request.name = signal.Signals(number).name
        if number == signal.SIGINT:
            # The default ends a process even if it waits in C code.
            signal.signal(number, before[signal.SIGINT] if in_notebook() else signal.SIG_DFL)

    before = {number: signal.signal(number, note) for number in STOPPING}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
