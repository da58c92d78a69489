"""What a training run says: before, while and after."""

import importlib.util
import json
import math
from typing import Any

from hardmix.data.datasets import ImageSet
from hardmix.errors import InputError
from hardmix.runs.folder import Run
from hardmix.runtime.atomic_files import write_atomically
from hardmix.runtime.console import say, table, warn
from hardmix.runtime.device import Compute
from hardmix.runtime.distributed import is_main, world_size
from hardmix.runtime.profile import SKIPPED, Stopwatch
from hardmix.settings.config import PretrainConfig

COLLAPSED = 0.05
"""Spread of the keys (1 for a uniform sphere) below which all images look the same."""


def last_epoch(config: PretrainConfig) -> int:
    """How many epochs of the schedule are trained."""
    stop = config.train.stop_epoch
    return config.train.epochs if stop is None else min(stop, config.train.epochs)


def watch(line: dict[str, Any]) -> None:
    """Warn of a collapse: every image has the same key."""
    if line.get("spread", 1.0) < COLLAPSED and line["epoch"] > 0:
        warn(
            f"step {line['step']}: the keys have collapsed (spread {line['spread']:.3f}, 1 is"
            " uniform): lower optimizer.lr, or raise model.key_momentum."
        )


class Board:
    """TensorBoard's copy of metrics.jsonl, or nothing where train.tensorboard is off."""

    def __init__(self, config: PretrainConfig) -> None:
        self._writer: Any = None
        if config.train.tensorboard and importlib.util.find_spec("tensorboard") is None:
            raise InputError(
                "train.tensorboard needs TensorBoard, which is not installed:"
                " pip install 'hardmix[tensorboard]'."
            )
        self._wanted = config.train.tensorboard

    def open(self, run: Run, step: int) -> None:
        """Begin after `step`; what a stopped run wrote beyond it is dropped."""
        if self._wanted and is_main():
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(run.path / "tensorboard"), purge_step=step + 1)

    def show(self, line: dict[str, Any]) -> None:
        """Every number of a line of metrics.jsonl, by its name."""
        if self._writer is not None:
            for name, value in line.items():
                if name != "step":
                    self._writer.add_scalar(name, value, line["step"])
            self._writer.flush()


def progress_text(line: dict[str, Any], config: PretrainConfig) -> str:
    """How it goes, on one line."""
    text = f"epoch {line['epoch'] + 1}/{last_epoch(config)} loss {line['loss']:.3f}"
    if "proxy_accuracy" in line:
        chance = math.log(1 + config.train.queue_size)
        text += f" (chance {chance:.2f}) proxy {line['proxy_accuracy']:.0%}"
        text += f" queue {line['queue_filled']:.0%}"
    return f"{text} {line['images_per_second']:.0f} images/s"


def describe_start(
    config: PretrainConfig, images: ImageSet | None, compute: Compute, run: Run
) -> None:
    """What will be run, before it is."""
    mixing = f"({config.mix.num_hardest}, {config.mix.num_pairs}, {config.mix.num_with_query})"
    groups = max(config.model.key_bn_splits, world_size())
    data = "shards" if images is None else f"{images.name}, {len(images)} images"
    rows = [
        ["method", config.method + (f" {mixing}" if config.method == "mochi" else "")],
        ["oracle", "yes" if config.oracle else "no"],
        ["data", f"{data}, {config.data.image_size} px, {config.data.augmentation} views"],
        ["backbone", f"{config.model.backbone}, {config.model.head} head"],
        ["batch, queue", f"{config.train.batch_size}, {config.train.queue_size}"],
        ["processes", f"{world_size()}, {config.train.batch_size // world_size()} images each"],
        ["epochs", f"{last_epoch(config)} of {config.train.epochs}, {config.optimizer.schedule}"],
        ["learning rate", f"{config.optimizer.lr}"],
        ["temperature", f"{config.train.temperature}"],
        ["precision", compute.reason],
        ["key batch norm", f"{groups} groups, each normalised alone"],
        ["folder", str(run.path)],
    ]
    table(f"hardmix pretrain {config.recipe}", ["setting", "value"], rows)


def summarize(
    config: PretrainConfig, run: Run, step: int, seconds: float, unreadable: dict[int, str]
) -> None:
    """What came out, and what to try next."""
    if not is_main():
        return
    lines = run.metrics()
    knn = [line["knn"] for line in lines if "knn" in line]
    loss = [line["loss"] for line in lines if "loss" in line]
    result = {
        "steps": step,
        "seconds": seconds,
        "loss": loss[-1] if loss else None,
        "knn": knn[-1] if knn else None,
        "unreadable": list(unreadable.values()),
        "seed": config.train.seed,
    }
    run.write_result("pretrain", result)
    shown = f", k-NN accuracy {knn[-1]:.3f}" if knn else ""
    say(f"Done: {step} steps in {seconds:.0f} s{shown}. Wrote {run.encoder_file}")
    if unreadable:
        say(f"Skipped {len(unreadable)} unreadable images: {', '.join(unreadable.values())}"[:500])
    say("Next:")
    if knn:
        say(f"  hardmix knn {run.path} --baseline pixels untrained")
        say(f"  hardmix linear {run.path}")
    say(f"  hardmix features {run.path} --data.root FOLDER --out features.csv")
    longer = f"--resume --train.epochs {2 * last_epoch(config)}"
    say(f"  hardmix pretrain --out {run.path} {longer}")


def tell_profile(run: Run, stopwatch: Stopwatch | None) -> None:
    """Where the time of a step went: a table, and RUN/profile.json."""
    if stopwatch is None or not is_main():
        return
    profile = stopwatch.profile()
    if profile.steps == 0:
        warn(f"train.profile: nothing was measured; the first {SKIPPED} steps do not count.")
        return
    share = {name: value / profile.whole for name, value in profile.parts.items()}
    found = {
        "steps": profile.steps,
        "step_ms": profile.whole,
        "parts": {name: {"ms": profile.parts[name], "share": share[name]} for name in share},
        "workers_ms": profile.workers,
    }
    write_atomically(run.path / "profile.json", (json.dumps(found, indent=2) + "\n").encode())
    rows = [[name, f"{profile.parts[name]:.1f}", f"{share[name]:.1%}"] for name in share]
    rows.append(["step", f"{profile.whole:.1f}", "100.0%"])
    if profile.workers:
        rows.append(["in workers", f"{profile.workers:.1f}", "beside"])
    table(f"Where the time goes, of {profile.steps} steps", ["part", "ms a step", "share"], rows)
