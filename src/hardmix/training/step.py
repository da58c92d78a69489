"""One step: gradients part by part, NaN refused, the optimizer, what the next step needs."""

import torch
from torch import Tensor

from hardmix.data.batches import Batch, parts_of
from hardmix.methods.base import Method, NonFiniteError, StepOutcome, TrainingPosition
from hardmix.runtime.distributed import no_sync, rank
from hardmix.runtime.profile import timed
from hardmix.runtime.random_numbers import seed_of
from hardmix.training.nan_guard import check_gradients
from hardmix.training.optimizers import clip_gradients, parameters_of, set_learning_rate
from hardmix.training.state import Training, meet_fault


def take_step(training: Training, batch: Batch, epoch: int) -> Tensor | None:
    """One step; None where it would have spoilt the weights, and nothing was changed."""
    config, method, optimizer = training.config, training.method, training.optimizer
    seed_own_randomness(training)
    set_learning_rate(optimizer, config, epoch, training.position / training.loader.steps_per_epoch)
    training.batch_norms.note()
    optimizer.zero_grad()
    try:
        outcomes = compute_gradients(method, batch, TrainingPosition(training.step, epoch))
        loss = torch.stack([outcome.loss for outcome in outcomes]).mean()
        check_gradients(loss, parameters_of(optimizer))
    except NonFiniteError as fault:
        meet_fault(training, batch, str(fault))
        return None
    clip_gradients(parameters_of(optimizer), config.optimizer)
    with timed("optimizer"):
        optimizer.step()
    with timed("queue"):
        method.after_step(batch, outcomes)
    training.outcomes, training.skipped = outcomes, 0
    return loss


def compute_gradients(method: Method, batch: Batch, at: TrainingPosition) -> list[StepOutcome]:
    """The gradients of a batch, part by part (train.accumulate); what each part gave."""
    parts, compute = method.config.train.accumulate, method.materials.compute
    networks = [method.network(name) for name in method.networks()]
    method.begin_step(at)
    outcomes = []
    for number, part in enumerate(parts_of(batch, parts)):
        with no_sync(networks, number + 1 < parts):
            with compute.autocast():
                outcome = method.loss(part, at._replace(part=number))
            with timed("backward"):
                (outcome.loss / parts).backward()
        outcome.loss = outcome.loss.detach()
        outcomes.append(outcome)
    return outcomes


def seed_own_randomness(training: Training) -> None:
    """Dropout and the like, in trunks that have them: as all else, a function of (seed, step)."""
    seed = seed_of("trunk", training.config.train.seed, training.step, rank())
    torch.default_generator.manual_seed(seed)
    if training.compute.device.type == "cuda":
        torch.cuda.manual_seed(seed)
