"""Fine-tuning a detector: SGD on a schedule of steps, from one checkpoint to the next.

Every random choice is a function of (seed, step): a stopped run resumes as if it had never been
interrupted.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hardmix.data.image_files import UnreadableImage
from hardmix.data.workers import WorkerPool
from hardmix.errors import InputError
from hardmix.evaluation.detection.boxes import Sampling
from hardmix.evaluation.detection.c4 import (
    C4Detector,
    Image,
    RoiSettings,
    RpnSettings,
    Target,
    TopK,
)
from hardmix.evaluation.detection.samples import DetectionImage, DetectionSet
from hardmix.evaluation.detection.transforms import (
    DetectorInput,
    grouped_batches,
    training_input,
)
from hardmix.models.batch_norm import batch_norms, synchronise_batch_norm
from hardmix.runs.checkpoints import optimizer_tensors, share_optimizer
from hardmix.runs.folder import Run
from hardmix.runtime.console import Meter, say, warn
from hardmix.runtime.device import Compute, Late, one_launch, read_together, send
from hardmix.runtime.distributed import (
    add_up,
    broadcast_object,
    is_main,
    rank,
    share_state,
    together,
    world_size,
    wrap,
)
from hardmix.runtime.random_numbers import seed_of
from hardmix.settings.evaluations import DetectionConfig

CPU = torch.device("cpu")


WARM_UP_FROM = 1e-3
"""Factor on the learning rate at the first step."""

MOMENTUM = 0.9

Visits = list[tuple[int, int]]
"""The images of a batch, each as (epoch, position among the images)."""


@dataclass
class DetectorTraining:
    """The state of a trial between two steps."""

    config: DetectionConfig
    seed: int
    data: DetectionSet
    folder: Run
    """The trial's folder: checkpoints and metrics."""
    detector: C4Detector
    optimizer: torch.optim.SGD
    compute: Compute
    step: int = 0
    late: tuple[int, Late] | None = None
    """The last step and its loss, which on a GPU is read a step later."""

    def __post_init__(self) -> None:
        self.model: nn.Module = self.detector
        if world_size() > 1:
            self.model = wrap(self.detector, self.compute.device)


def build_detector(
    trunk: nn.Module, classes: int, config: DetectionConfig, device: torch.device = CPU
) -> C4Detector:
    """Build a detector around a trunk, with batch norm over all processes, on a device."""
    detector = C4Detector(
        trunk,
        classes,
        masks=config.task == "coco",
        rpn=RpnSettings(test=TopK(6000, config.proposals)),
        roi=RoiSettings(sampling=Sampling(config.regions, 0.25)),
    )
    synchronise_batch_norm(detector, device)
    return detector.to(device)


def build_optimizer(detector: nn.Module, config: DetectionConfig) -> torch.optim.SGD:
    """Return SGD without weight decay on batch norm."""
    norms = [parameter for layer in batch_norms(detector) for parameter in layer.parameters()]
    ids = set(map(id, norms))
    others = [parameter for parameter in detector.parameters() if id(parameter) not in ids]
    groups = [
        {"params": others, "weight_decay": config.weight_decay},
        {"params": norms, "weight_decay": 0.0},
    ]
    fused = one_launch(others[0].device)
    return torch.optim.SGD(groups, lr=config.lr, momentum=MOMENTUM, fused=fused)


def learning_rate(config: DetectionConfig, step: int) -> float:
    """Return the learning rate: a linear warm-up, then divided by 10 at each milestone."""
    rate = config.lr * 0.1 ** sum(step >= milestone for milestone in config.milestones)
    if step >= config.warm_up:
        return rate
    done = step / config.warm_up
    return rate * (WARM_UP_FROM * (1 - done) + done)


def train_until(training: DetectorTraining, stop: int, batches: "Batches", meter: Meter) -> None:
    """Train up to step `stop`, logging losses to metrics.jsonl."""
    config, detector, model = training.config, training.detector, training.model.train()
    shown: list[str] = []
    for images, targets in together(batches.read(training.step, stop)):
        rate = learning_rate(config, training.step)
        for group in training.optimizer.param_groups:
            group["lr"] = rate
        seed_sampling(detector, training.seed, training.step)
        with training.compute.autocast():
            losses: dict[str, Tensor] = model(images, targets)
        total = torch.stack(list(losses.values())).sum()
        training.optimizer.zero_grad()
        total.backward()
        check_finite(training)  # the previous step's loss, which is already computed
        training.late = training.step, Late(total)
        if training.compute.device.type == "cpu":
            check_finite(training)
        training.optimizer.step()
        training.step += 1
        if training.step % config.log_every == 0:
            check_finite(training)
            numbers = read_together({"loss": total.detach(), **losses})
            shown = [f"loss {numbers['loss']:.3f}"]
            if is_main():
                training.folder.log({"step": training.step, "lr": rate, **numbers})
        meter.advance(training.step, None, *shown)


def seed_sampling(detector: C4Detector, seed: int, step: int) -> None:
    """Seed the sampling of the boxes that the losses of a step use on this process."""
    generator = torch.Generator().manual_seed(seed_of("sampling", seed, step, rank()))
    detector.shuffle = partial(torch.randperm, generator=generator)


def check_finite(training: DetectorTraining) -> None:
    """Raise InputError if the loss is NaN or infinite; the last checkpoint stays usable."""
    if training.late is None:
        return
    (step, late), training.late = training.late, None
    loss = float(late.read())
    if not math.isfinite(loss):
        raise InputError(
            f"the loss is {loss} at step {step}: detect.lr={training.config.lr:g} is"
            " most likely too high for this batch size; start again with a lower learning rate in"
            " another folder."
        )


