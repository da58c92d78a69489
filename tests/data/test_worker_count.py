"""The number of workers where data.workers is unset: by cores, memory and where the images are."""

import os
from types import SimpleNamespace

import pytest
import torch

from hardmix.data import workers
from hardmix.data.image_set import ImageSet
from hardmix.data.loading import ViewLoader
from hardmix.data.workers import choose_workers
from hardmix.runtime import launch
from hardmix.settings.config import DataConfig

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def on_cores(monkeypatch):
    """Pretend that this process has `cores` cores, and room in /dev/shm."""

    def has(number: int, shared: float = 1e12) -> None:
        monkeypatch.setattr(workers, "cores_per_process", lambda: number)
        monkeypatch.setattr(workers, "_free_shared", lambda: shared)

    return has


@pytest.mark.parametrize(
    ("number", "device", "said"),
    [
        (1, CPU, "no workers: 1 core for each process, which trains on it"),
        (1, GPU, "1 worker: 1 core for each process, while the GPU trains"),
        (2, CPU, "1 worker: 2 cores for each process, one trains"),
        (4, CPU, "3 workers: 4 cores for each process, one trains"),
        (17, GPU, "16 workers: 17 cores for each process, one trains"),
        (128, GPU, "16 workers: 128 cores for each process, more are seldom needed"),
    ],
)
def test_one_fewer_than_the_cores_and_the_reason_is_said(on_cores, number, device, said):
    on_cores(number)
    assert str(choose_workers(None, device)) == said


def test_what_is_asked_for_is_done(on_cores):
    on_cores(4, shared=0)
    for asked in (0, 1, 9):
        choice = choose_workers(asked, CPU, held=True, batch_bytes=10)
        assert choice == (asked, f"data.workers={asked}")


def test_waiting_batches_leave_half_of_the_shared_memory_free(on_cores):
    on_cores(8, shared=1e9)
    assert choose_workers(None, CPU, batch_bytes=10_000_000).number == 7
    few = choose_workers(None, CPU, batch_bytes=100_000_000)
    assert str(few) == (
        "2 workers: more would not fit in /dev/shm (100 MB per batch, 1000 MB free)"
    )
    on_cores(8, shared=64e6)  # as Docker has it by default
    assert choose_workers(None, CPU, batch_bytes=154_000_000).number == 0


def test_images_held_in_memory_need_none_whatever_is_asked(on_cores):
    on_cores(4)
    images = ImageSet("own", None, None, tensor=torch.zeros(8, 3, 16, 16, dtype=torch.uint8))
    for asked in (None, 2):
        loader = ViewLoader(images, DataConfig(image_size=16, workers=asked), 4, 0, CPU)
        assert loader.reading() == "no workers: the images are small and held in memory"


def test_processes_of_a_machine_share_its_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    torchrun = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
    srun = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}
    assert launch.cores_per_process({}) == 16
    assert launch.cores_per_process(torchrun) == 4
    assert launch.cores_per_process(torchrun | {"SLURM_CPUS_PER_TASK": "16"}) == 4
    assert launch.cores_per_process(srun) == 4
    assert launch.cores_per_process(srun | {"SLURM_CPUS_PER_TASK": "7"}) == 7
    assert launch.cores_per_process(torchrun | {"LOCAL_WORLD_SIZE": "64"}) == 1


def test_a_system_without_shared_memory_sets_no_limit(monkeypatch):
    def missing(_: str) -> SimpleNamespace:
        raise FileNotFoundError

    monkeypatch.setattr(os, "statvfs", missing)
    monkeypatch.setattr(workers, "cores_per_process", lambda: 4)
    assert choose_workers(None, CPU, batch_bytes=10**15).number == 3
