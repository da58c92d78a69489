"""Measures a whole training step: encoders, momentum update, loss, backward, SGD, queue.

The steps of hardmix, official MoCo and lightly have the same signature here. hardmix's is the code
of `hardmix pretrain`. Images are precomputed noise: loader.py measures the cost of making views.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from benchmarks.images import listed
from benchmarks.jobs import SEED, BenchJob, Row, Setup, Tell
from benchmarks.lightly_peer import LightlyStep
from benchmarks.official import OfficialMoco, OfficialStep
from benchmarks.rounds import Block, milliseconds, take_turns
from hardmix.data.batches import Batch
from hardmix.models.backbones import build_backbone
from hardmix.models.encoders import HEADS
from hardmix.runs.folder import Run
from hardmix.runtime.console import silent
from hardmix.runtime.signals import StopRequest
from hardmix.settings.config import (
    DataConfig,
    MixConfig,
    ModelConfig,
    OptimizerConfig,
    PretrainConfig,
    TrainConfig,
)
from hardmix.settings.methods import MethodName
from hardmix.settings.named_choices import Precision
from hardmix.training.setup import Own, prepare
from hardmix.training.state import Training
from hardmix.training.step import take_step


class StepSize(NamedTuple):
    """Sizes of a training step: a network on images, K, and MoCHi's N, s, s'."""

    backbone: str
    batch: int
    image_size: int
    queue: int = 16384
    num_hardest: int = 1024
    num_pairs: int = 1024
    num_with_query: int = 128


RESNET18, RESNET50 = StepSize("resnet18-cifar", 64, 32), StepSize("resnet50", 16, 96)
ON_GPUS = (StepSize("resnet50", 32, 224), StepSize("resnet50", 128, 224))
"""More sizes on a GPU: a batch for which the host may be too slow, and the paper's whole batch."""
TINY = StepSize("small", 8, 32, 64, 16, 8, 4)
"""Size for --quick, and to run every line once before memory is measured."""
WARM_UPS = 2
STEPS_ON_GPU = 10
"""Steps in a block: a single step is too short to time there."""

Step = Callable[[Batch], Tensor]
"""A whole training step on a batch; returns the loss, without waiting for it."""
PeerStep = Callable[[Tensor, Tensor], Tensor]

OURS: dict[str, tuple[MethodName, Precision]] = {
    "mochi_fp32": ("mochi", "fp32"),
    "moco_fp32": ("moco-v2", "fp32"),
    "mochi_bf16": ("mochi", "bf16"),
    "moco_bf16": ("moco-v2", "bf16"),
}
TOGETHER = "_together"
"""Suffix of variants whose keys are normalised all together, as the peers do on one device, rather
than in four groups, which is hardmix's default and stands for the paper's four GPUs."""
PEERS = ("official", "lightly")
"""Both train plain MoCo in float32, as people run them."""


def variants(precisions: tuple[str, ...], lightly: bool) -> list[str]:
    """Return all variants that can be measured here, peers first."""
    peers = [name for name in PEERS if lightly or name != "lightly"]
    return peers + [name for name, (_, precision) in OURS.items() if precision in precisions]


def like_the_peers(names: list[str]) -> list[str]:
    """Return hardmix's MoCHi variants that do no more than the peers."""
    return [name + TOGETHER for name in names if name.startswith("mochi_")]


def build_step(variant: str, size: StepSize, device: str, folder: Path) -> Step:
    """Return a variant's step, from random weights and a full queue; `folder` is for its files."""
    torch.manual_seed(SEED)
    if variant in PEERS:
        peer = build_peer(variant, size, device)
        return lambda batch: peer(batch.query, batch.key)
    data = DataConfig(
        name="list",
        root=listed(folder, size.queue + 2 * size.batch),  # enough to avoid warnings
        image_size=size.image_size,
    )
    training = build_training(variant, size, device, data, folder / variant)

    def step(batch: Batch) -> Tensor:
        loss = take_step(training, batch, epoch=0)
        training.step += 1
        assert loss is not None, "a step on random images gave no loss"
        return loss

    return step


