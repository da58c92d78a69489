"""How this process was started: alone, by torchrun, or by SLURM's srun. Imports no torch."""

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
    """Whether torchrun keeps the meeting point; else rank 0 does."""


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
    # Two jobs on one machine must not meet each other: the port follows from the job.
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
    """The first of SLURM's list of nodes: "gpu[07-09,12],big1" is gpu07."""
    found = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodes)
    return "".join(part or "" for part in found.groups()) if found else "localhost"


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
