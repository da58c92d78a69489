"""Checks and set-up before the first step; nothing is written to disk yet."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hardmix.data.image_set import ImageSet
from hardmix.data.loading import open_loader
from hardmix.data.own_views import Pipeline
from hardmix.errors import InputError
from hardmix.evaluation.knn import open_knn_images
from hardmix.methods.base import Materials, Method, OwnMixing, build_method, method_class
from hardmix.models.batch_norm import count_on_host, freeze_statistics
from hardmix.models.encoders import UNSPLIT_WARNING
from hardmix.runs.folder import Run
from hardmix.runtime.console import warn
from hardmix.runtime.device import choose_compute, memory_of
from hardmix.runtime.distributed import meet, world_size
from hardmix.runtime.random_numbers import seed_of
from hardmix.runtime.signals import StopRequest
from hardmix.settings.config import DataConfig, PretrainConfig
from hardmix.settings.fitting_rules import QUEUE_SHARE
from hardmix.training.metric_logs import LearningWatch, OnLog, open_logs
from hardmix.training.nan_guard import LossScaler, StepSnapshot, judged_late
from hardmix.training.online_probe import OnlineProbe, build_probe
from hardmix.training.optimizers import build_optimizer, parameters_of
from hardmix.training.state import Training
from hardmix.weights.foreign import imported_parts, initial_trunk


@dataclass(frozen=True, kw_only=True)
class Own:
    """The user's own objects, which replace what the settings name."""

    trunk: nn.Module | None = None
    mixing: OwnMixing | None = None
    images: ImageSet | None = None
    views: Pipeline | Sequence[Pipeline] | None = None
    on_log: OnLog | None = None


def prepare(
    config: PretrainConfig,
    run: Run,
    own: Own,
    stop: StopRequest,
    listed: ImageSet | None = None,
) -> Training:
    """Check and build everything a run needs, without writing anything.

    `listed` are the run's images, if they were opened earlier with other settings.
    """
    compute = choose_compute(config.train.device, config.train.precision)
    check_graphs(config, compute.device)
    check_queue_fits(config, memory_of(compute.device))
    logs = open_logs(config, own.on_log)
    if own.images is not None:
        check_own(own.images, config.data)
    kind = method_class(config.method)
    images, loader = open_loader(
        config.data,
        config.train,
        compute.device,
        kind.view_kinds(config),
        own=own.images,
        pipeline=own.views,
        labelled=kind.needs_labels,
        listed=listed,
    )
    check_data(config, images)
    torch.manual_seed(seed_of("weights", config.train.seed))
    trunk = initial_trunk(config, run) if own.trunk is None else own.trunk
    materials = Materials(
        compute,
        trunk,
        own.mixing,
        None if images is None else len(images),
        len(images.classes or ()) if images is not None else 0,
        images,
    )
    method, probe = _method_of(config, run, materials)
    meet()  # a process that could not build its method is noticed before the others wait on GPUs
    method.distribute()
    if compute.device.type != "cpu" and config.train.compile == "no":
        count_on_host(method)  # now, as some versions of DDP send all buffers once, by NCCL
    optimizer = build_optimizer(method.parameter_groups(), config.optimizer)
    late = judged_late(compute.device)
    return Training(
        config=config,
        run=run,
        logs=[*logs, LearningWatch(config)],
        compute=compute,
        images=images,
        loader=loader,
        method=method,
        optimizer=optimizer,
        snapshot=StepSnapshot(method, parameters_of(optimizer), late),
        late=late,
        scaler=LossScaler(compute.device) if compute.precision == "fp16" else None,
        stop=stop,
        knn_images=open_knn_images(config, images),
        probe=probe,
        own_trunk=own.trunk is not None,
        starts_from_weights=trunk is not None,
    )


def _method_of(
    config: PretrainConfig, run: Run, materials: Materials
) -> tuple[Method, OnlineProbe | None]:
    """Return the method on its device, ready to be distributed, and the probe, if there is one."""
    method = build_method(config, materials)
    method.adopt(imported_parts(config, run))
    method.to(materials.compute.device).to(memory_format=torch.channels_last).train()
    if config.freezes_statistics:
        for part in list(method.modules()):
            if isinstance(trunk := getattr(part, "trunk", None), nn.Module):
                freeze_statistics(trunk)
    probe = None
    if config.train.probe:
        probe = build_probe(method.trunk, config.data, materials)
    if config.train.compile != "no":
        method.compile_parts(config.train.compile)
    return method, probe


