"""Real processes for tests: forked from one that has imported everything, so that they start fast.

`start` gives processes, to be killed or waited for; `all_ranks` waits until all are done.
"""

import dataclasses
import hashlib
import itertools
import json
import multiprocessing
import os
import signal
import socket
import sys
import traceback

import torch
from safetensors.torch import load_file

from hardmix.errors import InputError, OutputError, UnfinishedError
from hardmix.runs.folder import Run
from hardmix.runtime.console import speak_as
from hardmix.runtime.launch import Launch
from hardmix.runtime.rendezvous import joined
from hardmix.settings.recipes import RECIPES

TINY = {
    "data": {"num_images": 96, "image_size": 32},
    "mix": {"num_hardest": 16, "num_pairs": 8, "num_with_query": 4, "warm_up_epochs": 1},
    "train": {
        "epochs": 2,
        "batch_size": 16,
        "queue_size": 64,
        "log_every": 4,
        "knn_every": 2,
        "device": "cpu",
        "timeout": 60.0,
    },
}

IMPORTED = ["ranks", "hardmix.training.pretrain"]
"""Modules that processes have when they start."""


def tiny(method="mochi", oracle=False, **more):
    """Return the config of a run of a few seconds on 96 shapes, with settings by group."""
    config = RECIPES["demo"].build(method, oracle)
    groups = {name: TINY.get(name, {}) | more.get(name, {}) for name in TINY.keys() | more.keys()}
    changed = {
        name: dataclasses.replace(getattr(config, name), **values)
        for name, values in groups.items()
    }
    return dataclasses.replace(config, **changed)


def group_norm_trunk():
    """Replace batch norm, so that each image is encoded alone on any number of processes."""
    torch.manual_seed(5)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, stride=2),
        torch.nn.GroupNorm(4, 16),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3, stride=2),
        torch.nn.GroupNorm(4, 32),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
    )


def signal_after(monkeypatch, steps, number=signal.SIGTERM):
    """Send this process a signal when it has taken these numbers of steps in all."""
    taken = itertools.count(1)

    def step_and_signal(training, batch, epoch):
        loss = take_step(training, batch, epoch)
        if training.step + 1 in steps and next(taken) <= len(steps):
            os.kill(os.getpid(), number)
        return loss

    import hardmix.training.pretrain as loop

    take_step = loop.take_step
    monkeypatch.setattr(loop, "take_step", step_and_signal)


def start(job, *arguments, ranks=2, timeout=60.0, output=None):
    """Start processes that join each other and call job(*arguments), with a command's status."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(ranks):
        launch = Launch(rank, ranks, rank, ranks, "localhost", port) if ranks > 1 else None
        options = (launch, timeout, output, job, arguments)
        processes.append(context.Process(target=_run, args=options))
        processes[-1].start()
    return processes


def wait(processes, seconds=120):
    """Return exit statuses; minus the signal's number for processes that were killed."""
    for process in processes:
        process.join(seconds)
        if process.is_alive():
            process.kill()
            process.join()
            raise AssertionError(f"a process was still alive after {seconds} s")
    return [process.exitcode for process in processes]


def all_ranks(job, *arguments, **options):
    """Do `start`, and check that all processes end well."""
    assert set(wait(start(job, *arguments, **options))) == {0}


def in_two_processes(check):
    """Call check(rank) on both of two processes that can talk to each other."""
    all_ranks(_with_rank, check)


def _with_rank(check):
    check(torch.distributed.get_rank())


def _run(launch, timeout, output, job, arguments):
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    rank = 0 if launch is None else launch.rank
    if output is not None:
        file = os.open(f"{output}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
    speak_as(rank)
    try:
        with joined(launch, "cpu", timeout):
            job(*arguments)
    except (InputError, OutputError, UnfinishedError) as error:
        _leave(error.status, f"hardmix: rank {rank}: {error}")
    except SystemExit as end:
        _leave(end.code, "")
    except BaseException:
        _leave(1, traceback.format_exc())
    _leave(0, "")


def _leave(status, text):
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
    os._exit(status)


def lines_of(run):
    """Return metrics.jsonl without speeds."""
    return [{k: v for k, v in line.items() if "second" not in k} for line in Run(run).metrics()]


def manifest_of(checkpoints, step=None):
    """Return the manifest of a step's checkpoint, or of the newest one."""
    newest = sorted(checkpoints.glob("step-*.json"))[-1]
    file = newest if step is None else checkpoints / f"step-{step:08d}.json"
    return json.loads(file.read_text())


def tensors_file(checkpoints, step=None):
    """Return the file with the tensors of a step's checkpoint, or of the newest one."""
    return checkpoints / manifest_of(checkpoints, step)["file"]


def state_of(run):
    """Return a digest of the newest checkpoint, the encoder and both logs."""
    run = Run(run)
    facts = manifest_of(run.checkpoints)
    digest = hashlib.sha256(tensors_file(run.checkpoints).read_bytes())
    encoder = load_file(run.encoder_file)
    digest.update(b"".join(encoder[name].numpy().tobytes() for name in sorted(encoder)))
    digest.update(json.dumps([lines_of(run.path), run.hardness()]).encode())
    digest.update(json.dumps([facts[name] for name in ("step", "epoch", "best")]).encode())
    return digest.hexdigest()
