"""The process that measures: `python -m hardmix.bench.worker JOB`. See jobs.py."""

import json
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from hardmix.bench import (
    end_to_end,
    growth,
    loader_speed,
    loss_speed,
    memory_use,
    method_speed,
    process_shares,
    start,
    step_speed,
)
from hardmix.bench.jobs import Row, Tell
from hardmix.errors import InputError

MEASURES: dict[str, Callable[[dict[str, Any], Tell], list[Row]]] = {
    "loss": loss_speed.measure,
    "step": step_speed.measure,
    "methods": method_speed.measure,
    "loader": loader_speed.measure,
    "end-to-end": end_to_end.measure,
    "start": start.measure,
    "loss-memory": memory_use.measure_loss,
    "step-memory": memory_use.measure_step,
    "processes": growth.measure_processes,
    "shares": process_shares.measure,
}


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
