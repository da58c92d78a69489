"""Join and leave a group of processes. If one is lost, the remaining ones name it.

torch.distributed does the rest. What is here, and why:

- Ranks record in a store, kept by torchrun or by rank 0, that they have started, why they fail, and
  that they remain when others fail. torch only says "Connection closed by peer"; these records
  give the lost rank, its host and its reason (`losses_named`), also before training (`_meet`).
- Processes that torchrun has restarted share its store with those before them, and must not read
  what those have written (`_assemble`).
- A store may block for longer than its timeout: it is asked from a thread (`_within`).
- On Debian a host's own name resolves to 127.0.1.1, which gloo offers to other machines
  (`check_addresses`).
- If torchrun is killed, its processes train on without it (`_end_with_parent`).
"""

import ctypes
import hashlib
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed
from torch._C._distributed_c10d import PrefixStore, TCPStore

from hardmix.errors import InputError, OutputError, UnfinishedError
from hardmix.runtime.console import warn
from hardmix.runtime.launch import Launch

TIMEOUT = 300.0
"""Default number of seconds after which a silent process counts as lost."""

LAST_WORDS = 3.0
"""Seconds that the remaining processes wait for each other to report."""
BROKEN_CONNECTION = ("gloo", "Connection closed", "Connection reset", "Timed out", "NCCL")
NEVER_CONNECTED = "connectFullMesh"
"""Part of gloo's error if two processes cannot reach each other."""
PR_SET_PDEATHSIG = 1
Result = TypeVar("Result")


@contextmanager
def joined(launch: Launch | None, device: str = "auto", timeout: float = TIMEOUT) -> Iterator[None]:
    """Join the process group for the duration of the context; do nothing if `launch` is None.

    Uses NCCL between GPUs, one per local rank, and gloo between CPUs. A process that fails leaves a
    message for the others. Those whose connection breaks raise `UnfinishedError`, which names the
    lost rank.
    """
    if launch is None or torch.distributed.is_initialized():
        yield
        return
    store = _meet(launch, timeout)
    check_addresses(store, launch)
    on_gpus = device != "cpu" and torch.cuda.is_available()
    if on_gpus:
        torch.cuda.set_device(_own_gpu(launch, device))
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // launch.local_world_size))
    _end_with_parent()
    try:
        with _meeting(Meeting(store, launch, timeout)), losses_named():
            torch.distributed.init_process_group(
                "cpu:gloo,cuda:nccl" if on_gpus else "gloo",
                store=store,
                rank=launch.rank,
                world_size=launch.world_size,
                timeout=timedelta(seconds=timeout),
            )
            yield
            torch.distributed.barrier()  # nobody leaves while others still write
    except LostProcessError:
        raise  # the others know it already
    except (InputError, OutputError, UnfinishedError) as error:
        _leave_word(store, launch, str(error), error.status)
        raise
    except Exception as error:
        _leave_word(store, launch, f"{type(error).__name__}: {error}", 1)
        raise
    torch.distributed.destroy_process_group()


class Meeting(NamedTuple):
    """The store that the processes of this job share."""

    store: Any
    launch: Launch
    timeout: float


_here: Meeting | None = None
_broken = False


def is_broken() -> bool:
    """Return whether a connection was lost, so that threads may still wait for an answer.

    Python aborts (status 134) if one of them wakes up while it shuts down: use `os._exit`.
    """
    return _broken


@contextmanager
def _meeting(meeting: Meeting) -> Iterator[None]:
    global _here
    _here = meeting
    try:
        yield
    finally:
        _here = None


class LostProcessError(UnfinishedError):
    """Another process was lost; the message says which one and why."""


class FailedProcessError(LostProcessError, InputError):
    """Another process failed with an error; resuming would fail again."""

    status = InputError.status


@contextmanager
def losses_named() -> Iterator[None]:
    """Turn torch's error about a broken connection into one that names the lost process.

    Raises `LostProcessError` if it died, `FailedProcessError` if it reported an error, and
    SystemExit on ranks other than 0, which need not repeat the message.
    """
    try:
        yield
    except RuntimeError as error:
        if not _is_broken_connection(error):
            raise
        if _here is None:  # the program made the connection itself
            first_line = str(error).strip().split("\n")[0]
            raise LostProcessError(_unknown_loss(first_line)) from error
        raise _lost(*_here, error) from error


