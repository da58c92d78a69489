"""Messages of a training run: before, during and after."""

import json
import math
import shlex
import statistics
from typing import Any

import torch

from hardmix.data.datasets import data_name
from hardmix.data.image_set import ImageSet
from hardmix.runs.folder import Run
from hardmix.runs.reading import number
from hardmix.runtime.atomic_files import write_atomically
from hardmix.runtime.console import say, table, warn
from hardmix.runtime.cores import cpu_name
from hardmix.runtime.device import Compute, describe_device
from hardmix.runtime.distributed import is_main, world_size
from hardmix.runtime.profile import SKIPPED, Stopwatch
from hardmix.settings.config import PretrainConfig
from hardmix.settings.optimizer_options import OptimizerConfig
from hardmix.settings.saved import settings
from hardmix.settings.titles import method_title
from hardmix.training.state import Training

SKIPPED_SHOWN = 20
"""Unreadable images that have a line each."""


def progress_text(line: dict[str, Any], config: PretrainConfig) -> tuple[str, str]:
    """Return the progress in a few words, and more for whoever has room for it."""
    text = f"epoch {line['epoch'] + 1}/{config.train.last_epoch} loss {line['loss']:.3f}"
    more = ""
    if "proxy_accuracy" in line:
        if config.method in ("moco-v1", "moco-v2", "mochi"):
            more = f"(chance {math.log(1 + config.train.queue_size):.2f}) "
        more += f"proxy {line['proxy_accuracy']:.0%}"
    if "queue_filled" in line:
        more += f" queue {line['queue_filled']:.0%}"
    return f"{text} {line['images_per_second']:.0f} images/s", more


def describe_start(
    config: PretrainConfig, images: ImageSet | None, compute: Compute, run: Run
) -> None:
    """Print what will be run."""
    data = "shards" if images is None else f"{images.name}, {len(images)} images"
    if images is not None and images.name == "imagenet100":
        data += f" of the paper's {len(images.classes or ())} classes"
    views = config.data.augmentation if config.data.views is None else config.data.views
    rows = [
        ["method", method_title(settings(config))],
        ["data", f"{data}, {config.data.image_size} px, {views} views"],
        ["backbone", config.model.backbone],
        ["batch", f"{config.train.batch_size}"],
        ["processes", f"{world_size()}, {config.train.batch_size // world_size()} images each"],
        ["epochs", f"{config.train.last_epoch} of {config.train.epochs}"],
        ["optimizer", _optimizer(config.optimizer)],
        ["precision", compute.reason],
        ["device", describe_device(compute.device, config.train.deterministic)],
    ]
    if config.uses("train.queue_size"):
        negatives = "queue" if config.uses("train.queue_start") else "negatives"
        numbers = f"{config.train.queue_size}, {config.train.temperature}"
        rows.append([f"{negatives}, temperature", numbers])
    if config.uses("model.head"):
        rows.append(["head", f"{config.model.head}, {config.model.dim} dimensions"])
    if config.uses("model.key_bn_splits"):
        groups = max(config.model.key_bn_splits, world_size())
        rows.append(["key batch norm", f"{groups} groups, normalised separately"])
    rows.append(["folder", str(run.path)])
    table(f"hardmix pretrain {config.recipe}", ["setting", "value"], rows)


def _optimizer(config: OptimizerConfig) -> str:
    warm_up = f", {config.warm_up_epochs:g} epochs of warm-up" if config.warm_up_epochs else ""
    return f"{config.name}, learning rate {config.lr:g}, {config.schedule}{warm_up}"


def summarize(
    training: Training, verdict: dict[str, Any] | None, peak_mb: float | None = None
) -> None:
    """Print the result, the verdict on the encoder, and what to try next."""
    if not is_main():
        return
    config, run, unreadable = training.config, training.run, training.loader.unreadable
    lines = run.metrics()
    # A log may have been damaged or written by another program before the run was resumed.
    knn, loss, speeds = (
        [value for line in lines if (value := number(line.get(name))) is not None]
        for name in ("knn", "loss", "images_per_second")
    )
    result = {
        "steps": training.step,
        "seconds": training.seconds,
        "images_per_second": statistics.median(speeds) if speeds else None,
        "peak_mb": peak_mb,
        "loss": loss[-1] if loss else None,
        "knn": knn[-1] if knn else None,
        "unreadable": list(unreadable.values()),
        "seed": config.train.seed,
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
    }
    run.write_result("pretrain", result)
    shown = f", k-NN accuracy {knn[-1]:.3f}" if knn else ""
    say(f"Done: {training.step} steps in {training.seconds:.0f} s{shown}. Wrote {run.encoder_file}")
    if unreadable:
        _tell_unreadable(list(unreadable.values()), run)
    if verdict is not None:
        _tell_verdict(verdict)
    _tell_next(config, run)


def _tell_verdict(verdict: dict[str, Any]) -> None:
    say(f"Verdict: {verdict['text']}")
    if verdict["next"]:
        say("What may help, the likeliest first:")
    for advice in verdict["next"]:
        say(f"  {advice}")
    if verdict.get("mixing"):
        say(f"Mixing: {verdict['mixing']}")


def _tell_next(config: PretrainConfig, run: Run) -> None:
    folder = shlex.quote(str(run.path))
    elsewhere = data_name(config.data) in ("shards", "own")
    root = " --data.root FOLDER" if elsewhere else ""
    say("Next:")
    say(f"  hardmix report {folder} --out report.html")
    say(f"  hardmix explore {folder}{root} --out explore.html")
    say(f"  hardmix neighbours {folder} IMAGE{root} --out neighbours.png")
    longer = f"--resume --train.epochs {2 * config.train.last_epoch}"
    say(f"  hardmix pretrain --out {folder} {longer}")


def _tell_unreadable(reasons: list[str], run: Run) -> None:
    """One on each line, as far as a screen has room for them."""
    say(f"Skipped {len(reasons)} unreadable image{'s' * (len(reasons) > 1)}:")
    for reason in reasons[:SKIPPED_SHOWN]:
        say(f"  {reason}")
    if reasons[SKIPPED_SHOWN:]:
        say(f"  and {len(reasons) - SKIPPED_SHOWN} others: {run.results / 'pretrain.json'}")


def tell_profile(run: Run, stopwatch: Stopwatch | None) -> None:
    """Print where the time of a step went, and write RUN/profile.json."""
    if stopwatch is None or not is_main():
        return
    profile = stopwatch.profile()
    if profile.steps == 0:
        warn(f"train.profile: nothing was measured; the first {SKIPPED} steps are skipped.")
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
        rows.append(["in workers", f"{profile.workers:.1f}", "in parallel"])
    table(f"Time of {profile.steps} steps", ["part", "ms per step", "share"], rows)
