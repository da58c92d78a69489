"""Where the time of a step goes, part by part: by the clock on a CPU, by its own events on a GPU.

Off unless train.profile is set; `timed` then does nothing. Parts follow one another, never within
each other, so that with "rest" they make up the whole. A GPU runs behind the program: events are
marks in its queue of work, and the program waits for them only now and then.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import torch

Part = Literal[
    "waiting", "decode", "augment", "query", "key", "loss", "backward", "optimizer", "queue"
]
"""`waiting` is for worker processes, `decode` is done here where there are none. `key` has the
momentum update in it, `backward` the averaging over processes."""

SKIPPED = 3
"""Steps at the start that are not counted: memory is found, kernels are chosen, workers start."""
SETTLED = 100
"""Steps after which a GPU's events are read."""

Item = TypeVar("Item")
_END = object()


class Profile(NamedTuple):
    """Means over the steps that were counted, in milliseconds per step."""

    steps: int
    whole: float
    parts: dict[str, float]
    """Every `Part`, and "rest"; together they are `whole`."""
    workers: float
    """Time spent in worker processes, in parallel with the step."""


class Stopwatch:
    """Adds up the parts of each step."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._steps = self._counted = 0
        self._whole = self._workers = 0.0
        self._parts = dict.fromkeys((*get_args(Part), "rest"), 0.0)
        self._laps: list[tuple[list[tuple[Part, Any, Any]], Any, Any]] = []
        self.start()

    def start(self) -> None:
        """Start timing a step now; time since the last step is not counted."""
        self._open: list[tuple[Part, Any, Any]] = []
        self._beside = 0.0
        self._begun = self._now()

    @contextmanager
    def part(self, name: Part) -> Iterator[None]:
        """What is done within belongs to this part of the step."""
        begun = self._now()
        yield
        self._open.append((name, begun, self._now()))

    def beside(self, seconds: float) -> None:
        """Add time that a worker process has spent on this step."""
        self._beside += seconds

    def lap(self) -> None:
        """A step ends and the next begins."""
        now = self._now()
        self._steps += 1
        if self._steps > SKIPPED:
            self._laps.append((self._open, self._begun, now))
            self._workers += self._beside
        if len(self._laps) >= SETTLED:
            self._settle()
        self._open, self._beside, self._begun = [], 0.0, now

    def profile(self) -> Profile:
        """Return the means so far."""
        self._settle()
        count = max(1, self._counted) / 1000
        parts = {name: seconds / count for name, seconds in self._parts.items()}
        return Profile(self._counted, self._whole / count, parts, self._workers / count)

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, begun: Any, ended: Any) -> float:
        return float(begun.elapsed_time(ended) / 1000 if self._cuda else ended - begun)

    def _settle(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()
        for parts, begun, ended in self._laps:
            whole = rest = self._between(begun, ended)
            for name, start, stop in parts:
                seconds = self._between(start, stop)
                self._parts[name] += seconds
                rest -= seconds
            self._parts["rest"] += rest
            self._whole += whole
        self._counted += len(self._laps)
        self._laps = []


_running: Stopwatch | None = None


@contextmanager
def profiling(wanted: bool, device: torch.device) -> Iterator[Stopwatch | None]:
    """Within, `timed` and its like go to this stopwatch; to none where it is not wanted."""
    global _running
    _running = Stopwatch(device) if wanted else None
    try:
        yield _running
    finally:
        _running = None


def timed(part: Part) -> AbstractContextManager[None]:
    """For a `with` around a part of a step."""
    return nullcontext() if _running is None else _running.part(part)


def timed_each(part: Part, items: Iterable[Item]) -> Iterator[Item]:
    """The same around the making of each item."""
    iterator = iter(items)
    while True:
        with timed(part):
            item: Any = next(iterator, _END)
        if item is _END:
            return
        yield item


def timed_beside(seconds: float) -> None:
    """Time that a worker process has spent."""
    if _running is not None:
        _running.beside(seconds)


def start_steps() -> None:
    """Before the first step of an epoch."""
    if _running is not None:
        _running.start()


def end_step() -> None:
    """After each step."""
    if _running is not None:
        _running.lap()
