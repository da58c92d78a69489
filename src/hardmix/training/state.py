"""The state of a run between two steps: how it is saved, restored, checked and stopped.

A checkpoint holds everything the next step depends on, except random numbers, which are functions
of (seed, step). It is written while training continues: the state is copied, then a thread writes
the copy. There is one thread at most; the loop's own thread reports between two steps whether it
succeeded, and whoever ends a run waits for it first. On resume, rank 0 reads the newest intact
checkpoint and sends it to the other ranks.

Each rank has batch norm's running statistics of its own rows; those of rank 0 are saved and
evaluated. Training does not read them.
"""

import dataclasses
import hashlib
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hardmix.data.batches import Loader
from hardmix.data.changed_data import DataRecord, describe_change
from hardmix.data.image_set import ImageSet
from hardmix.errors import InputError, OutputError, UnfinishedError
from hardmix.evaluation.knn import KnnImages
from hardmix.methods.base import Method, StepOutcome
from hardmix.runs.checkpoints import BITS, optimizer_tensors, share_optimizer
from hardmix.runs.folder import Run
from hardmix.runs.reading import number
from hardmix.runtime.console import say, warn
from hardmix.runtime.device import Compute, Late
from hardmix.runtime.distributed import (
    Agreement,
    agree_on_max,
    broadcast,
    broadcast_object,
    gather,
    is_main,
    rank,
    share_state,
    world_size,
)
from hardmix.runtime.signals import StopRequest
from hardmix.settings.config import PretrainConfig
from hardmix.training import messages
from hardmix.training.metric_logs import MetricLog
from hardmix.training.nan_guard import (
    MOST_SKIPPED,
    LossScaler,
    PendingStep,
    StepSnapshot,
    first_names,
    keep_for_inspection,
    likely_reasons,
)
from hardmix.training.online_probe import OnlineProbe
from hardmix.training.optimizers import parameters_of

SAVE, STOP, GONE = 1, 2, 9
"""Requests of a rank to all ranks; the highest request wins. GONE: the run's folder is gone."""
MOST_STEPS = 2**53
"""Numbers in a manifest are below this."""


Write = Callable[[dict[str, Tensor]], int]
"""Writes a checkpoint of tensors by name and returns its size in bytes."""


class Written(NamedTuple):
    """The outcome of a write."""

    step: int
    size: int = 0
    """Size in bytes; 0 if it failed."""
    seconds: float = 0.0
    error: BaseException | None = None


