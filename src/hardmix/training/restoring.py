"""Resuming: rank 0 reads the newest intact checkpoint and sends it to the other ranks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hardmix.data.changed_data import describe_change
from hardmix.errors import InputError
from hardmix.runs.checkpoints import BITS, share_optimizer
from hardmix.runs.reading import number
from hardmix.runtime.console import say, warn
from hardmix.runtime.distributed import (
    broadcast,
    broadcast_text,
    is_main,
    rank,
    share_state,
    world_size,
)
from hardmix.training.state import Training


def restore(training: Training, *, allow_changed_data: bool = False) -> bool:
    """Restore the newest intact checkpoint; return False if there is none yet.

    Rank 0 reads it and sends it to the others, which do not need access to the folder.
    """
    found = training.run.load_checkpoint() if is_main() else None
    manifest = json.loads(broadcast_text(json.dumps(found and found.manifest)))
    if manifest is None:
        training.run.forget_after(-1)
        return False
    for name in found.broken if found else ():
        warn(f"{name} does not match its checksum: using the checkpoint before it.")
    _check_facts(training.run.checkpoints, manifest)
    changed = _check_data(training, manifest, allow_changed_data)
    tensors = found.tensors if found else {}
    _load_method(training, tensors)
    _load_optimizer(training, tensors)
    _load_losses(training, tensors)
    for name, value in {} if training.scaler is None else training.scaler.tensors().items():
        broadcast(value.copy_(tensors.get(f"scaler.{name}", value)))
    training.step, training.seconds = manifest["step"], manifest.get("seconds", 0.0)
    steps = training.loader.steps_per_epoch
    epoch, position = divmod(training.step, steps)  # of format 1, which saved at epochs' ends
    training.epoch, training.position = (
        manifest.get("epoch", epoch),
        manifest.get("position", position),
    )
    training.skipped, training.best = manifest.get("skipped", 0), manifest.get("best")
    if changed:
        _forget_numbers(training, steps)
    training.saved.step = training.step
    training.run.forget_after(training.step, manifest.get("logs"))
    before = manifest.get("processes", 1)
    if before != world_size():
        say(
            f"This run had {before} processes and now has {world_size()}: the images are the same,"
            " results may differ in the last bits."
        )
    if manifest.get("bits", 1) != BITS:
        say(
            "This run was saved by an older hardmix, which drew different random numbers: results"
            " will not be bit-identical to an uninterrupted run."
        )
    say(f"Resuming from step {training.step}.")
    return True


def _check_facts(folder: Path, manifest: dict[str, Any]) -> None:
    """Raise InputError if a fact is not of its kind: a checksum says only that nobody changed it.

    Older versions saved fewer facts.
    """
    for name, kind in FACTS.items():
        if name in manifest and not kind(manifest[name]):
            raise InputError(
                f"{folder}/step-{manifest['step']:08d}.json holds {name}="
                f"{str(manifest[name])[:60]}, which hardmix does not write: delete the file to"
                " resume from the checkpoint before it."
            )


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < MOST_STEPS


def _is_best(value: object) -> bool:
    return value is None or (
        isinstance(value, dict)
        and isinstance(value.get("checkpoint"), str)
        and number(value.get("knn")) is not None
    )


def _are_lengths(value: object) -> bool:
    return isinstance(value, dict) and all(_is_count(each) for each in value.values())


MOST_STEPS = 2**53
FACTS: dict[str, Callable[[object], bool]] = {
    "step": _is_count,
    "epoch": _is_count,
    "position": _is_count,
    "skipped": _is_count,
    "processes": _is_count,
    "bits": _is_count,
    "seconds": lambda value: number(value) is not None,
    "best": _is_best,
    "logs": _are_lengths,
    "data": lambda value: isinstance(value, str),
}
"""What a manifest says, and whether it is of its kind."""


def _check_data(training: Training, manifest: dict[str, Any], allowed: bool) -> bool:
    mark = training.data.mark
    if manifest.get("data") == mark:
        return False
    change = broadcast_text(describe_change(training.run.images_file, training.data))
    said = f"the images have changed since the run was started: {change}"
    if not allowed:
        raise InputError(
            f"{said}. Resume with the same images, start a new run, or accept the change with"
            " --allow-changed-data."
        )
    warn(f"{said}. Continuing with the current images.")
    return True


def _load_method(training: Training, tensors: dict[str, Tensor]) -> None:
    if is_main():
        state = {
            name.removeprefix("objective."): tensor
            for name, tensor in tensors.items()
            if name.startswith("objective.")
        }
        try:
            training.method.load_state_dict(state)
        except RuntimeError as error:
            raise InputError(
                f"the checkpoint in {training.run.checkpoints} does not fit this network"
                f" ({str(error).splitlines()[-1].strip()}): resume with the network and classes it"
                " was trained with."
            ) from error
    share_state(training.method)


def _load_optimizer(training: Training, tensors: dict[str, Tensor]) -> None:
    prefix = "optimizer."
    saved = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
    try:
        share_optimizer(training.optimizer, saved)
    except (IndexError, RuntimeError) as error:
        raise InputError(
            f"the checkpoint in {training.run.checkpoints} does not fit the optimizer: resume with"
            " the network and optimizer it was trained with."
        ) from error


def _load_losses(training: Training, tensors: dict[str, Tensor]) -> None:
    """Restore each rank's own losses; if the number of ranks has changed, their mean."""
    saved = tensors.get("losses", torch.zeros(0, 0)).double()
    shape = json.loads(broadcast_text(json.dumps(list(saved.shape))))
    saved = broadcast(saved.clone() if is_main() else torch.zeros(shape, dtype=torch.float64))
    mine = saved[rank()] if len(saved) == world_size() else saved.sum(dim=0) / max(1, len(saved))
    training.losses = list(mine.float().to(training.compute.device).unbind())


def _forget_numbers(training: Training, steps: int) -> None:
    """Drop what depends on image and class numbers and on the length of an epoch."""
    training.position = min(training.position, steps)
    training.method.forget_images()
