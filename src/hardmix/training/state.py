"""The state of a run between two steps, and how it is saved and stopped.

A checkpoint holds everything the next step depends on, except random numbers, which are functions
of (seed, step). Each rank has batch norm's running statistics of its own rows; those of rank 0 are
saved and evaluated. Training does not read them.
"""

import dataclasses
import hashlib
import math
import shlex
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hardmix.data.batches import Loader
from hardmix.data.changed_data import DataRecord
from hardmix.data.image_set import ImageSet
from hardmix.errors import InputError, OutputError, UnfinishedError
from hardmix.methods.base import Method, StepOutcome
from hardmix.runs.checkpoints import BITS, optimizer_tensors
from hardmix.runs.folder import Run
from hardmix.runtime.console import say, warn
from hardmix.runtime.device import Compute
from hardmix.runtime.distributed import (
    agree_on_max,
    broadcast_text,
    gather,
    is_main,
    world_size,
)
from hardmix.runtime.signals import StopRequest
from hardmix.settings.config import PretrainConfig
from hardmix.training.checkpoint_writer import CheckpointWriter
from hardmix.training.knn_images import KnnImages
from hardmix.training.learning import LearningWatch
from hardmix.training.loss_scaler import LossScaler
from hardmix.training.metric_logs import MetricLog
from hardmix.training.nan_guard import (
    MOST_SKIPPED,
    PendingStep,
    StepSnapshot,
    keep_for_inspection,
    likely_reasons,
    some,
)
from hardmix.training.optimizers import parameters_of
from hardmix.training.unsaved import GONE, Saved, end_if_gone

SAVE, STOP = 1, 2
"""What a rank may ask of all ranks; the highest request wins."""


@dataclass
class Training:
    """Everything a run is made of, between two steps."""

    config: PretrainConfig
    run: Run
    logs: list[MetricLog]
    compute: Compute
    images: ImageSet | None
    loader: Loader
    method: Method
    optimizer: torch.optim.Optimizer
    snapshot: StepSnapshot
    late: bool
    """Whether a step's verdict is read a step later."""
    scaler: LossScaler | None
    """The loss scaler, for train.precision=fp16 only."""
    stop: StopRequest
    watch: LearningWatch
    """Looks for signs that nothing is learnt."""
    knn_images: KnnImages | None = None
    """Labelled images that k-NN accuracy is measured on during training, if there are any."""
    own_trunk: bool = False
    """Whether the network was passed by a program, and cannot be built from its name."""
    starts_from_weights: bool = False
    """Whether the trunk's first weights were not random, as far as known."""
    opened: list[MetricLog] = field(default_factory=list)
    """The members of `logs` that must be closed."""
    data: DataRecord = field(default=DataRecord("", None))
    """The images as they were when the run started."""
    step: int = 0
    epoch: int = 0
    """Finished epochs, including the measurements at their ends."""
    position: int = 0
    """Steps done in the current epoch."""
    losses: list[Tensor] = field(default_factory=list)
    """This rank's losses since the last line of metrics.jsonl."""
    outcomes: list[StepOutcome] = field(default_factory=list)
    """Outcomes of the last step, part by part, if its measures will be logged."""
    pending: PendingStep | None = None
    """The last step, while it is not yet known whether its gradients were finite."""
    skipped: int = 0
    """Steps skipped in a row (train.on_nan=skip)."""
    best: dict[str, Any] | None = None
    """The checkpoint with the highest k-NN accuracy."""
    seconds: float = 0.0
    saved_at: float = field(default_factory=time.monotonic)
    saved: Saved = field(default_factory=Saved)
    """What has been written to disk."""
    writer: CheckpointWriter = field(default_factory=CheckpointWriter)


def pause(training: Training) -> None:
    """Save or stop between two steps, if the clock or a signal on any rank asks for it."""
    minutes = training.config.train.save_minutes
    due = bool(minutes) and time.monotonic() - training.saved_at > 60 * minutes and is_main()
    report_checkpoint(training, wait=False)
    gone = GONE if not training.run.is_in_place() else 0
    wanted = agree_on_max(gone or (STOP if training.stop else SAVE if due else 0))
    end_if_gone(wanted, training.run, training.step)
    if wanted:
        save_checkpoint(training)
    if wanted == STOP:
        report_checkpoint(training)
        reason = training.stop.name or "a signal to another rank"
        lost = broadcast_text(training.saved.lost_stop(training.run, training.step))
        if lost:
            raise OutputError(f"stopped by {reason}, but {lost}")
        raise UnfinishedError(
            f"stopped by {reason} after step {training.step}: hardmix pretrain"
            f" --out {shlex.quote(str(training.run.path))} --resume continues from there."
        )


def save_checkpoint(training: Training) -> None:
    """Save everything a resumed run needs: it is copied here, and written while training continues.

    A disk that is full or fails costs this checkpoint, not the run.
    """
    settle(training)
    losses = gather(torch.stack(training.losses)[None]) if training.losses else None
    training.saved_at = time.monotonic()
    if not is_main():
        return
    tensors = {f"objective.{k}": v for k, v in training.method.state_dict().items()}
    moving = optimizer_tensors(training.optimizer)
    tensors |= {f"optimizer.{name}": value for name, value in moving.items()}
    if training.scaler is not None:
        tensors |= {f"scaler.{k}": v for k, v in training.scaler.tensors().items()}
    if losses is not None:
        tensors["losses"] = losses
    report_checkpoint(training)
    run, step = training.run, training.step
    try:
        facts = _facts(training)
    except OSError as error:  # of a log, which could not be synced
        training.saved.note_failure(step, error)
        return
    training.writer.start(step, tensors, lambda copies: run.save_checkpoint(step, copies, facts))


