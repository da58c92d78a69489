"""The main job: from images to an encoder. Reads top to bottom in the order of events."""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hardmix.config import OptimizerConfig, PretrainConfig
from hardmix.console import Meter, progress, say, warn
from hardmix.datasets import ImageSet, fingerprint, has_test, open_images
from hardmix.encoders import UNSPLIT_WARNING
from hardmix.errors import InputError
from hardmix.evaluations.knn import knn_accuracy
from hardmix.features import extract
from hardmix.loading import ShardLoader, ViewLoader, open_loader
from hardmix.narration import (
    Board,
    describe_start,
    last_epoch,
    progress_text,
    summarize,
    watch,
)
from hardmix.objectives import Contrastive, Moment, Supervised
from hardmix.precision import Compute, choose_compute
from hardmix.runs import OWN_TRUNK, Run, optimizer_tensors, restore_optimizer
from hardmix.schedules import cosine, shown_epochs, step
from hardmix.stateless import seed_of
from hardmix.workers import dead_workers_named

KNN_IMAGES = 10_000
"""Images of each split that the k-NN accuracy during training looks at, at most."""


@dataclass
class Training:
    """Everything a run is made of, between two steps."""

    config: PretrainConfig
    run: Run
    board: Board
    compute: Compute
    images: ImageSet | None
    loader: ViewLoader | ShardLoader
    objective: Contrastive | Supervised
    optimizer: torch.optim.SGD
    step: int = 0
    seconds: float = 0.0