class CheckpointWriter:
    """Writes one checkpoint at a time; all its methods are called by the same thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._written: Written | None = None

    def start(self, step: int, tensors: dict[str, Tensor], write: Write) -> None:
        """Copy the tensors and return; a thread then writes the copy. No other may be running."""
        assert self._thread is None, "two checkpoints at once"
        copies = {name: _copy(tensor) for name, tensor in tensors.items()}
        self._thread = threading.Thread(target=self._run, args=(step, copies, write))
        self._thread.start()

    def collect(self, *, wait: bool) -> Written | None:
        """Return how the last write ended, once; None if it has not ended or was collected."""
        if self._thread is None or (self._thread.is_alive() and not wait):
            return None
        self._thread.join()
        self._thread = None
        return self._written

    def _run(self, step: int, copies: dict[str, Late], write: Write) -> None:
        started = time.monotonic()
        try:
            size = write({name: copy.read() for name, copy in copies.items()})
            self._written = Written(step, size, time.monotonic() - started)
        except BaseException as error:  # raised again by the loop
            self._written = Written(step, error=error)


def _copy(tensor: Tensor) -> Late:
    """Copy a tensor to the host; a copy from a GPU arrives after the steps already queued."""
    return Late(tensor.detach().clone() if tensor.device.type == "cpu" else tensor)


class Saved:
    """The newest checkpoint on disk, and why there is no newer one; known to rank 0 only."""

    def __init__(self) -> None:
        self.step: int | None = None
        """Step of the newest checkpoint."""
        self.reason: str | None = None
        """Why the last checkpoint could not be written; None if it was."""

    def note(self, step: int) -> None:
        """Record that a checkpoint was written."""
        if self.reason is not None:
            say(f"Checkpoints can be written again: saved step {step}.")
        self.step, self.reason = step, None

    def note_failure(self, step: int, error: OSError) -> None:
        """Record that a checkpoint could not be written; warn the first time only."""
        if self.step == step:
            return  # it was written before
        if self.reason is None:
            warn(messages.no_checkpoint(step, error, self.step))
        self.reason = error.strerror or type(error).__name__

    def lost_stop(self, run: Run, step: int) -> str:
        """Return why a stopped run could not be saved; an empty string if it was saved."""
        if self.reason is None:
            return ""
        return messages.lost_stop(run, step, self.reason, self.step)

    def lost_end(self, run: Run, summarized: bool) -> str:
        """Return what a finished run could not write; an empty string if nothing is missing."""
        missing = []
        if self.reason is not None:
            missing.append(f"its last checkpoint ({self.reason})")
        if run.unwritten:
            missing.append(f"the last {run.unwritten} lines of its logs")
        if not summarized:
            missing.append("results/pretrain.json")
        return messages.lost_end(run, missing, self.step) if missing else ""


@dataclass
class TimeLimit:
    """A time at which the whole command should end."""

    end: float
    """The time, by time.monotonic(), at which the command should end."""
    step: float
    """Seconds of a step, as measured before."""
    after: float
    """Seconds that the work after training takes at that speed."""
    started: float = field(default_factory=time.monotonic)
    steps: int = 0
    """Steps since then."""

    def reached(self) -> bool:
        """Return whether training must end now, at the speed that it has had."""
        now = time.monotonic()
        slower = (now - self.started) / (self.step * self.steps) if self.steps else 1.0
        return now + self.after * max(1.0, slower) >= self.end


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
    knn_images: KnnImages | None = None
    """Labelled images for k-NN accuracy during training, if there are any."""
    probe: OnlineProbe | None = None
    """The online probe (train.probe)."""
    own_trunk: bool = False
    """Whether the network was passed by a program, and cannot be built from its name."""
    starts_from_weights: bool = False
    """Whether the trunk started from weights that are known not to be random."""
    opened: list[MetricLog] = field(default_factory=list)
    """The logs that must be closed."""
    data: DataRecord = field(default=DataRecord("", None))
    """The images as they were when the run started."""
    step: int = 0
    epoch: int = 0
    """Finished epochs, including the measurements at their ends."""
    position: int = 0
    """Steps done in the current epoch."""
    losses: list[Tensor] = field(default_factory=list)
    """This rank's losses since the last line of metrics.jsonl."""
    agreement: Agreement | None = None
    """The ranks' requests before the last step, if nobody has read them yet."""
    kept: list[Tensor] = field(default_factory=list)
    """Similarities of the same steps on this rank, (numbers, queries) each: the proxy task."""
    ranks: Tensor | None = None
    """This rank's sum of Fig. 2a over sampled steps of the epoch, and their number."""
    outcomes: list[StepOutcome] = field(default_factory=list)
    """Outcomes of the last step, part by part, if its measures will be logged."""
    pending: PendingStep | None = None
    """The last step, while it is not yet known whether its gradients were finite."""
    skipped: int = 0
    """Steps skipped in a row (train.on_nan=skip)."""
    limit: TimeLimit | None = None
    """When training ends, finished or not."""
    best: dict[str, Any] | None = None
    """The checkpoint with the highest k-NN accuracy."""
    seconds: float = 0.0
    saved_at: float = field(default_factory=time.monotonic)
    saved: Saved = field(default_factory=Saved)
    writer: CheckpointWriter = field(default_factory=CheckpointWriter)


def out_of_time(training: Training, *, logged: bool) -> bool:
    """Return whether training must end; several processes ask each other where they log."""
    limit = training.limit
    if limit is None:
        return False
    limit.steps += 1
    if world_size() > 1 and not logged:
        return False
    return bool(agree_on_max(int(is_main() and limit.reached())))


