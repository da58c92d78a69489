"""How long a whole training step takes: encoders, momentum update, loss, backward, SGD, queue.

hardmix's step is the code of `hardmix pretrain`. Images are precomputed noise: loader_speed.py
measures the cost of making views.
"""

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hardmix.bench.jobs import BenchJob, Row, Setup, Tell
from hardmix.bench.rounds import milliseconds, take_turns
from hardmix.bench.steps import (
    TINY,
    Step,
    StepSize,
    build_step,
    like_the_peers,
    random_batch,
    variants,
)
from hardmix.data.batches import Batch

RESNET18, RESNET50 = StepSize("resnet18-cifar", 64, 32), StepSize("resnet50", 16, 96)
WARM_UPS = 2
STEPS_ON_GPU = 10
"""Steps in a block: a single step is too short to time there."""


def label(size: StepSize) -> str:
    """Return a size as text."""
    return f"{size.backbone}, batch {size.batch}, {size.image_size} px"


def sizes(setup: Setup) -> list[StepSize]:
    """Return the sizes to measure steps at."""
    return [TINY] if setup.quick else [RESNET18, RESNET50]


def plan(setup: Setup) -> list[BenchJob]:
    """Every variant at every size."""
    names = variants(setup.precisions, setup.lightly)
    names += like_the_peers(names)
    items = {label(size): size for size in sizes(setup)}
    return [step_job("step", setup, names, items, setup.rounds)]


def step_job(
    title: str, setup: Setup, names: list[str], items: dict[str, StepSize], rounds: int
) -> BenchJob:
    """A job of `measure`: these variants at these sizes, by name."""
    settings = {**setup.common, "rounds": rounds, "variants": names, "items": items}
    turns, allocator = rounds * len(items), setup.allocators[0]
    return BenchJob(title=title, kind="step", settings=settings, turns=turns, allocator=allocator)


def measure(settings: dict[str, Any], tell: Tell) -> list[Row]:
    """Every size, one after the other."""
    device, rows = settings["device"], []
    number = STEPS_ON_GPU if device == "cuda" else 1
    for name, sizes in settings["items"].items():
        size = StepSize(*sizes)
        with TemporaryDirectory() as folder:
            batch = random_batch(size, device)
            blocks = {
                each: partial(
                    milliseconds,
                    partial(_repeat, build_step(each, size, device, Path(folder)), batch, number),
                    device,
                )
                for each in settings["variants"]
            }
            row = take_turns(name, blocks, settings["rounds"], tell, WARM_UPS)
        rows.append({**row, "images": number * size.batch, "judged": True})
    return rows


def _repeat(step: Step, batch: Batch, number: int) -> None:
    for _ in range(number):
        step(batch)
