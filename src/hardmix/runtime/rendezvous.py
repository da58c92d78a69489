"""Join and leave a group of processes. If one is lost, the remaining ones name it.

Each rank records in a store that it has started, why it fails, and that it remains when others
fail. The store is kept by torchrun, or by rank 0.
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
from hardmix.runtime.addresses import check_addresses, interface_hint, own_address
from hardmix.runtime.launch import Launch
from hardmix.runtime.store_words import LAST_WORDS, go_last, here_of, host_of, missing_ranks

TIMEOUT = 300.0
"""Default number of seconds after which a silent process counts as lost."""
BROKEN_CONNECTION = ("gloo", "Connection closed", "Connection reset", "Timed out", "NCCL")
NEVER_CONNECTED = "connectFullMesh"
"""In gloo's error where two processes found no way to each other."""
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
            torch.distributed.barrier()  # nobody is gone while others still write
    except LostProcessError:
        raise  # the others know
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
        if _here is None:  # the program made the connection, and knows the processes
            first_line = str(error).strip().split("\n")[0]
            raise LostProcessError(_unknown_loss(first_line)) from error
        raise _lost(*_here, error) from error


def _unknown_loss(first_line: str) -> str:
    return (
        f"the connection between the processes broke ({first_line}). Resume the run to"
        " continue from its last checkpoint."
    )


def _own_gpu(launch: Launch, device: str) -> int:
    """The GPU of this process: that of its local rank, or the only one that SLURM lets it see."""
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
    """Return the store of these very processes, and the ranks that have not come.

    Processes that torchrun starts again must not read what those before them have left, and its
    count of restarts differs between hosts: only failures count, and one host may see a failure
    where the other sees that a host has left. So every process brings a word of its own, and they
    meet under a name made of all words; a name with the word of one that is gone stays incomplete.
    """
    everyone = list(range(launch.world_size))
    words = [f"hardmix-start-{each}" for each in everyone]
    meeting_point.set(words[launch.rank], uuid.uuid4().hex)
    end, pause = time.monotonic() + timeout, 0.02
    while True:
        here, said = meeting_point, words
        if meeting_point.check(words):
            name = hashlib.sha256(b"".join(meeting_point.multi_get(words))).hexdigest()
            here, said = PrefixStore(f"hardmix-{name}", meeting_point), here_of(everyone)
            here.set(said[launch.rank], f"{socket.gethostname()} {own_address()}")
            if here.check(said):
                return here, []
        if time.monotonic() > end:
            return here, [each for each in everyone if not here.check([said[each]])]
        time.sleep(pause)
        pause = min(1.5 * pause, 0.5)


def _within(seconds: float, function: Callable[[], Result], otherwise: Result) -> Result:
    """Return a function's result, or `otherwise` after so many seconds: stores may block."""
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
    """Tell the others why this rank exits; do not repeat what rank 0 reports too."""

    def leave() -> bool:
        word = f"{status} {text}"
        store.set(f"failed-{launch.rank}", word)
        said = launch.rank and not missing_ranks(store, ["failed"], [0], 1.0)
        same = bool(said) and store.get("failed-0").decode() == word
        go_last(store, launch, list(range(launch.world_size)))
        return same

    with suppress(RuntimeError):  # the store is gone with rank 0
        if _within(3 * LAST_WORDS, leave, False):
            raise SystemExit(status)


def _lost(store: Any, launch: Launch, timeout: float, error: RuntimeError) -> BaseException:
    """Return the error to raise: which rank was lost, and why if it reported a reason."""
    global _broken
    _broken = True
    others = [each for each in range(launch.world_size) if each != launch.rank]

    def ask() -> tuple[list[int], dict[int, str], dict[int, str]]:
        store.set(f"left-{launch.rank}", "")
        silent = missing_ranks(store, ["failed", "left"], others, LAST_WORDS)
        failed = [each for each in others if store.check([f"failed-{each}"])]
        words = {each: store.get(f"failed-{each}").decode() for each in failed}
        hosts = {each: host_of(store, each) for each in silent}
        go_last(store, launch, [each for each in others if each not in silent])
        return silent, words, hosts

    gone: tuple[list[int], dict[int, str], dict[int, str]] = (
        [0],
        {},
        {0: launch.host},
    )  # with the store that it keeps
    try:
        silent, said, hosts = _within(3 * LAST_WORDS, ask, gone)
    except RuntimeError:
        silent, said, hosts = gone
    statuses = {text.partition(" ")[0] for text in said.values()}
    failed = bool(statuses - {"75"})
    if launch.rank and 0 not in silent:
        return SystemExit(2 if failed else 75)  # rank 0 says it
    words = [f"rank {each} stopped: {text.partition(' ')[2]}" for each, text in said.items()]
    words += [
        f"rank {each} on {host} has died or does not answer (train.timeout={timeout:g} s)"
        for each, host in hosts.items()
    ]
    if not words:
        first_line = str(error).strip().split("\n")[0]
        return LostProcessError(_unknown_loss(first_line) + interface_hint(launch))
    if failed:
        return FailedProcessError(f"{'; '.join(words)}.")
    hint = interface_hint(launch) if NEVER_CONNECTED in str(error) else ""
    return LostProcessError(f"{'; '.join(words)}. Resume the run to continue.{hint}")