def pause(training: Training, *, at_once: bool = True) -> None:
    """Save or stop between two steps, if the clock or a signal on any rank asks for it.

    Unless `at_once`, the requests of all ranks are read a step later, so that nobody waits for the
    network while a GPU has work.
    """
    minutes = training.config.train.save_minutes
    due = bool(minutes) and time.monotonic() - training.saved_at > 60 * minutes and is_main()
    report_checkpoint(training, wait=False)
    gone = GONE if not training.run.is_in_place() else 0
    asked = Agreement(gone or (STOP if training.stop else SAVE if due else 0))
    before, training.agreement = training.agreement, asked
    request = 0 if before is None else before.read()
    if at_once or request or world_size() == 1:
        request, training.agreement = max(request, asked.read()), None
    end_if_gone(request, training.run, training.step)
    if request:
        save_checkpoint(training)
    if request == STOP:
        report_checkpoint(training)
        reason = training.stop.name or "a signal to another rank"
        lost = broadcast_object(training.saved.lost_stop(training.run, training.step))
        if lost:
            raise OutputError(f"stopped by {reason}, but {lost}")
        raise UnfinishedError(
            f"stopped by {reason} after step {training.step}:"
            f" {messages.how_to_resume(training.run)} continues from there."
        )


def end_if_gone(request: int, run: Run, step: int) -> None:
    """Raise OutputError on all ranks if one of them has found that the run's folder is gone."""
    if request == GONE:
        raise OutputError(
            f"{run.path} was moved, deleted or replaced during training: nothing can be written"
            f" after step {step}. hardmix pretrain --out FOLDER --resume, with the folder's new"
            " path, continues from its newest checkpoint."
        )


def save_checkpoint(training: Training) -> None:
    """Copy everything a resumed run needs; it is written while training continues.

    If the disk is full or fails, this checkpoint is lost, not the run.
    """
    settle(training)
    since_last_line = {
        "losses": torch.stack(training.losses) if training.losses else None,
        "kept": torch.stack(training.kept) if training.kept else None,
        "ranks": training.ranks,
    }
    gathered = {
        name: gather(each[None])
        for name, each in since_last_line.items()
        if each is not None and each.numel()
    }
    training.saved_at = time.monotonic()
    if not is_main():
        return
    tensors = {f"objective.{k}": v for k, v in training.method.state_dict().items()}
    moving = optimizer_tensors(training.optimizer)
    tensors |= {f"optimizer.{name}": value for name, value in moving.items()}
    if training.scaler is not None:
        tensors |= {f"scaler.{k}": v for k, v in training.scaler.tensors().items()}
    if training.probe is not None:
        tensors |= {f"probe.{k}": v for k, v in training.probe.tensors().items()}
    tensors |= gathered
    report_checkpoint(training)
    run, step = training.run, training.step
    try:
        facts = _facts(training)
    except OSError as error:  # a log could not be synced
        training.saved.note_failure(step, error)
        return
    training.writer.start(step, tensors, lambda copies: run.save_checkpoint(step, copies, facts))


def report_checkpoint(training: Training, *, wait: bool = True) -> None:
    """Report whether the last checkpoint could be written; unless `wait`, only if it has ended."""
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
    """Return what a checkpoint stores in addition to its tensors."""
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


def restore(training: Training, *, allow_changed_data: bool = False) -> bool:
    """Restore the newest intact checkpoint; return False if there is none yet.

    Rank 0 reads it and sends it to the others, which do not need access to the folder.
    """
    checkpoint = training.run.load_checkpoint() if is_main() else None
    manifest = broadcast_object(checkpoint and checkpoint.manifest)
    if manifest is None:
        training.run.forget_after(-1)
        return False
    for name in checkpoint.broken if checkpoint else ():
        warn(f"{name} does not match its checksum: using the checkpoint before it.")
    _check_facts(training.run.checkpoints, manifest)
    changed = _check_data(training, manifest, allow_changed_data)
    tensors = checkpoint.tensors if checkpoint else {}
    _load_method(training, tensors)
    _load_optimizer(training, tensors)
    _load_numbers(training, tensors)
    for part, holder in (("scaler", training.scaler), ("probe", training.probe)):
        for name, value in {} if holder is None else holder.tensors().items():
            broadcast(value.copy_(tensors.get(f"{part}.{name}", value)))
    training.step, training.seconds = manifest["step"], manifest.get("seconds", 0.0)
    steps = training.loader.steps_per_epoch
    epoch, position = divmod(training.step, steps)  # for format 1, which saved at epochs' ends
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
    """Raise InputError if a fact is not of its kind; a checksum only shows that it is unchanged.

    Older versions saved fewer facts.
    """
    for name, is_of_its_kind in FACTS.items():
        if name in manifest and not is_of_its_kind(manifest[name]):
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
"""Facts in a manifest, each with the function that checks its kind."""


