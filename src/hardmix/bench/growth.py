"""How cost grows: the loss with K, N, s, s' and batch; the step with batch and image size.

The loader with workers, and with processes, each of which should need its share of the CPU time;
training with processes, each of which gets its share of the cores, or its own GPU.
"""

import os
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hardmix.bench import loss_speed
from hardmix.bench.jobs import BenchJob, Row, Setup, Tell
from hardmix.bench.loader_speed import jpeg_size, loader_job
from hardmix.bench.loss_variants import LossShape
from hardmix.bench.process_shares import share_job
from hardmix.bench.rounds import take_turns
from hardmix.bench.step_speed import step_job
from hardmix.bench.steps import TINY, StepSize
from hardmix.runs.folder import Run

MOST_ROUNDS = 7
LOSS_BASE = {"batch": 64, "K": 16384, "N": 1024, "s": 1024, "s'": 128}
LOSS_FACTORS = {
    "K": [4096, 16384, 65536, 131072],
    "N": [64, 256, 1024, 4096],
    "s": [0, 256, 1024, 4096],
    "s'": [0, 128, 512, 1024],
    "batch": [16, 64, 256],
}
STEP_BATCHES, STEP_IMAGE_SIZES = (16, 32, 64, 128), (64, 128, 224)
PROCESSES = (1, 2)
IMAGES = 8192
"""Images of the runs with several processes; a quarter of them fill the queue."""


def plan(setup: Setup) -> list[BenchJob]:
    """One factor at a time."""
    rounds = min(MOST_ROUNDS, setup.rounds)
    counts = [number for number in (1, 2, 4, 8) if number <= setup.cores]
    workers = {f"loader: {number} workers": jpeg_size(setup, number) for number in counts}
    return [
        loss_speed.loss_job(
            "growth of the loss",
            setup,
            ["plain_moco", "hardmix"],
            loss_items(setup),
            rounds,
            loss_speed.thread_counts(setup)[-1:],
            setup.allocators[0],
        ),
        step_job(
            "growth of the step",
            setup,
            ["official", "mochi_fp32", "moco_fp32"],
            step_items(setup),
            rounds,
        ),
        loader_job("growth of the loader", setup, workers, rounds),
        share_job(setup, rounds),
        *processes_jobs(setup, rounds),
    ]


def loss_items(setup: Setup) -> dict[str, LossShape]:
    """One factor at a time from the base."""
    if setup.quick:
        return {"loss: K = 64": loss_speed.TINY}
    return {
        f"loss: {factor} = {value}": LossShape(*{**LOSS_BASE, factor: value}.values())
        for factor, values in LOSS_FACTORS.items()
        for value in values
    }


def step_items(setup: Setup) -> dict[str, StepSize]:
    """Return sizes of a ResNet-18 with growing batches, and with growing images."""
    if setup.quick:
        return {"step: batch = 8": TINY}
    batches = {f"step: batch = {n}": StepSize("resnet18-cifar", n, 32) for n in STEP_BATCHES}
    sizes = {f"step: {n} px": StepSize("resnet18", 32, n) for n in STEP_IMAGE_SIZES}
    return batches | sizes


def processes_jobs(setup: Setup, rounds: int) -> list[BenchJob]:
    """Return jobs that train with 1, 2, ... processes, if each has a core or a GPU."""
    counts = [number for number in PROCESSES if number <= devices(setup)]
    if len(counts) < 2:
        return []
    settings = {
        **setup.common,
        "rounds": 1 if setup.quick else rounds,
        "processes": counts,
        "cores": setup.cores,
        "num_images": 512 if setup.quick else IMAGES,
    }
    return [
        BenchJob(title="processes", kind="processes", settings=settings, turns=settings["rounds"])
    ]


def devices(setup: Setup) -> int:
    """Return the number of cores or GPUs."""
    if setup.device == "cpu":
        return setup.cores
    import torch

    return torch.cuda.device_count()


def measure_processes(settings: dict[str, Any], tell: Tell) -> list[Row]:
    """Train the demo recipe on different numbers of processes, in turn."""
    images = settings["num_images"]
    blocks = {
        f"{number} processes": partial(train_on, number, settings)
        for number in settings["processes"]
    }
    row = take_turns("training: processes", blocks, settings["rounds"], tell, warm_ups=0)
    return [{**row, "images": images, "judged": True}]


def train_on(processes: int, settings: dict[str, Any]) -> float:
    """Return the milliseconds for the images, by the run's own images per second."""
    images: int = settings["num_images"]
    threads = str(max(1, settings["cores"] // processes))
    with TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-P", "-m"]
        if processes > 1:
            command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
            command += ["-m", "hardmix", "--"]
        else:
            command += ["hardmix"]
        command += ["pretrain", "demo", "--out", str(run), "--train.device", settings["device"]]
        command += ["--train.epochs", "1", "--train.knn-every", "0", "--train.log-every", "2"]
        command += ["--mix.warm-up-epochs", "0", "--data.num-images", str(images)]
        environment = os.environ | {"OMP_NUM_THREADS": threads, "PYTHONSAFEPATH": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {done.stderr}")
        speeds: list[float] = [line["images_per_second"] for line in Run(run).metrics()]
    return 1000 * images / statistics.median(speeds[len(speeds) // 2 :])  # by then it mixes
