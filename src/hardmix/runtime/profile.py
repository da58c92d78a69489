"""How long each part of a step takes: by the clock on a CPU, by CUDA events on a GPU.

Unless train.profile is set, `timed` does nothing. Parts are never nested, so that together with
"rest" they make up the whole step. A GPU runs behind the program: events are marks in its queue,
and the program waits for them only once in `SETTLED` steps.

torch.profiler records every operator (545 events in a step of `small`), so it can only look at a
few steps. Waiting for worker processes comes in bursts and needs the mean of a whole run, and time
that is spent in workers or left over is not in its table.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import torch

Part = Literal[
    "waiting", "decode", "augment", "query", "key", "loss", "backward", "optimizer", "queue"
]
"""`waiting` means for worker processes; `decode` is done in this process if there are none. `key`
includes the momentum update, `backward` the averaging over processes."""

SKIPPED = 3
"""Steps at the start that do not count: memory is allocated, kernels are chosen, workers start."""
SETTLED = 100
"""Number of steps after which the events of a GPU are read."""

Item = TypeVar("Item")
_END = object()


class Profile(NamedTuple):
    """Means over the steps that were counted, in milliseconds per step."""

    steps: int
    whole: float
    parts: dict[str, float]
    """Every `Part`, and "rest"; their sum is `whole`."""
    workers: float
    """Time spent in worker processes, in parallel with the step."""


class Stopwatch:
    """Adds up the time of the parts of all steps."""

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
        """Count the time within the context for this part of the step."""
        begun = self._now()
        yield
        self._open.append((name, begun, self._now()))

    def beside(self, seconds: float) -> None:
        """Add time that a worker process has spent on this step."""
        self._beside += seconds

    def lap(self) -> None:
        """End a step, and begin the next."""
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
    """Let `timed` and the other functions use a new stopwatch within the context, if `wanted`."""
    global _running
    _running = Stopwatch(device) if wanted else None
    try:
        yield _running
    finally:
        _running = None


def timed(part: Part) -> AbstractContextManager[None]:
    """Return a context that is put around a part of a step."""
    return nullcontext() if _running is None else _running.part(part)


def timed_each(part: Part, items: Iterable[Item]) -> Iterator[Item]:
    """Yield the items, counting the time that it takes to produce each."""
    iterator = iter(items)
    while True:
        with timed(part):
            item: Any = next(iterator, _END)
        if item is _END:
            return
        yield item


def timed_beside(seconds: float) -> None:
    """Add time that a worker process has spent on this step."""
    if _running is not None:
        _running.beside(seconds)


def start_steps() -> None:
    """Begin to count, before the first step of an epoch."""
    if _running is not None:
        _running.start()


def end_step() -> None:
    """Count a step, after it has ended."""
    if _running is not None:
        _running.lap()
