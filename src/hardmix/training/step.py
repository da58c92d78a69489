"""One training step: gradients, the check for NaN, the optimizer, the method's state."""

import torch
from torch import Tensor

from hardmix.data.batches import Batch, parts_of
from hardmix.methods.base import Method, NonFiniteError, StepOutcome, TrainingPosition
from hardmix.runtime.device import Late
from hardmix.runtime.distributed import no_sync, rank
from hardmix.runtime.profile import timed
from hardmix.runtime.random_numbers import seed_of
from hardmix.training.nan_guard import PendingStep, gradients_broken
from hardmix.training.optimizers import clip_gradients, parameters_of, set_learning_rate
from hardmix.training.state import Training, meet_fault, settle


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
    training.outcomes = outcomes if described else []
    return loss


def attempt(
    training: Training, batch: Batch, at: TrainingPosition
) -> tuple[list[StepOutcome], str | None]:
    """Compute the gradients of a batch; return the outcomes, and a message if they are broken."""
    training.snapshot.note(at.step)
    seed_own_randomness(training)
    training.optimizer.zero_grad()
    if training.config.train.compile == "graphs":
        torch.compiler.cudagraph_mark_step_begin()  # results of the last step may be overwritten
    scale = None if training.scaler is None else training.scaler.scale
    try:
        return compute_gradients(training.method, batch, at, scale), None
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


def compute_gradients(
    method: Method, batch: Batch, at: TrainingPosition, scale: Tensor | None = None
) -> list[StepOutcome]:
    """Compute the gradients of a batch, part by part (train.accumulate); return the outcomes.

    `scale` is the loss scale of train.precision=fp16.
    """
    parts, compute = method.config.train.accumulate, method.materials.compute
    networks = [method.network(name) for name in method.networks()]
    method.begin_step(at)
    outcomes = []
    for number, part in enumerate(parts_of(batch, parts)):
        with no_sync(networks, number + 1 < parts):
            with compute.autocast():
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