def _unknown_loss(first_line: str) -> str:
    return (
        f"the connection between the processes broke ({first_line}). Resume the run to"
        " continue from its last checkpoint."
    )


def _own_gpu(launch: Launch, device: str) -> int:
    """Return this process's GPU: that of its local rank, or the only one that SLURM shows it."""
    number = torch.cuda.device_count()
    if device not in ("auto", "cuda") and launch.local_world_size > 1:
        raise InputError(
            f"train.device={device} with {launch.local_world_size} processes on this machine: each"
            " needs its own GPU; leave train.device at auto."
        )
    if launch.local_rank >= number > 1:
        raise InputError(
            f"{launch.local_world_size} processes on a machine with {number} GPUs: start one for"
            " each GPU (torchrun --nproc-per-node), or set train.device=cpu."
        )
    return launch.local_rank if number > 1 else 0


def _meet(launch: Launch, timeout: float) -> Any:
    """Return a store that all ranks have reached; raise if some have not."""
    where = f"{launch.host}:{launch.port}"

    def meet() -> tuple[Any, list[int]]:
        meeting_point = TCPStore(
            launch.host,
            launch.port,
            launch.world_size,
            is_master=launch.rank == 0 and not launch.agent_store,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
        )
        return _assemble(meeting_point, launch, timeout)

    nobody: tuple[Any, list[int]] = None, []
    try:
        store, missing = _within(timeout + LAST_WORDS, meet, nobody)
    except RuntimeError:
        store, missing = nobody
    if store is None:
        raise UnfinishedError(
            f"rank {launch.rank} could not reach rank 0 at {where} in {timeout:g} s"
            " (train.timeout): it has not started, has died or hangs, or MASTER_ADDR or"
            " MASTER_PORT is wrong."
        )
    if missing:
        raise UnfinishedError(
            f"rank {', '.join(map(str, missing))} of {launch.world_size} did not connect to {where}"
            f" within {timeout:g} s (train.timeout): check its node and its output, then start the"
            " run again with resume=auto."
        )
    return store


def _assemble(meeting_point: Any, launch: Launch, timeout: float) -> tuple[Any, list[int]]:
    """Return a store of these processes alone, and the ranks that have not come.

    torchrun's count of restarts cannot tell restarted processes from earlier ones: it counts only
    failures, and where one host sees a failure another may see that a host has left. So each
    process writes a word of its own, and all meet under a name made of these words. A name with
    the word of a process that is gone never becomes complete.
    """
    everyone = list(range(launch.world_size))
    words = [f"hardmix-start-{rank}" for rank in everyone]
    meeting_point.set(words[launch.rank], uuid.uuid4().hex)
    end, pause = time.monotonic() + timeout, 0.02
    while True:
        store, keys = meeting_point, words
        if meeting_point.check(words):
            name = hashlib.sha256(b"".join(meeting_point.multi_get(words))).hexdigest()
            store, keys = (
                PrefixStore(f"hardmix-{name}", meeting_point),
                [f"here-{rank}" for rank in everyone],
            )
            store.set(keys[launch.rank], f"{socket.gethostname()} {_own_address()}")
            if store.check(keys):
                return store, []
        if time.monotonic() > end:
            return store, [rank for rank in everyone if not store.check([keys[rank]])]
        time.sleep(pause)
        pause = min(1.5 * pause, 0.5)


def _within(seconds: float, function: Callable[[], Result], otherwise: Result) -> Result:
    """Return a function's result, or `otherwise` if it takes longer than `seconds`."""
    global _broken
    results: list[Result] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            results.append(function())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        _broken = True
    return results[0] if results else otherwise