def precise_statistics(training: DetectorTraining, batches: "Batches") -> None:
    """Set the batch-norm statistics from many training batches, before a test."""
    config = training.config
    if config.precise_bn == 0:
        return
    say(f"Precise batch norm: {config.precise_bn} batches.")
    seed_sampling(training.detector, training.seed, training.step)
    read = batches.read(config.iterations, config.iterations + config.precise_bn)
    make_precise(training.detector, together(read))


class Batches:
    """Training batches by the number of their step, read ahead by worker processes."""

    def __init__(
        self, data: DetectionSet, config: DetectionConfig, seed: int, device: torch.device
    ):
        if config.batch_size % world_size():
            raise InputError(
                f"detect.batch_size={config.batch_size} must be a multiple of the {world_size()}"
                " processes."
            )
        self._data, self._seed, self._device = data, seed, device
        self._size = config.batch_size // world_size()
        read = partial(
            read_batch, data.images, config.sides, seed, with_masks=config.task == "coco"
        )
        self._pool = WorkerPool(read, config.workers, device)
        self._next, self._stream = 0, self._batches()
        self.unreadable: set[str] = set()

    def read(self, first: int, stop: int) -> Iterator[tuple[list[Image], list[Target]]]:
        """Yield images and targets of the steps from `first` to before `stop`."""
        if first < self._next:
            self._next, self._stream = 0, self._batches()
        jobs = list(islice(self._stream, first - self._next, stop - self._next))
        self._next = stop
        for inputs, faults in self._pool.run(jobs):
            for fault in faults:
                if fault not in self.unreadable:
                    self.unreadable.add(fault)
                    warn(f"{fault}: skipped.")
            images = [send(each.image, self._device) for each in inputs]
            yield images, [_target(each, self._device) for each in inputs]

    def close(self) -> None:
        """Stop the worker processes."""
        self._pool.close()

    def _batches(self) -> Iterator[Visits]:
        return grouped_batches(self._data.images, self._size, self._seed, rank(), world_size())


def read_batch(
    images: tuple[DetectionImage, ...],
    sides: tuple[int, ...],
    seed: int,
    visits: Visits,
    *,
    with_masks: bool,
) -> tuple[list[DetectorInput], list[str]]:
    """Return the images of a batch, and sentences about those that cannot be read.

    An unreadable image is replaced by the next one, so that a batch keeps its size.
    """
    inputs, faults = [], []
    for epoch, position in visits:
        for offset in range(len(images)):
            sample = images[(position + offset) % len(images)]
            try:
                inputs.append(training_input(sample, sides, seed, epoch, with_masks))
                break
            except UnreadableImage as error:
                faults.append(str(error))
        else:
            raise InputError("none of the training images can be read.")
    return inputs, faults


def _target(sample: DetectorInput, device: torch.device) -> Target:
    masks = None if sample.masks is None else send(sample.masks, device)
    return Target(send(sample.boxes, device), send(sample.classes, device), masks)


def save(training: DetectorTraining) -> None:
    """Write a checkpoint, from which a stopped trial resumes."""
    check_finite(training)
    tensors = {f"detector.{k}": v for k, v in training.detector.state_dict().items()}
    moving = optimizer_tensors(training.optimizer)
    tensors |= {f"optimizer.{name}": value for name, value in moving.items()}
    if is_main():
        training.folder.save_checkpoint(training.step, tensors, {})


def restore(training: DetectorTraining) -> None:
    """Resume from the newest intact checkpoint, if any; rank 0 reads it for all."""
    checkpoint = training.folder.load_checkpoint() if is_main() else None
    step = broadcast_object(checkpoint and checkpoint.manifest["step"])
    if step is None:
        training.folder.forget_after(0)  # what was logged before a first checkpoint
        return
    for name in checkpoint.broken if checkpoint else ():
        warn(f"{name} does not match its checksum: using the checkpoint before it.")
    detector, momentum = (
        {k.removeprefix(part): v for k, v in checkpoint.tensors.items() if k.startswith(part)}
        if checkpoint
        else {}
        for part in ("detector.", "optimizer.")
    )
    if is_main():
        training.detector.load_state_dict(detector)
    share_state(training.detector)
    share_optimizer(training.optimizer, momentum)
    training.step = step
    if is_main():
        training.folder.forget_after(training.step)
    say(f"Resuming from step {training.step}.")


class _Sums:
    """The count, sum and sum of squares of a batch norm's inputs, by channel."""

    def __init__(self, norm: _BatchNorm) -> None:
        self.norm = norm
        self.values = norm.weight.new_zeros(3, norm.num_features, dtype=torch.float64)
        self._hook = norm.register_forward_pre_hook(self._add)

    def _add(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        maps = inputs[0].detach().double()
        count = torch.full_like(maps[0, :, 0, 0], maps.numel() / maps.shape[1])
        sums = [count, maps.sum(dim=(0, 2, 3)), maps.square().sum(dim=(0, 2, 3))]
        self.values += torch.stack(sums)

    def write(self) -> None:
        """Set the norm's statistics to the mean and variance over all processes."""
        self._hook.remove()
        count, total, squares = add_up(self.values)
        mean = total / count
        assert self.norm.running_mean is not None
        assert self.norm.running_var is not None
        self.norm.running_mean.copy_(mean)
        self.norm.running_var.copy_(squares / count - mean.square())


@torch.no_grad()
def make_precise(detector: nn.Module, batches: Iterable[Any]) -> None:
    """Replace the running statistics of batch norm by those of all these batches together.

    Batches are run in training mode and weighted by size, as in fvcore's precise BN. The batches of
    all processes are pooled, so that the processes agree.
    """
    detector.train()
    sums_of_norms = [_Sums(norm) for norm in batch_norms(detector)]
    for images, targets in batches:
        detector(images, targets)
    for sums in sums_of_norms:
        sums.write()
