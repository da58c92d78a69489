"""Measures how long a checkpoint stops training: written at once, or copied for a thread.

    python benchmarks/checkpoint_pause.py [--rounds 5] [--folder DIR]

The state is that of MoCo with a ResNet-50 (both encoders, momentum, a queue of 65,536), on the CPU.
Both ways take turns in one process, so that their ratio holds on a machine that does other work.
"""

import argparse
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from hardmix.models.backbones import build_backbone
from hardmix.runs.folder import Run
from hardmix.training.state import CheckpointWriter


def main() -> None:
    """Print the median pauses and their ratio."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument(
        "--folder", type=Path, help="disk to write to; a temporary folder if unset"
    )
    given = options.parse_args()
    tensors, writer = state(), CheckpointWriter()
    at_once, copied, writing = [], [], []
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        run = Run(folder)
        for number in range(given.rounds):
            started = time.perf_counter()
            size = run.save_checkpoint(2 * number, tensors, {})
            at_once.append(time.perf_counter() - started)
            started = time.perf_counter()
            writer.start(0, tensors, partial(run.save_checkpoint, 2 * number + 1, facts={}))
            copied.append(time.perf_counter() - started)
            written = writer.collect(wait=True)
            assert written is not None
            assert written.error is None
            writing.append(written.seconds)
    before, after = statistics.median(at_once), statistics.median(copied)
    print(
        f"{size / 1e6:.0f} MB: at once {before:.3f} s; copied {after:.3f} s, {before / after:.1f} x"
    )
    print(f"written meanwhile in {statistics.median(writing):.3f} s; medians of {given.rounds}")


def state() -> dict[str, torch.Tensor]:
    """Return tensors of the size of a checkpoint's."""
    weights = build_backbone("resnet50").trunk.state_dict()
    parts = ("query", "key", "momentum")
    tensors = {f"{part}.{name}": each.clone() for part in parts for name, each in weights.items()}
    return tensors | {"queue": torch.randn(65536, 128), "ids": torch.arange(65536)}


if __name__ == "__main__":
    main()
