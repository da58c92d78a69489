"""The process that measures: `python -m benchmarks.worker JOB` (see jobs.py)."""

import json
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from benchmarks import end_to_end, gpu, growth, loader, loss, memory, methods, start, steps
from benchmarks.jobs import Row, Tell
from hardmix.errors import InputError

MEASURES: dict[str, Callable[[dict[str, Any], Tell], list[Row]]] = {
    "loss": loss.measure,
    "step": steps.measure,
    "methods": methods.measure,
    "loader": loader.measure,
    "end-to-end": end_to_end.measure,
    "start": start.measure,
    "loss-memory": memory.measure_loss,
    "step-memory": memory.measure_step,
    "processes": growth.measure_processes,
    "shares": growth.measure_shares,
    "gpu": gpu.measure,
}
"""Kinds of jobs."""


def main(task: str) -> None:
    """Measure and write the results."""
    job = json.loads(task)
    threads = torch.get_num_threads()
    if "lightly" in task:
        import_module("lightly.loss")  # now, as an import may change the number of threads
    torch.set_num_threads(threads)
    try:
        rows = MEASURES[job["kind"]](job["settings"], lambda words: _write({"turn": words}))
    except InputError as error:
        _write({"refused": str(error)})
        return
    _write({"result": rows})


def _write(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except KeyboardInterrupt:
        sys.exit(130)
