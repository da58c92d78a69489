"""Measures a training step of SimCLR, BYOL and SwAV, compared with lightly's.

Network, batch, views, head and loss are the same; images are precomputed noise. hardmix's step is
the code of `hardmix pretrain`.
"""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks import lightly_peer
from benchmarks.images import listed
from benchmarks.jobs import SEED, BenchJob, Row, Setup, Tell
from benchmarks.rounds import take_turns
from benchmarks.steps import (
    RESNET18,
    TINY,
    WARM_UPS,
    Step,
    StepSize,
    block_of,
    label,
    random_batch,
    steps_in_block,
)
from hardmix.data.batches import Batch
from hardmix.methods.base import method_class
from hardmix.models.backbones import build_backbone
from hardmix.runs.folder import Run
from hardmix.runtime.signals import StopRequest
from hardmix.settings.config import DataConfig, MixConfig, ModelConfig, PretrainConfig, TrainConfig
from hardmix.settings.methods import METHOD_FACTS, ByolOptions, MethodOptions, SwavOptions
from hardmix.settings.named_choices import Precision
from hardmix.training.setup import Own, prepare
from hardmix.training.step import take_step

COMPARED = ("simclr", "byol", "swav")
HIDDEN, PROTOTYPES, SMALL_CROPS = 1024, 512, 2
"""BYOL's hidden units as in lightly's example; SwAV's prototypes and small crops, of half size."""


def setting(method: str, size: StepSize) -> str:
    """Return a method and a size as text."""
    return f"{METHOD_FACTS[method].title}, {label(size)}"


def plan(setup: Setup) -> list[BenchJob]:
    """One job for each method: lightly's step, and ours in every precision."""
    size = TINY if setup.quick else RESNET18
    jobs = []
    for method in COMPARED:
        ours = [f"{method}_{precision}" for precision in setup.precisions]
        names = [f"lightly_{method}", *ours] if setup.lightly else ours
        settings = {**setup.common, "rounds": setup.rounds, "variants": names}
        settings |= {"method": method, "size": size, "setting": setting(method, size)}
        jobs.append(
            BenchJob(
                title=method,
                kind="methods",
                settings=settings,
                turns=setup.rounds,
                allocator=setup.allocators[0],
            )
        )
    return jobs


def measure(settings: dict[str, Any], tell: Tell) -> list[Row]:
    """All variants of a method in turn."""
    device, method, size = settings["device"], settings["method"], StepSize(*settings["size"])
    number = steps_in_block(device)
    with TemporaryDirectory() as folder:
        batch = batch_of(method, size, device)
        blocks = {
            name: block_of(build(name, method, size, device, Path(folder)), batch, number, device)
            for name in settings["variants"]
        }
        row = take_turns(settings["setting"], blocks, settings["rounds"], tell, WARM_UPS)
    return [{**row, "images": number * size.batch, "judged": True}]


def build(name: str, method: str, size: StepSize, device: str, folder: Path) -> Step:
    """Return a variant's step, from random weights."""
    torch.manual_seed(SEED)
    config = config_of(method, size, device, listed(folder, 4 * size.batch))
    if not name.startswith("lightly"):
        precision: Precision = "bf16" if name.endswith("bf16") else "fp32"
        config = replace(config, train=replace(config.train, precision=precision))
        training = prepare(config, Run(folder / name), Own(), StopRequest())

        def step(batch: Batch) -> torch.Tensor:
            loss = take_step(training, batch, epoch=1)
            training.step += 1
            assert loss is not None, "a step on random images gave no loss"
            return loss

        return step
    trunk, width = build_backbone(size.backbone)
    dim, temperature = config.model.dim, config.train.temperature
    if method == "simclr":
        peer = lightly_peer.simclr(trunk, width, dim, temperature, device)
    elif method == "byol":
        momentum = config.model.key_momentum
        peer = lightly_peer.byol(trunk, width, dim, HIDDEN, momentum, device)
    else:
        peer = lightly_peer.swav(trunk, width, dim, PROTOTYPES, device)
    return lambda batch: peer(*batch.views)


def config_of(method: str, size: StepSize, device: str, root: str | None = None) -> PretrainConfig:
    """Return the config of hardmix's step: SGD, and what lightly's example has."""
    options: dict[str, MethodOptions] = {
        "byol": ByolOptions(hidden=HIDDEN),
        "swav": SwavOptions(
            prototypes=PROTOTYPES,
            small_crops=SMALL_CROPS,
            small_size=size.image_size // 2,
            queue_size=0,
        ),
    }
    return PretrainConfig(
        recipe="bench",
        method=method,
        options=options.get(method),
        data=DataConfig(name="list", root=root, image_size=size.image_size),
        model=ModelConfig(
            backbone=size.backbone, head="mlp-bn", dim=256 if method == "byol" else 128
        ),
        mix=MixConfig(num_pairs=0, num_with_query=0),
        train=TrainConfig(batch_size=size.batch, temperature=0.1, device=device, seed=SEED),
    )


def batch_of(method: str, size: StepSize, device: str) -> Batch:
    """Noise in the shape of the method's views."""
    batch = random_batch(size, device)
    kinds = method_class(method).view_kinds(config_of(method, size, device))
    small = [
        torch.randn(size.batch, 3, kind.size, kind.size, device=device)
        for kind in kinds
        if kind.size
        for _ in range(kind.number)
    ]
    return batch._replace(views=(*batch.views, *small))