def _end_with_parent() -> None:
    """Have this rank receive SIGTERM if torchrun is killed, so that it saves and exits."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def _is_broken_connection(error: RuntimeError) -> bool:
    if isinstance(error, torch.distributed.DistError):
        return True
    return any(word in str(error) for word in BROKEN_CONNECTION)


def _leave_word(store: Any, launch: Launch, text: str, status: int) -> None:
    """Tell the others why this rank exits; exit silently if rank 0 reports the same."""

    def leave() -> bool:
        word = f"{status} {text}"
        store.set(f"failed-{launch.rank}", word)
        rank_0_failed = launch.rank and not _missing_ranks(store, ["failed"], [0], 1.0)
        same = bool(rank_0_failed) and store.get("failed-0").decode() == word
        _go_last(store, launch, list(range(launch.world_size)))
        return same

    with suppress(RuntimeError):  # the store is gone with rank 0
        if _within(3 * LAST_WORDS, leave, False):
            raise SystemExit(status)


def _lost(store: Any, launch: Launch, timeout: float, error: RuntimeError) -> BaseException:
    """Return the error to raise: which rank was lost, and why if it reported a reason."""
    global _broken
    _broken = True
    others = [rank for rank in range(launch.world_size) if rank != launch.rank]

    def ask() -> tuple[list[int], dict[int, str], dict[int, str]]:
        store.set(f"left-{launch.rank}", "")
        silent = _missing_ranks(store, ["failed", "left"], others, LAST_WORDS)
        failed = [rank for rank in others if store.check([f"failed-{rank}"])]
        reports = {rank: store.get(f"failed-{rank}").decode() for rank in failed}
        hosts = {rank: _here_of(store, rank)[0] for rank in silent}
        _go_last(store, launch, [rank for rank in others if rank not in silent])
        return silent, reports, hosts

    # Without an answer, the store is gone, and rank 0 with it.
    no_answer: tuple[list[int], dict[int, str], dict[int, str]] = [0], {}, {0: launch.host}
    try:
        silent, reports, hosts = _within(3 * LAST_WORDS, ask, no_answer)
    except RuntimeError:
        silent, reports, hosts = no_answer
    failed = any(report.partition(" ")[0] != "75" for report in reports.values())
    if launch.rank and 0 not in silent:
        return SystemExit(2 if failed else 75)  # rank 0 prints the message
    reasons = [f"rank {rank} stopped: {text.partition(' ')[2]}" for rank, text in reports.items()]
    reasons += [
        f"rank {rank} on {host} has died or does not answer (train.timeout={timeout:g} s)"
        for rank, host in hosts.items()
    ]
    if not reasons:
        first_line = str(error).strip().split("\n")[0]
        return LostProcessError(_unknown_loss(first_line) + _interface_hint(launch))
    if failed:
        return FailedProcessError(f"{'; '.join(reasons)}.")
    hint = _interface_hint(launch) if NEVER_CONNECTED in str(error) else ""
    return LostProcessError(f"{'; '.join(reasons)}. Resume the run to continue.{hint}")


def check_addresses(store: Any, launch: Launch) -> None:
    """Warn if gloo would offer an address that no other machine can reach."""
    if launch.rank or launch.world_size == launch.local_world_size:
        return
    places = [_here_of(store, rank) for rank in range(launch.world_size)]
    wrong = sorted({host for host, address in places if address.startswith("127.")})
    if wrong and "GLOO_SOCKET_IFNAME" not in os.environ:
        warn(f"{', '.join(wrong)} resolves to a loopback address.{_interface_hint(launch)}")


def _interface_hint(launch: Launch) -> str:
    """Return a hint on the most common network problem; empty on a single machine."""
    if launch.world_size == launch.local_world_size:
        return ""
    return (
        " If a host's own name resolves to 127.0.1.1 (Debian's /etc/hosts), others cannot reach"
        " it: set GLOO_SOCKET_IFNAME, and NCCL_SOCKET_IFNAME, to the network interface on"
        " every node, such as eth0 or ib0."
    )


def _own_address() -> str:
    """Return the address that this host's own name resolves to; empty if it does not."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def _missing_ranks(store: Any, words: list[str], ranks: list[int], seconds: float) -> list[int]:
    """Return the ranks that have written none of these words to the store within `seconds`."""
    end = time.monotonic() + seconds
    missing = ranks
    while True:
        missing = [
            rank for rank in missing if not any(store.check([f"{word}-{rank}"]) for word in words)
        ]
        if not missing or time.monotonic() > end:
            return missing
        time.sleep(0.02)


def _here_of(store: Any, rank: int) -> tuple[str, str]:
    """Return the name and the address of the host of a rank that has started."""
    host, _, address = store.get(f"here-{rank}").decode().partition(" ")
    return host, address


def _go_last(store: Any, launch: Launch, others: list[int]) -> None:
    """Let the rank that keeps the store exit only after the others have read it."""
    store.set(f"gone-{launch.rank}", "")
    if launch.rank == 0 and not launch.agent_store:
        _missing_ranks(store, ["gone"], others, LAST_WORDS)