def build_peer(name: str, size: StepSize, device: str) -> PeerStep:
    """Return another project's step with the same network."""
    trunk, width = build_backbone(size.backbone)
    model, train = ModelConfig(), TrainConfig()
    if name == "lightly":
        return LightlyStep(trunk, width, size.queue, train.temperature, device)
    encoder = nn.Sequential(trunk, HEADS[model.head](width, model.dim))
    moco = OfficialMoco(encoder, model.dim, size.queue, model.key_momentum, train.temperature)
    return OfficialStep(moco.to(device), OptimizerConfig())


def build_training(
    variant: str, size: StepSize, device: str, data: DataConfig, run: Path
) -> Training:
    """Return hardmix's step as built by `hardmix pretrain`, with a full queue and mixing."""
    method, precision = OURS[variant.removesuffix(TOGETHER)]
    config = step_config(size, method, precision, device, data)
    if variant.endswith(TOGETHER):
        config = replace(config, model=replace(config.model, key_bn_splits=1))
    with silent():  # its warnings are about learning, and here only time is measured
        training = prepare(config, Run(run), Own(), StopRequest())
    fill_queue(training)
    return training


def step_config(
    size: StepSize, method: MethodName, precision: Precision, device: str, data: DataConfig
) -> PretrainConfig:
    """Return the paper's settings for ImageNet-100 except the sizes, mixing from the start."""
    return PretrainConfig(
        recipe="bench",
        method=method,
        data=data,
        model=ModelConfig(backbone=size.backbone),
        mix=MixConfig(
            num_hardest=size.num_hardest,
            num_pairs=size.num_pairs,
            num_with_query=size.num_with_query,
            warm_up_epochs=0,
        ),
        train=TrainConfig(
            batch_size=size.batch,
            queue_size=size.queue,
            precision=precision,
            device=device,
            seed=SEED,
        ),
    )


def fill_queue(training: Training) -> None:
    """Fill every slot with random keys: MoCHi does not mix unwritten ones."""
    memory = training.method.memory
    assert memory is not None
    memory.enqueue(normalize(torch.randn_like(memory.keys), dim=1))


def random_batch(size: StepSize, device: str) -> Batch:
    """Noise of the images' size, without labels."""
    shape = (size.batch, 3, size.image_size, size.image_size)
    generator = torch.Generator().manual_seed(SEED)
    query, key = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
    unknown = torch.full((size.batch,), -1, device=device)
    return Batch((query, key), unknown, unknown.clone())


# -- measuring


def label(size: StepSize) -> str:
    """Return a size as text."""
    return f"{size.backbone}, batch {size.batch}, {size.image_size} px"


def sizes(setup: Setup) -> list[StepSize]:
    """Return the sizes to measure steps at."""
    usual = [RESNET18, RESNET50]
    return [TINY] if setup.quick else usual if setup.device == "cpu" else [*usual, *ON_GPUS]


def plan(setup: Setup) -> list[BenchJob]:
    """Every variant at every size."""
    names = variants(setup.precisions, setup.lightly)
    names += like_the_peers(names)
    items = {label(size): size for size in sizes(setup)}
    return [step_job("step", setup, names, items, setup.rounds)]


def step_job(
    title: str, setup: Setup, names: list[str], items: dict[str, StepSize], rounds: int
) -> BenchJob:
    """Return a job of `measure`: these variants at these sizes, by name."""
    settings = {**setup.common, "rounds": rounds, "variants": names, "items": items}
    turns, allocator = rounds * len(items), setup.allocators[0]
    return BenchJob(title=title, kind="step", settings=settings, turns=turns, allocator=allocator)


def measure(settings: dict[str, Any], tell: Tell) -> list[Row]:
    """Every size, one after the other."""
    device, rows = settings["device"], []
    number = steps_in_block(device)
    for name, values in settings["items"].items():
        size = StepSize(*values)
        with TemporaryDirectory() as folder:
            batch = random_batch(size, device)
            blocks = {
                variant: block_of(
                    build_step(variant, size, device, Path(folder)), batch, number, device
                )
                for variant in settings["variants"]
            }
            row = take_turns(name, blocks, settings["rounds"], tell, WARM_UPS)
        rows.append({**row, "images": number * size.batch, "judged": True})
    return rows


def steps_in_block(device: str) -> int:
    """Return how many steps are timed together."""
    return STEPS_ON_GPU if device == "cuda" else 1


def block_of(step: Step, batch: Batch, number: int, device: str) -> Block:
    """Return a block that takes a number of steps."""

    def work() -> None:
        for _ in range(number):
            step(batch)

    return partial(milliseconds, work, device)
