"""Counts what a training step asks of a GPU, on a simulated one: a table of docs/performance.md.

    python -m benchmarks.gpu_counts

ResNet-50, 32 images, K = 16384, MoCHi (1024, 1024, 128), in one process. Images have 64 pixels:
their size changes no count. The loss alone is that of raw vectors. The peers' views are made by
worker processes on CPUs; ours are made on the GPU and counted separately.
"""

import logging
import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

import torch

from benchmarks.steps import StepSize, build_step, random_batch
from gpu_events import gpu
from hardmix import MemoryQueue, MochiLoss
from hardmix.data.views import colour_views, make_views
from hardmix.settings.config import DataConfig
from pretended_gpu import DeviceLog

SIZE = StepSize("resnet50", 32, 64)
STEPS = {
    "official MoCo, step": "official",
    "lightly's MoCo, step": "lightly",
    "hardmix, MoCo's step": "moco_fp32",
    "hardmix, MoCHi's step": "mochi_fp32",
    "the same, keys normalised together": "mochi_fp32_together",
    "hardmix, MoCHi's step in bf16": "mochi_bf16",
    "the same in bf16, keys normalised together": "mochi_bf16_together",
}


def main() -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    logging.disable()
    sys.stdout.write("| | reads | blocking copies | launches |\n|---|---|---|---|\n")
    for name, variant in STEPS.items():
        log = counted_step(variant, SIZE)
        show(name, log)
        if variant == "mochi_fp32":
            show("the same without the loss itself", outside_the_loss(log))
    for batch in (32, 256):
        count_loss(batch)
    count_views()


def counted_step(variant: str, size: StepSize) -> DeviceLog:
    """Return what a variant's second step does."""
    with gpu() as log, tempfile.TemporaryDirectory() as folder:
        step = build_step(variant, size, "cuda", Path(folder))
        batch = random_batch(size, "cuda")
        step(batch)
        log.clear()
        step(batch)
    return log


def count_loss(batch: int) -> None:
    """Count the loss by itself, with PyTorch's random numbers, forward and backward."""
    with gpu() as log:
        query = torch.randn(batch, 128, device="cuda", requires_grad=True)
        key = torch.randn(batch, 128, device="cuda")
        negatives = MemoryQueue.prefilled(torch.randn(SIZE.queue, 128)).to("cuda")
        log.clear()
        MochiLoss()(query, key, negatives).backward()
        show(f"hardmix, the loss by itself, {batch} queries", log)


def count_views() -> None:
    """Count colours, and the crops of images in memory."""
    config, ids = DataConfig(image_size=64), torch.arange(32)
    with gpu() as log:
        crops = torch.randint(0, 256, (2, 32, 3, 64, 64), dtype=torch.uint8).to("cuda")
        images = torch.randint(0, 256, (32, 3, 72, 80), dtype=torch.uint8).to("cuda")
        for name, make, pixels in [
            ("hardmix, colour and blur of two views", colour_views, crops),
            ("the same with the crops of images in memory", make_views, images),
        ]:
            make(pixels, ids, config, 0, 0)
            log.clear()
            make(pixels, ids, config, 0, 1)
            show(name, log)


def outside_the_loss(log: DeviceLog) -> DeviceLog:
    """Return the operations that were not done in hardmix.mixing."""
    kept = {
        name: [entry for entry in entries if not entry.place.startswith("mixing/")]
        for name, entries in vars(log).items()
    }
    return DeviceLog(**kept)


def show(name: str, log: DeviceLog) -> None:
    """Print a line of the table."""
    counts = (log.synchronisations, log.blocking_copies, log.launches)
    numbers = " | ".join(str(len(entries)) for entries in counts)
    sys.stdout.write(f"| {name} | {numbers} |\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
