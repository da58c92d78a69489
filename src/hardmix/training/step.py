"""One training step: gradients, the check for NaN, the optimizer, the method's state."""

from contextlib import nullcontext

import torch
from torch import Tensor

from hardmix.data.batches import Batch, parts_of
from hardmix.methods.base import Method, NonFiniteError, StepOutcome, TrainingPosition
from hardmix.runtime.device import Late
from hardmix.runtime.distributed import gather, no_sync, rank
from hardmix.runtime.profile import timed
from hardmix.runtime.random_numbers import seed_of
from hardmix.settings.config import PretrainConfig
from hardmix.settings.schedules import shown_epochs
from hardmix.training.nan_guard import PendingStep, gradients_broken
from hardmix.training.online_probe import OnlineProbe
from hardmix.training.optimizers import clip_gradients, parameters_of, set_learning_rate
from hardmix.training.state import Training, meet_fault, settle

SAMPLED_STEPS = 64
"""Most steps of an epoch that Fig. 2a averages over, evenly spaced: 8192 queries in batches of 128.
All steps of a shorter epoch."""
BEFORE_TRAINING = -1
"""The epoch, in hardness.jsonl, of the first step's queries, before any weight is changed. As in
official MoCo, the queue is full of random vectors then (train.queue_start)."""


def take_step(training: Training, batch: Batch, epoch: int) -> Tensor | None:
    """Take one step and return its loss, or None if the step was broken and changed nothing.

    On a GPU this is known a step later: the optimizer leaves the weights unchanged, and `settle`
    undoes the rest during the next step, which is then computed again.
    """
    config, optimizer = training.config, training.optimizer
    steps = training.loader.steps_per_epoch
    set_learning_rate(optimizer, config, epoch, training.position / steps)
    last = training.position + 1 == steps
    described = last or (training.step + 1) % config.train.log_every == 0
    done = (epoch + training.position / steps) / config.train.epochs
    at = TrainingPosition(training.step, epoch, described=described, progress=done)
    outcomes, fault = attempt(training, batch, at)
    if not settle(training):
        outcomes, fault = attempt(training, batch, at)
    if fault is not None:
        nothing = PendingStep(training.step, batch, torch.zeros(()), Late(torch.zeros(())))
        meet_fault(training, nothing, fault)
        return None
    loss = torch.stack([outcome.loss for outcome in outcomes]).mean()
    broken = check_gradients(training)
    scale = [] if training.scaler is None else [training.scaler.scale]
    verdict = Late(torch.stack([broken, loss, *scale]))
    training.pending = PendingStep(training.step, batch, loss, verdict)
    if not training.late and not settle(training):
        return None
    apply(training, batch, outcomes, broken)
    note_numbers(training, outcomes)
    note_ranks(training, outcomes, epoch)
    training.outcomes = outcomes if described else []
    return loss


@torch.no_grad()
def note_numbers(training: Training, outcomes: list[StepOutcome]) -> None:
    """Keep what the next line of metrics.jsonl needs of every step, on the device."""
    parts = [part.kept() for part in outcomes]
    training.kept.append(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))


