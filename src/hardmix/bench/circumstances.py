"""What a reader must know to assess a benchmark and to repeat it."""

import importlib.util
import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import torch

from hardmix.bench.jobs import ALLOCATORS, SEED, Setup
from hardmix.bench.memory_use import can_measure
from hardmix.runtime.cores import cpu_name

LIBRARIES = ("hardmix", "torch", "torchvision", "numpy", "pillow", "lightly")
MATTERS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""Environment variables that affect times."""


def circumstances(setup: Setup) -> dict[str, Any]:
    """Return machine, versions, command, and what else affects the numbers."""
    return {
        "command": shlex.join(["hardmix", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": SEED,
        "rounds": setup.rounds,
        "quick": setup.quick,
        "device": setup.device,
        "gpu": torch.cuda.get_device_name() if setup.device == "cuda" else None,
        "precision": setup.precision_reason,
        "cpu": cpu_name(),
        "cores": setup.cores,
        "platform": platform.platform(),
        "versions": {"python": platform.python_version(), **_versions()},
        "allocators": {name: ALLOCATORS[name] for name in setup.allocators},
        "environment": {name: os.environ[name] for name in MATTERS if name in os.environ},
        "load_average_before": load_average(),
        "notes": notes(setup),
    }


def notes(setup: Setup) -> list[str]:
    """Return notes on what is not measured here, or measured differently."""
    said = []
    if setup.quick:
        said.append("--quick: tiny sizes, only to see that it works; no limit is judged.")
    if not setup.lightly:
        said.append("lightly is not compared, since it is not installed: 'hardmix[peers]'.")
    if "bf16" not in setup.precisions:
        said.append(f"bf16 is not measured ({setup.precision_reason}).")
    if setup.cifar is None:
        said.append("no --data.cifar: generated shapes of 32 px replace CIFAR-10.")
    if setup.jpeg is None:
        said.append("no --data.jpeg: generated pictures of 500 x 375 replace photographs.")
    if setup.cores < 2 and setup.device == "cpu":
        said.append("1 core: training with 2 processes is not measured.")
    if not can_measure(setup.device):
        said.append("memory on a CPU is only measured on Linux.")
    return said


def load_average() -> list[float] | None:
    """Return the load averages of 1, 5 and 15 minutes, if the system has them."""
    return list(os.getloadavg()) if hasattr(os, "getloadavg") else None


def _versions() -> dict[str, str]:
    found = [name for name in LIBRARIES if importlib.util.find_spec(_module(name)) is not None]
    return {name: version(name) for name in found}


def _module(library: str) -> str:
    return "PIL" if library == "pillow" else library