def _check_data(training: Training, manifest: dict[str, Any], allowed: bool) -> bool:
    mark = training.data.mark
    if manifest.get("data") == mark:
        return False
    change = broadcast_object(describe_change(training.run.images_file, training.data))
    message = f"the images have changed since the run was started: {change}"
    if not allowed:
        raise InputError(
            f"{message}. Resume with the same images, start a new run, or accept the change with"
            " --allow-changed-data."
        )
    warn(f"{message}. Continuing with the current images.")
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


def _load_numbers(training: Training, tensors: dict[str, Tensor]) -> None:
    """Restore what the next lines of the logs are made of."""
    training.losses = list(_own_numbers(training, tensors, "losses").unbind())
    training.kept = list(_own_numbers(training, tensors, "kept").unbind())
    ranks = _own_numbers(training, tensors, "ranks")
    training.ranks = ranks if ranks.numel() else None


def _own_numbers(training: Training, tensors: dict[str, Tensor], name: str) -> Tensor:
    """Return each rank's own numbers; if the number of ranks has changed, those of all.

    Losses and ranks are then averaged, and queries stand side by side.
    """
    saved = tensors.get(name, torch.zeros(0, 0)).double()
    shape = broadcast_object(list(saved.shape))
    saved = broadcast(saved.clone() if is_main() else torch.zeros(shape, dtype=torch.float64))
    if len(saved) == world_size():
        mine = saved[rank()]
    elif saved.ndim == 4:
        mine = saved.permute(1, 2, 0, 3).flatten(2)
    else:
        mine = saved.sum(dim=0) / max(1, len(saved))
    return mine.float().to(training.compute.device)


def _forget_numbers(training: Training, steps: int) -> None:
    """Drop what depends on image and class numbers and on the length of an epoch."""
    training.position = min(training.position, steps)
    training.method.forget_images()


def check_ranks_agree(training: Training) -> None:
    """Stop if the ranks have diverged: each would train against different negatives."""
    if world_size() == 1:
        return
    parts: dict[str, list[Tensor]] = {"weights": [*parameters_of(training.optimizer)]}
    parts |= {name: [tensor] for name, tensor in training.method.replicated().items()}
    if training.probe is not None:
        parts["probe"] = list(training.probe.tensors().values())
    for name, tensors in parts.items():
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        mark = int.from_bytes(digest.digest()[:8], "big", signed=True)
        marks = gather(torch.tensor([mark])).tolist()
        different = [place for place, other in enumerate(marks) if other != marks[0]]
        if different:
            raise InputError(
                f"the {name} of rank {', '.join(map(str, different))} differ from those of rank 0"
                f" after step {training.step}: a device or a connection is faulty, or the"
                " ranks run different versions. The last checkpoint is good: --resume continues"
                " from it."
            )


def settle(training: Training) -> bool:
    """Read the last step's verdict if that is still due; return False if the step was undone.

    With train.precision=fp16, gradients overflow now and then: the scale is lowered and no weight
    moves. This is not a fault as long as the loss is finite and the scale can be lowered further:
    a scale below 1 shrinks gradients, so that they do not overflow.
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
    steps = [number for number, loss in enumerate(training.losses) if loss is not broken.loss]
    if len(training.kept) == len(training.losses):
        training.kept = [training.kept[number] for number in steps]
    training.losses = [training.losses[number] for number in steps]
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
    message = (
        f"step {broken.step} is not applied: {fault}. Its images: {first_names(names)}. Likely"
        f" causes: {reasons}; {kept}."
    )
    if config.train.on_nan == "stop" or training.skipped > MOST_SKIPPED:
        raise InputError(
            f"{message} The last checkpoint is good: --resume continues from it. With"
            f" train.on_nan=skip at most {MOST_SKIPPED} such steps in a row are skipped."
        )
    warn(message)