def check_own(images: ImageSet, config: DataConfig) -> None:
    """Raise InputError if the user's own image set contradicts itself or the config."""
    labels, classes = images.labels, images.classes or ()
    if images.channels != config.channels:
        raise InputError(
            f"data.channels={config.channels}, but {images.name} has channels={images.channels}:"
            " set both to the number of channels of the images."
        )
    if labels is not None and len(labels) != len(images):
        raise InputError(
            f"{images.name} has {len(labels)} labels for {len(images)} images: give one label"
            " per image, -1 if its class is unknown, or labels=None."
        )
    if labels is not None and len(labels) and int(labels.max()) >= len(classes):
        raise InputError(
            f"{images.name} has the label {int(labels.max())} but {len(classes)} classes: name"
            " every class, counting labels from 0."
        )


def check_graphs(config: PretrainConfig, device: torch.device) -> None:
    """Raise InputError if CUDA graphs are asked for without CUDA."""
    if config.train.compile == "graphs" and device.type != "cuda":
        raise InputError(
            f"train.compile=graphs records CUDA graphs, which train.device={device} does not have:"
            " choose all, encoders or no."
        )


def check_queue_fits(config: PretrainConfig, memory: int) -> None:
    """Raise InputError if the queue would not fit in memory."""
    needed = config.train.queue_size * config.model.dim * torch.float32.itemsize
    if config.uses("train.queue_size") and needed > memory:
        raise InputError(
            f"train.queue_size={config.train.queue_size} keys of model.dim={config.model.dim} need"
            f" {needed / 1e9:.1f} GB, but there are only {memory / 1e9:.1f} GB: lower"
            " train.queue_size or model.dim."
        )


def check_data(config: PretrainConfig, images: ImageSet | None) -> None:
    """Raise InputError for images that cannot be trained on; warn of unsuitable settings."""
    labelled = images is not None and images.labels is not None
    for needs_labels, reason in [
        (config.oracle, "oracle=True drops negatives of the query's class"),
        (method_class(config.method).needs_labels, f"method={config.method} trains on classes"),
        (config.train.probe, "train.probe=True trains a classifier"),
    ]:
        if needs_labels and not labelled:
            raise InputError(f"{reason}: these images have no labels; use folders named by class.")
    if config.train.probe and images is not None:
        images.labelled()  # raises InputError if no class is known
    if images is not None and config.uses("train.queue_start"):
        warn_of_large_queue(config, len(images))
    if config.uses("model.key_bn_splits"):
        warn_of_key_groups(config)
    if config.only_warms_up:
        warn(
            f"mix.warm_up_epochs={config.mix.warm_up_epochs:g} covers all"
            f" {config.train.last_epoch} epochs: nothing is mixed, and the run equals one without"
            " points bit for bit; lower mix.warm_up_epochs, or train longer."
        )


def warn_of_large_queue(config: PretrainConfig, number: int) -> None:
    """Warn if the queue holds more keys than a fifth of the number of images."""
    if QUEUE_SHARE * config.train.queue_size > number:
        masked = "; set train.exclude_same_image" * (not config.train.exclude_same_image)
        warn(
            f"train.queue_size={config.train.queue_size} is more than a fifth of the {number}"
            " images: queries often meet older keys of their own image and of similar ones; lower"
            f" train.queue_size to {max(1, number // QUEUE_SHARE)} or less{masked}."
        )


def warn_of_key_groups(config: PretrainConfig) -> None:
    """Warn if keys are normalised together with their queries, or in more groups than asked for."""
    splits = config.model.key_bn_splits
    if splits == 1 and world_size() == 1:
        warn(UNSPLIT_WARNING)
    if splits < world_size():
        warn(
            f"model.key_bn_splits={splits} with {world_size()} processes: each process normalises"
            f" its own keys, so there are {world_size()} groups of"
            f" {config.train.batch_size // world_size()} keys, not {splits} of"
            f" {config.train.batch_size // splits}. Set model.key_bn_splits to"
            f" {world_size()} to silence this warning."
        )