def pretrain(
    config: PretrainConfig,
    out: Path | str,
    *,
    resume: bool = False,
    trunk: nn.Module | None = None,
) -> Run:
    """Train an encoder and write the run's folder; `trunk` is your own network, for the library.

    With `resume` a stopped run goes on where its last checkpoint is, and a finished one with more
    epochs (App. C.1: the 800-epoch runs) from its end.
    """
    training = prepare(config, out, resume=resume, trunk=trunk)
    epochs, steps = last_epoch(config), training.loader.steps_per_epoch
    with progress(config.method, epochs * steps, training.step) as meter, dead_workers_named():
        for epoch in range(training.step // steps, epochs):
            set_learning_rate(training.optimizer, config, epoch)
            train_epoch(training, epoch, meter)
            record_hardness(training, epoch)
            every = config.train.knn_every
            if every and ((epoch + 1) % every == 0 or epoch + 1 == epochs):
                measure_knn(training, epoch)
            if (epoch + 1) % config.train.save_every == 0 or epoch + 1 == epochs:
                save_checkpoint(training)
    training.loader.close()
    training.run.write_encoder(
        training.objective.trunk, config, None if trunk is None else OWN_TRUNK
    )
    summarize(config, training.run, training.step, training.seconds, training.loader.unreadable)
    return training.run


def prepare(
    config: PretrainConfig, out: Path | str, *, resume: bool, trunk: nn.Module | None
) -> Training:
    """Check everything, then make the folder: bad input costs nothing."""
    compute = choose_compute(config.train.device, config.train.precision)
    board = Board(config)
    views = 1 if config.method == "supervised" else 2
    images, loader = open_loader(config.data, config.train, compute.device, views)
    check_data(config, images)
    torch.manual_seed(seed_of("weights", config.train.seed))
    channels = config.data.channels
    objective: Contrastive | Supervised
    if config.method == "supervised":
        num_classes = len(images.classes or ()) if images is not None else 0
        objective = Supervised(config, compute, channels, trunk, num_classes)
    else:
        objective = Contrastive(config, compute, channels, trunk)
    objective.to(compute.device).to(memory_format=torch.channels_last).train()
    optimizer = build_optimizer(objective.trained(), config.optimizer)
    run = Run.open(out) if resume else Run.create(out, config)
    training = Training(config, run, board, compute, images, loader, objective, optimizer)
    describe_start(config, images, compute, run)
    if not (resume and restore(training)):
        prefill(training)
    board.open(run, training.step)
    return training


def train_epoch(training: Training, epoch: int, meter: Meter) -> None:
    """One pass over the images, or what is left of it."""
    config, loader, objective = training.config, training.loader, training.objective
    first = training.step - epoch * loader.steps_per_epoch
    losses: list[Tensor] = []
    started, images = time.perf_counter(), 0
    for batch in loader.epoch(epoch, first):
        training.optimizer.zero_grad()
        losses.append(objective.backward(batch, Moment(training.step, epoch)))
        training.optimizer.step()
        objective.remember(batch)
        training.step += 1
        images += len(batch.ids)
        if training.step % config.train.log_every and training.step % loader.steps_per_epoch:
            continue
        # .item() waits for the device: only here.
        loss = float(torch.stack(losses).mean())
        check_finite_loss(training, loss)
        seconds = time.perf_counter() - started
        training.seconds += seconds
        line = {
            "step": training.step,
            "epoch": epoch,
            "loss": loss,
            "lr": training.optimizer.param_groups[0]["lr"],
            **objective.describe(),
            "images_per_second": images / seconds,
        }
        log(training, line)
        watch(line)
        meter.advance(training.step, progress_text(line, config))
        losses, images, started = [], 0, time.perf_counter()


def log(training: Training, line: dict[str, Any]) -> None:
    """One line of metrics.jsonl, and TensorBoard's copy."""
    training.run.log(line)
    training.board.show(line)


def record_hardness(training: Training, epoch: int) -> None:
    """Fig. 2a's numbers of an epoch's last step, at a few epochs of the run."""
    config = training.config
    if epoch in shown_epochs(config.train.epochs) or epoch + 1 == last_epoch(config):
        measured = training.objective.hardness()
        if measured is not None:
            training.run.log_hardness({"step": training.step, "epoch": epoch, **measured})


def check_data(config: PretrainConfig, images: ImageSet | None) -> None:
    """Refuse what cannot be trained, and warn of what should not be."""
    labelled = images is not None and images.labels is not None
    for wanted, why in [
        (config.oracle, "--oracle drops negatives of the query's class"),
        (config.method == "supervised", "--method supervised trains on classes"),
    ]:
        if wanted and not labelled:
            raise InputError(f"{why}: these images have no labels; use folders named by class.")
    if config.method == "supervised" or images is None:
        return
    number = len(images)
    if config.train.queue_size >= number - config.train.batch_size:
        warn(
            f"train.queue_size={config.train.queue_size} reaches the {number} images: a query will"
            " meet older keys of its own image; set --train.exclude-same-image, or a smaller queue."
        )
    if config.model.key_bn_splits == 1:
        warn(UNSPLIT_WARNING)


def build_optimizer(parameters: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.SGD:
    """App. C.1, official MoCo: SGD on all parameters."""
    return torch.optim.SGD(
        parameters,
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, config: PretrainConfig, epoch: int) -> None:
    """Once an epoch, as official MoCo."""
    if config.optimizer.schedule == "cosine":
        factor = cosine(epoch, config.train.epochs)
    else:
        factor = step(epoch, config.optimizer.milestones)
    for group in optimizer.param_groups:
        group["lr"] = config.optimizer.lr * factor


def prefill(training: Training) -> None:
    """train.queue_start=prefill: encode enough images to fill the queue, and train on none."""
    objective, loader = training.objective, training.loader
    if training.config.train.queue_start != "prefill" or isinstance(objective, Supervised):
        return
    while objective.memory.unfilled() is not None:
        for batch in loader.epoch(-1):
            objective.prefill(batch, Moment(-1, -1))
            if objective.memory.unfilled() is None:
                break


def measure_knn(training: Training, epoch: int) -> None:
    """k-NN accuracy of the trunk's features, where labels exist."""
    config, images = training.config, training.images
    if images is None or images.labels is None:
        return
    train = images.subset(KNN_IMAGES, config.train.seed)
    options: dict[str, Any] = {
        "image_size": config.data.image_size,
        "compute": training.compute,
        "workers": config.data.workers,
    }
    bank = extract(training.objective.trunk, train, title="k-NN features", **options)
    if has_test(config.data):
        test = open_images(config.data, "test", config.train.seed).subset(KNN_IMAGES, 0)
        asked = extract(training.objective.trunk, test, title="k-NN features", **options)
    else:
        asked = bank
    accuracy = knn_accuracy(
        bank.features,
        bank.labels,
        asked.features,
        asked.labels,
        leave_one_out=asked is bank,
    )
    log(training, {"step": training.step, "epoch": epoch, "knn": accuracy.top1})
    say(f"epoch {epoch + 1}: k-NN accuracy {accuracy.top1:.3f}")


def save_checkpoint(training: Training) -> None:
    """Everything a resumed run needs."""
    tensors = {f"objective.{k}": v for k, v in training.objective.state_dict().items()}
    momentum = optimizer_tensors(training.optimizer)
    tensors |= {f"optimizer.{number}": value for number, value in momentum.items()}
    facts = {"seconds": training.seconds, "data": data_mark(training)}
    training.run.save_checkpoint(training.step, tensors, facts)


def restore(training: Training) -> bool:
    """Go on from the newest whole checkpoint; False where there is none yet."""
    found = training.run.load_checkpoint()
    if found is None:
        return False
    tensors, manifest, broken = found
    for name in broken:
        warn(f"{name} does not match its checksum: the checkpoint before it is used.")
    mark = data_mark(training)
    if manifest["data"] != mark:
        raise InputError(
            f"the images have changed since the run was started ({manifest['data']} -> {mark}):"
            " resume with the same data, or start a new run."
        )
    objective = {k.removeprefix("objective."): v for k, v in tensors.items() if k[1] == "b"}
    training.objective.load_state_dict(objective)
    momentum = {k.removeprefix("optimizer."): v for k, v in tensors.items() if k[1] == "p"}
    restore_optimizer(training.optimizer, momentum)
    training.step, training.seconds = manifest["step"], manifest["seconds"]
    training.run.forget_after(training.step)
    say(f"Going on from step {training.step}.")
    return True


def data_mark(training: Training) -> str:
    """What tells one set of images from another."""
    return "shards" if training.images is None else fingerprint(training.images)


def check_finite_loss(training: Training, loss: float) -> None:
    """Stop at a loss that is no number; the last checkpoint stays good."""
    if not math.isfinite(loss):
        raise InputError(
            f"the loss is {loss} at step {training.step}: the learning rate"
            f" (optimizer.lr={training.config.optimizer.lr}) may be too high; the last checkpoint"
            " is good, and --resume goes on from it."
        )
