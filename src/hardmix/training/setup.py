"""Before the first step: everything checked and built, nothing written yet."""

import torch
from torch import nn

from hardmix.data.datasets import ImageSet
from hardmix.data.loading import open_loader
from hardmix.errors import InputError
from hardmix.methods.moco import Contrastive, Moment
from hardmix.methods.supervised import Supervised
from hardmix.mixing.plans import Strategy
from hardmix.models.encoders import UNSPLIT_WARNING
from hardmix.runs.folder import Run
from hardmix.runtime.console import warn
from hardmix.runtime.device import choose_compute
from hardmix.runtime.distributed import world_size
from hardmix.runtime.random_numbers import seed_of
from hardmix.runtime.signals import StopRequest
from hardmix.settings.config import DataConfig, OptimizerConfig, PretrainConfig
from hardmix.training.messages import Board
from hardmix.training.nan_guard import Statistics
from hardmix.training.state import Training


def prepare(
    config: PretrainConfig,
    run: Run,
    *,
    trunk: nn.Module | None = None,
    strategy: Strategy | None = None,
    images: ImageSet | None = None,
    stop: StopRequest,
) -> Training:
    """Check and build everything, and write nothing yet: bad input costs nothing."""
    compute = choose_compute(config.train.device, config.train.precision)
    board = Board(config)
    if images is not None:
        check_own(images, config.data)
    views = 1 if config.method == "supervised" else 2
    images, loader = open_loader(config.data, config.train, compute.device, views, own=images)
    check_data(config, images)
    torch.manual_seed(seed_of("weights", config.train.seed))
    channels = config.data.channels
    objective: Contrastive | Supervised
    if config.method == "supervised":
        num_classes = len(images.classes or ()) if images is not None else 0
        objective = Supervised(config, compute, channels, trunk, num_classes)
    else:
        objective = Contrastive(config, compute, channels, trunk, strategy)
    objective.to(compute.device).to(memory_format=torch.channels_last).train()
    objective.spread()
    optimizer = build_optimizer(objective.trained(), config.optimizer)
    return Training(
        config=config,
        run=run,
        board=board,
        compute=compute,
        images=images,
        loader=loader,
        objective=objective,
        optimizer=optimizer,
        statistics=Statistics(objective.normalised()),
        stop=stop,
    )


def check_own(images: ImageSet, config: DataConfig) -> None:
    """Refuse a set of the user's own that contradicts itself or the config."""
    labels, classes = images.labels, images.classes or ()
    if images.channels != config.channels:
        raise InputError(
            f"data.channels={config.channels}, but {images.name} has channels={images.channels}:"
            " set both to what the images have."
        )
    if labels is not None and len(labels) != len(images):
        raise InputError(
            f"{images.name} has {len(labels)} labels for {len(images)} images: give one for each,"
            " -1 where the class is unknown, or labels=None."
        )
    if labels is not None and len(labels) and int(labels.max()) >= len(classes):
        raise InputError(
            f"{images.name} has the label {int(labels.max())} and {len(classes)} classes: name"
            " every class, the first is number 0."
        )


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
    if config.model.key_bn_splits == 1 and world_size() == 1:
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
