"""How this process was launched, which is looked up once, and how it ends."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from hardmix.runtime.launch import Launch, launched

_launch: Launch | None = None


def ask() -> Launch | None:
    """Return how torchrun or srun launched this process; None if it runs alone."""
    global _launch
    _launch = launched()
    return _launch


def speaks() -> bool:
    """Return whether this process prints errors in the command line: only rank 0 does."""
    return _launch is None or _launch.rank == 0


@contextmanager
def all_processes(device: str = "auto", timeout: float = 300.0) -> Iterator[None]:
    """Join the processes that torchrun or srun started; only rank 0 prints."""
    from hardmix.runtime.console import speak_as
    from hardmix.runtime.rendezvous import joined

    speak_as(0 if _launch is None else _launch.rank)
    with joined(_launch, device, timeout):
        yield


def leave(status: str | int | None) -> NoReturn:
    """Exit; at once if the connection to the other processes is broken."""
    rendezvous = sys.modules.get("hardmix.runtime.rendezvous")
    if rendezvous is not None and rendezvous.is_broken() and isinstance(status, int):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