@torch.no_grad()
def note_ranks(training: Training, outcomes: list[StepOutcome], epoch: int) -> None:
    """Add a step to the sample of Fig. 2a, if it belongs to it; log the run's first step."""
    stride = -(-training.loader.steps_per_epoch // SAMPLED_STEPS)
    if training.position % stride or not shows_hardness(training.config, epoch):
        return
    ranks = [each for part in outcomes if (each := part.ranks()) is not None]
    if not ranks:
        return
    mean = torch.stack(ranks).mean(dim=0)
    # A GPU learns only later that a step was broken, and computes it again.
    counted = torch.cat([mean, mean.new_ones(1)])
    counted = torch.where(counted.isfinite().all(), counted, 0.0)
    training.ranks = counted if training.ranks is None else training.ranks + counted
    if training.step == 0:
        before = {"step": 0, "epoch": BEFORE_TRAINING, **take_ranks(training.ranks)}
        training.run.log_hardness(before)


def shows_hardness(config: PretrainConfig, epoch: int) -> bool:
    """Return whether an epoch has a line in Fig. 2a."""
    return epoch in shown_epochs(config.train.epochs) or epoch + 1 == config.train.last_epoch


def take_ranks(ranks: Tensor | None) -> dict[str, list[float]]:
    """Return Fig. 2a of the steps that were added up, as hardness.jsonl has it."""
    if ranks is None:
        return {}
    total = gather(ranks[None]).sum(dim=0).tolist()
    steps = max(1.0, total.pop())
    return {"matching_probability": [float(f"{value / steps:.5g}") for value in total]}


def attempt(
    training: Training, batch: Batch, at: TrainingPosition
) -> tuple[list[StepOutcome], str | None]:
    """Compute the gradients of a batch; return the outcomes, and a message if they are broken."""
    training.snapshot.note(at.step)
    seed_own_randomness(training)
    training.optimizer.zero_grad()
    if training.probe is not None:
        training.probe.forget()
    if training.config.train.compile == "graphs":
        torch.compiler.cudagraph_mark_step_begin()  # results of the last step may be overwritten
    scale = None if training.scaler is None else training.scaler.scale
    try:
        return compute_gradients(training.method, batch, at, scale, training.probe), None
    except NonFiniteError as fault:
        return [], str(fault)


def check_gradients(training: Training) -> Tensor:
    """Return 1 if a gradient is NaN or infinite, else 0, as a tensor on the device."""
    parameters = parameters_of(training.optimizer)
    gradients = [each.grad for each in parameters if each.grad is not None]
    if training.scaler is None:
        return gradients_broken(gradients)
    return training.scaler.unscale_(gradients)


def apply(training: Training, batch: Batch, outcomes: list[StepOutcome], broken: Tensor) -> None:
    """Update the weights unless gradients are broken, then let the method update its state."""
    optimizer = training.optimizer
    clip_gradients(parameters_of(optimizer), training.config.optimizer)
    if training.scaler is not None or training.late:
        optimizer.found_inf = broken  # type: ignore[attr-defined]  # torch reads this name
    with timed("optimizer"):
        optimizer.step()
    if training.scaler is not None:
        training.scaler.update(broken)
    with timed("queue"):
        training.method.after_step(batch, outcomes)
    if training.probe is not None:
        training.probe.learn(batch.labels, broken)


def compute_gradients(
    method: Method,
    batch: Batch,
    at: TrainingPosition,
    scale: Tensor | None = None,
    probe: OnlineProbe | None = None,
) -> list[StepOutcome]:
    """Compute the gradients of a batch, part by part (train.accumulate); return the outcomes.

    `scale` is the loss scale of train.precision=fp16; `probe` hears the features.
    """
    parts, compute = method.config.train.accumulate, method.materials.compute
    networks = [method.network(name) for name in method.networks()]
    method.begin_step(at)
    outcomes = []
    for number, part in enumerate(parts_of(batch, parts)):
        with no_sync(networks, number + 1 < parts):
            heard = nullcontext() if probe is None else probe.hears(part.query)
            with compute.autocast(), heard:
                outcome = method.loss(part, at._replace(part=number))
            with timed("backward"):
                loss = outcome.loss / parts
                (loss if scale is None else loss * scale).backward()
        outcome.loss = outcome.loss.detach()
        outcomes.append(outcome)
    return outcomes


def seed_own_randomness(training: Training) -> None:
    """Seed PyTorch's own random numbers, such as dropout's, by (seed, step, rank)."""
    seed = seed_of("trunk", training.config.train.seed, training.step, rank())
    torch.default_generator.manual_seed(seed)
    if training.compute.device.type == "cuda":
        torch.cuda.manual_seed(seed)
