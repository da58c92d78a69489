"""How this process was started: alone, by torchrun or by SLURM's srun; and its share of the cores.

Imports no torch.
"""

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from hardmix.errors import InputError


class Launch(NamedTuple):
    """The place of one process in its group, and the address where the group connects."""

    rank: int
    world_size: int
    local_rank: int
    """Index of this process on its machine, and of its GPU."""
    local_world_size: int
    """Number of processes on this machine."""
    host: str
    port: int
    """Port of rank 0's store, or torchrun's, on `host`."""
    agent_store: bool = False
    """Whether torchrun keeps the meeting point; otherwise rank 0 does."""


def launched(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """Read the variables of torchrun or srun; return None if this process runs alone.

    torchrun overrides srun, as a job script may start one with the other. A shell inside a SLURM
    job runs alone: only srun sets the variables of a step.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        rank, world_size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
        local_rank = _number(environment, "LOCAL_RANK", rank)
        local = _number(environment, "LOCAL_WORLD_SIZE", world_size)
        agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    elif "SLURM_STEP_NUM_TASKS" in environment and "SLURM_PROCID" in environment:
        rank = _number(environment, "SLURM_PROCID")
        world_size = _number(environment, "SLURM_STEP_NUM_TASKS")
        local_rank = _number(environment, "SLURM_LOCALID", 0)
        tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", "1")
        local = int(re.match(r"\d*", tasks)[0] or 1)  # type: ignore[index]  # "4(x2)"
        agent = False
    else:
        return None
    if world_size == 1:
        return None
    nodes = environment.get("SLURM_STEP_NODELIST", "localhost")
    # The port depends on the job, so that two jobs on one machine do not meet.
    port = 20_000 + _number(environment, "SLURM_JOB_ID", 0) % 10_000
    return Launch(
        rank,
        world_size,
        local_rank,
        local,
        environment.get("MASTER_ADDR", first_host(nodes)),
        _number(environment, "MASTER_PORT", port),
        agent,
    )


def first_host(nodes: str) -> str:
    """Return the first of SLURM's list of nodes: gpu07 of "gpu[07-09,12],big1"."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodes)
    return "".join(part or "" for part in match.groups()) if match else "localhost"


def _number(environment: Mapping[str, str], name: str, otherwise: int | None = None) -> int:
    text = environment.get(name)
    if text is None and otherwise is not None:
        return otherwise
    if text is None or not text.isdecimal():
        raise InputError(
            f"the environment variable {name} is {text!r}: it must be a whole number; start"
            " multiple processes with torchrun or srun, which set it."
        )
    return int(text)


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cores_per_process(environment: Mapping[str, str] = os.environ) -> int:
    """Return this process's share of the cores, at least 1.

    Processes of torchrun may run on all cores; srun gives each task its own, as many as
    --cpus-per-task says.
    """
    cores, processes = available_cores(), processes_here(environment)
    own = environment.get("SLURM_CPUS_PER_TASK", "")
    if processes > 1 and own.isdecimal() and "RANK" not in environment:
        return max(1, min(cores, int(own)))
    return max(1, cores // processes)


def processes_here(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of processes of this job on this machine."""
    launch = launched(environment)
    return 1 if launch is None else launch.local_world_size
