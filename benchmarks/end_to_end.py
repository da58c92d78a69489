"""Images per second of training including loading, as in lightly's CIFAR-10 MoCo example.

A ResNet-18 with torchvision's own stem, batch 256, K 4096. The others train plain MoCo, hardmix
trains MoCHi. Each block starts its workers, trains at full speed, and stops them.
"""

from contextlib import closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.images import small_data
from benchmarks.jobs import SEED, BenchJob, Row, Setup, Tell
from benchmarks.lightly_peer import LightlyViews
from benchmarks.loader import FLOW, LoaderSize, Views, data_name, pil_batches, small_size
from benchmarks.official import OfficialViews
from benchmarks.rounds import Block, milliseconds, take_turns
from benchmarks.steps import (
    PEERS,
    TINY,
    PeerStep,
    StepSize,
    build_peer,
    build_training,
    variants,
)
from hardmix.data.image_set import ImageSet
from hardmix.data.sources import open_images
from hardmix.runs.folder import Run
from hardmix.runtime.console import Meter
from hardmix.training.pretrain import train_epoch
from hardmix.training.state import Training

EXAMPLE = StepSize("resnet18", 256, 32, queue=4096)
LEAST_STEPS, MOST_WORKERS = 8, 8
"""Steps in a block; and the example's number of workers, if there are cores for them."""
VIEWS: dict[str, type[OfficialViews] | type[LightlyViews]] = {
    "official": OfficialViews,
    "lightly": LightlyViews,
}


def label(size: StepSize) -> str:
    """Return a size as text."""
    return f"{size.backbone}, batch {size.batch}, K {size.queue}"


def plan(setup: Setup) -> list[BenchJob]:
    """Return the jobs: peers, and MoCHi in each precision."""
    names = [n for n in variants(setup.precisions, setup.lightly) if not n.startswith("moco_")]
    size = TINY if setup.quick else EXAMPLE
    load = small_size(setup)._replace(batch=size.batch)
    if not setup.quick:
        workers = min(MOST_WORKERS, setup.cores)
        load = load._replace(workers=workers, batches=max(LEAST_STEPS, FLOW * workers))
    settings = {**setup.common, "variants": names, "size": size, "loader": load}
    return [
        BenchJob(
            title="end to end",
            kind="end-to-end",
            settings=settings,
            turns=setup.rounds,
            allocator=setup.allocators[0],
        )
    ]


def measure(settings: dict[str, Any], tell: Tell) -> list[Row]:
    """Measure all variants in turn."""
    size, load = StepSize(*settings["size"]), LoaderSize(*settings["loader"])
    device = settings["device"]
    data = small_data(load.root, load.image_size, load.number)
    images = open_images(data)
    with TemporaryDirectory() as folder:
        blocks: dict[str, Block] = {}
        for name in settings["variants"]:
            torch.manual_seed(SEED)
            if name in PEERS:
                step, views = build_peer(name, size, device), VIEWS[name](load.image_size)
                blocks[name] = partial(peer_block, step, views, images, load, device)
            else:
                training = build_training(name, size, device, data, Path(folder) / name)
                Run.create(training.run.path, training.config)
                blocks[name] = partial(hardmix_block, training, load.batches, device)
        row = take_turns(label(size), blocks, settings["rounds"], tell)
    facts = {
        "images": load.batches * load.batch,
        "workers": load.workers,
        "data": data_name(load, images),
    }
    return [{**row, **facts, "judged": True}]


def peer_block(
    step: PeerStep, views: Views, images: ImageSet, load: LoaderSize, device: str
) -> float:
    """Return the milliseconds of a block of steps, after one that waits for the workers."""
    with closing(pil_batches(images, views, load, device)) as batches:
        step(*next(batches))

        def train() -> None:
            for _ in range(load.batches):
                step(*next(batches))

        return milliseconds(train, device)


def hardmix_block(training: Training, steps: int, device: str) -> float:
    """Return the milliseconds of the last steps of an epoch, trained by `hardmix pretrain`."""
    training.position = training.loader.steps_per_epoch - steps
    meter = Meter("end to end", steps, 0)
    return milliseconds(partial(train_epoch, training, 0, meter), device)
