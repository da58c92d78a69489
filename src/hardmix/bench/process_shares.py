"""What loading a batch costs each of n processes: its CPU time per step should fall as 1 / n.

CPU time, not time: processes of a loader do not wait for each other, and a machine need not have a
core for each of them. The batch is the same for every n, and a process makes its rows of it.
"""

import io
import multiprocessing
import tarfile
import time
from contextlib import closing
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from hardmix.bench.jobs import SEED, BenchJob, Row, Setup, Tell
from hardmix.bench.rounds import take_turns
from hardmix.bench.test_images import photographs, repeated
from hardmix.data.image_set import ImageSet
from hardmix.data.loading import open_loader
from hardmix.runtime.console import silent
from hardmix.runtime.own_code import allowing
from hardmix.settings.config import DataConfig, TrainConfig

PROCESSES = (1, 2, 4)
ARCHIVES = 8
"""As many lanes has the stream."""
SUBJECT = "CPU time of each process"


class ShareSize(NamedTuple):
    """What is loaded."""

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
        title=SUBJECT, kind="shares", settings=settings, turns=turns, allocator=allocator
    )


def measure(settings: dict[str, Any], tell: Tell) -> list[Row]:
    """Files, shards on a disk, and shards that are a stream."""
    size, rows = ShareSize(*settings["size"]), []
    with TemporaryDirectory() as folder, silent():
        found = photographs(size.root, Path(folder), 16)
        images = repeated(found, size.batch * (1 + size.steps))
        write_shards(images, Path(folder))
        for source in settings["sources"]:
            data = data_of(source, images, size, Path(folder))
            blocks = {
                f"{number} process{'es' * (number > 1)}": partial(cpu_time, number, data, size)
                for number in PROCESSES
            }
            title, train = f"{SUBJECT}: {source}", TrainConfig(batch_size=size.batch)
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