def report_checkpoint(training: Training, *, wait: bool = True) -> None:
    """Report whether the last checkpoint could be written; unless `wait`, only if it is known."""
    written = training.writer.collect(wait=wait)
    if written is None:
        return
    if isinstance(written.error, OSError):
        training.saved.note_failure(written.step, written.error)
        return
    if written.error is not None:
        raise written.error
    if training.saved.step is None:
        size = f"{written.size / 1e6:.1f} MB"
        say(
            f"A checkpoint takes {size} and {written.seconds:.1f} s to write, while steps continue."
        )
    training.saved.note(written.step)


def _facts(training: Training) -> dict[str, Any]:
    """What a checkpoint stores in addition to its tensors."""
    keep = training.config.train.keep_every
    return {
        "epoch": training.epoch,
        "position": training.position,
        "skipped": training.skipped,
        "best": training.best,
        "keep": bool(keep) and training.position == 0 and training.epoch % keep == 0,
        "logs": training.run.log_lengths(),
        "seconds": training.seconds,
        "data": training.data.mark,
        "processes": world_size(),
        "trunk": _trunk_name(training.method),
        "bits": BITS,
        "config": dataclasses.asdict(training.config),
    }


def _trunk_name(method: Method) -> str | None:
    """Return the name of the encoder within the method, for evaluations of a stopped run."""
    return next((name for name, each in method.named_modules() if each is method.trunk), None)


def check_ranks_agree(training: Training) -> None:
    """Stop if the ranks have diverged: each would train against different negatives."""
    if world_size() == 1:
        return
    parts: dict[str, list[Tensor]] = {"weights": [*parameters_of(training.optimizer)]}
    parts |= {name: [tensor] for name, tensor in training.method.replicated().items()}
    for name, tensors in parts.items():
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        number = int.from_bytes(digest.digest()[:8], "big", signed=True)
        numbers = gather(torch.tensor([number])).tolist()
        different = [each for each, other in enumerate(numbers) if other != numbers[0]]
        if different:
            raise InputError(
                f"the {name} of rank {', '.join(map(str, different))} differ from those of rank 0"
                f" after step {training.step}: a device or a connection is faulty, or the"
                " ranks run different versions. The last checkpoint is good: --resume continues"
                " from it."
            )


def settle(training: Training) -> bool:
    """Read the last step's verdict if that is still due; return False if the step was undone.

    With train.precision=fp16 gradients overflow now and then: the scale is lowered and no weight
    moves. That is not a fault as long as the loss is finite and there is scale left to lower: a
    scale below 1 shrinks gradients, and what is broken even then is not an overflow.
    """
    pending, training.pending = training.pending, None
    if pending is None:
        return True
    broken, loss, *scale = pending.verdict.read().tolist()
    fault = bool(broken)
    if fault and scale and scale[0] >= 1:
        fault = bool(agree_on_max(int(not math.isfinite(loss))))
    if not fault:
        training.skipped = 0
        return True
    numbers = f"loss {loss:.4g}" + "".join(f", loss scale {each:g}" for each in scale)
    meet_fault(training, pending, f"gradients contain NaN or infinity ({numbers})")
    return False


def meet_fault(training: Training, broken: PendingStep, fault: str) -> None:
    """Undo a step, keep it for inspection, and warn or stop according to `train.on_nan`."""
    config, batch = training.config, broken.batch
    training.snapshot.restore(broken.step)
    training.optimizer.zero_grad()
    training.losses = [loss for loss in training.losses if loss is not broken.loss]
    training.outcomes = []
    training.skipped += 1
    numbers = gather(batch.ids).tolist()
    images = training.images
    names = [f"image {n}" if images is None else images.name_of(n) for n in numbers]
    facts = {"step": broken.step, "fault": fault, "images": names}
    facts |= {"epoch": training.epoch, "lr": training.optimizer.param_groups[0]["lr"]}
    state = training.method.state_dict() if is_main() else {}
    folder = training.run.path / f"nan-step-{broken.step}"
    tensors = {f"view-{number}": view for number, view in enumerate(batch.views)}
    tensors |= {"labels": batch.labels, "ids": batch.ids}
    kept = keep_for_inspection(folder, state, tensors, facts)
    reasons = likely_reasons(config.optimizer.lr, training.compute.precision)
    said = (
        f"step {broken.step} is not applied: {fault}. Its images: {some(names)}. Likely causes:"
        f" {reasons}; {kept}."
    )
    if config.train.on_nan == "stop" or training.skipped > MOST_SKIPPED:
        raise InputError(
            f"{said} The last checkpoint is good: --resume continues from it. With"
            f" train.on_nan=skip at most {MOST_SKIPPED} such steps in a row are skipped."
        )
    warn(said)
