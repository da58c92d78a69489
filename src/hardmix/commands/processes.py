"""How this process was started: asked once, when a command begins."""

from collections.abc import Iterator
from contextlib import contextmanager

from hardmix.runtime.launch import Launch, launched

_launch: Launch | None = None


def ask() -> Launch | None:
    """What torchrun or srun say; None where this process works alone."""
    global _launch
    _launch = launched()
    return _launch


def speaks() -> bool:
    """Of many processes only rank 0 says what is wrong with the command line: it is one for all."""
    return _launch is None or _launch.rank == 0


@contextmanager
def all_processes(device: str = "auto", timeout: float = 300.0) -> Iterator[None]:
    """Join the processes that torchrun or srun has started; only rank 0 speaks."""
    from hardmix.runtime.console import speak_as
    from hardmix.runtime.rendezvous import joined

    speak_as(0 if _launch is None else _launch.rank)
    with joined(_launch, device, timeout):
        yield
