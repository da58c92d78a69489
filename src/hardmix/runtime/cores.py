"""How many cores this process may use, alone or beside others, and which CPU they belong to."""

import os
import platform
from collections.abc import Mapping
from pathlib import Path

from hardmix.runtime.launch import launched


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cores_per_process(environment: Mapping[str, str] = os.environ) -> int:
    """Return this process's share of the cores: at least 1.

    torchrun lets its processes run on all cores. srun gives each task cores of its own where
    --cpus-per-task says how many.
    """
    cores, processes = available_cores(), processes_here(environment)
    own = environment.get("SLURM_CPUS_PER_TASK", "")
    if processes > 1 and own.isdecimal() and "RANK" not in environment:
        return max(1, min(cores, int(own)))
    return max(1, cores // processes)


def processes_here(environment: Mapping[str, str] = os.environ) -> int:
    """Return how many processes of this job are on this machine."""
    launch = launched(environment)
    return 1 if launch is None else launch.local_world_size


def cpu_name() -> str:
    """Return the CPU's name, family and model number, since a virtual machine may hide some."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    pairs = [line.split(":", 1) for line in info.read_text().splitlines() if ":" in line]
    first = {name.strip(): value.strip() for name, value in reversed(pairs)}
    known = [first.get("model name", platform.machine())]
    known += [f"{name} {first[name]}" for name in ("cpu family", "model") if name in first]
    return ", ".join(known)
