"""Measures the growth of the loss's cost with its sizes, and of the step's with batch and image.

Also of loading, with workers and with processes, each of which should need its share of the CPU
time; and of training with processes, each of which gets its share of the cores, or its own GPU.
"""

import io
import multiprocessing
import os
import statistics
import subprocess
import sys
import tarfile
import time
from contextlib import closing
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from benchmarks import loss
from benchmarks.images import photographs, repeated
from benchmarks.jobs import SEED, BenchJob, Row, Setup, Tell
from benchmarks.loader import jpeg_size, loader_job
from benchmarks.loss import LossShape
from benchmarks.rounds import take_turns
from benchmarks.steps import TINY, StepSize, step_job
from hardmix.data.image_set import ImageSet
from hardmix.data.loading import open_loader
from hardmix.runs.folder import Run
from hardmix.runtime.console import silent
from hardmix.runtime.own_code import allowing
from hardmix.settings.config import DataConfig, TrainConfig

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
TRAINING_PROCESSES, LOADING_PROCESSES = (1, 2), (1, 2, 4)
IMAGES = 8192
"""Images of the runs with several processes; a quarter of them fill the queue."""
ARCHIVES = 8
"""Number of archives, and of lanes of the stream."""
LOADING = "CPU time of each process"


def plan(setup: Setup) -> list[BenchJob]:
    """Sizes of the loss, of which one factor changes at a time."""
    rounds = min(MOST_ROUNDS, setup.rounds)
    counts = [number for number in (1, 2, 4, 8) if number <= setup.cores]
    workers = {f"loader: {number} workers": jpeg_size(setup, number) for number in counts}
    return [
        loss.loss_job(
            "growth of the loss",
            setup,
            ["plain_moco", "hardmix"],
            loss_items(setup),
            rounds,
            loss.thread_counts(setup)[-1:],
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
    """Return sizes that differ from the base in one factor."""
    if setup.quick:
        return {"loss: K = 64": loss.TINY}
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
    counts = [number for number in TRAINING_PROCESSES if number <= devices(setup)]
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
    return setup.cores if setup.device == "cpu" else torch.cuda.device_count()


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


# -- loading with several processes


class ShareSize(NamedTuple):
    """The images that a share of processes loads."""

    root: str | None
    image_size: int
    batch: int
    """Images of all processes."""
    steps: int


def share_job(setup: Setup, rounds: int) -> BenchJob:
    """Return the job that loads a part of every batch with 1, 2 and 4 processes."""
    size = ShareSize(setup.jpeg, 32, 8, 1) if setup.quick else ShareSize(setup.jpeg, 224, 64, 4)
    sources = ["files", "shards", *(["stream"] if find_spec("webdataset") else [])]
    settings = {**setup.common, "rounds": rounds, "size": size, "sources": sources}
    turns, allocator = rounds * len(sources), setup.allocators[0]
    return BenchJob(
        title=LOADING, kind="shares", settings=settings, turns=turns, allocator=allocator
    )


def measure_shares(settings: dict[str, Any], tell: Tell) -> list[Row]:
    """Measure what loading a batch costs each process: its CPU time should fall as 1 / n.

    CPU time, because processes of a loader do not wait for each other, and a machine need not have
    a core for each of them. The batch is the same for every n, and each process makes its rows of
    it: from files, from shards on a disk, and from shards that are a stream.
    """
    size, rows = ShareSize(*settings["size"]), []
    with TemporaryDirectory() as folder, silent():
        pictures = photographs(size.root, Path(folder), 16)
        images = repeated(pictures, size.batch * (1 + size.steps))
        write_shards(images, Path(folder))
        for source in settings["sources"]:
            data = data_of(source, images, size, Path(folder))
            blocks = {
                f"{number} process{'es' * (number > 1)}": partial(cpu_time, number, data, size)
                for number in LOADING_PROCESSES
            }
            title, train = f"{LOADING}: {source}", TrainConfig(batch_size=size.batch)
            with allowing(data.root or ""):
                open_loader(data, train, torch.device("cpu"))  # the index
                row = take_turns(title, blocks, settings["rounds"], tell, warm_ups=0)
            rows.append({**row, "batch": size.batch, "judged": True})
    return rows


def write_shards(images: ImageSet, folder: Path) -> None:
    """Write the images to archives, and a list of them."""
    files = list(images.files or ())
    (folder / "images.txt").write_text("".join(f"{Path(file).absolute()}\n" for file in files))
    for number in range(ARCHIVES):
        with tarfile.open(folder / f"s-{number}.tar", "w") as tar:
            for place, file in enumerate(files[number::ARCHIVES]):
                content = Path(file).read_bytes()
                member = tarfile.TarInfo(f"{place:06}.jpg")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def data_of(source: str, images: ImageSet, size: ShareSize, folder: Path) -> DataConfig:
    """Return settings that read the images from files, archives or a pipe."""
    archives = f"{folder}/s-{{0..{ARCHIVES - 1}}}.tar"
    roots = {"files": f"{folder}/images.txt", "shards": archives, "stream": f"pipe:cat {archives}"}
    return DataConfig(
        root=roots[source],
        num_images=len(images),
        image_size=size.image_size,
        workers=0,
        cache="off",
    )


def cpu_time(processes: int, data: DataConfig, size: ShareSize) -> float:
    """Return the milliseconds of CPU that a step takes, the mean of processes run at once."""
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        jobs = [(rank, processes, data, size) for rank in range(processes)]
        times = pool.starmap(_own_time, jobs, chunksize=1)
        pool.close()
        pool.join()  # so that os.times() counts them
    return sum(times) / len(times)


def _own_time(rank: int, processes: int, data: DataConfig, size: ShareSize) -> float:
    """Return the milliseconds of CPU of this process per step, after a first one."""
    torch.set_num_threads(1)
    train, cpu = TrainConfig(batch_size=size.batch, seed=SEED), torch.device("cpu")
    with silent():
        _, loader = open_loader(data, train, cpu, rank_and_size=(rank, processes))
        with closing(loader):
            batches = loader.epoch(0)
            next(batches)
            started = time.process_time()
            for _ in range(size.steps):
                next(batches)
            return 1000 * (time.process_time() - started) / size.steps
