"""Batch norm over groups of a batch, or over the batches of all processes.

Groups stand for the GPUs of official MoCo, whose keys are normalised apart from each other. SimCLR,
BYOL, SwAV and detectors need the opposite: SimCLR compares the images of a batch with each other,
and with statistics of its own a process could tell its images from others (Sec. 2.3, "global BN").
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hardmix.errors import InputError
from hardmix.runtime.distributed import add_up, world_size


def split_batch_norm(module: nn.Module, splits: int) -> nn.Module:
    """Make every batch norm in `module` normalise each of `splits` groups of the batch separately.

    This does on one device what `splits` GPUs do in official MoCo; groups are consecutive rows. It
    affects training mode only: evaluation and the state_dict are unchanged, so that split and plain
    modules load each other's state. Running statistics move by the layer's momentum towards the
    mean over the groups; num_batches_tracked counts groups. Changes `module` in place and returns
    it; 1 undoes it.
    """
    if splits < 1:
        raise InputError(f"splits={splits} must be at least 1; 1 is the whole batch.")
    for norm in batch_norms(module):
        norm.forward = partial(_normalise_groups, norm, splits)  # type: ignore[method-assign]
    return module


def batch_norms(module: nn.Module) -> list[_BatchNorm]:
    """Return all batch norms in a module."""
    return [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]


def count_on_host(module: nn.Module) -> None:
    """Keep the number of batches that every batch norm has seen on the host.

    Each count would be a launch: one for every layer, and for every group of the keys. A layer
    without a momentum, which reads it, would wait for the GPU.
    """
    for norm in batch_norms(module):
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked = norm.num_batches_tracked.cpu()


def freeze_statistics(module: nn.Module) -> None:
    """Make every batch norm in `module` use its running statistics for good, in training too.

    With statistics that move, good weights lose more than a short training improves: the variances
    of new images, augmented ones at that, replace those that the weights were trained with.
    """
    for norm in batch_norms(module):
        norm.eval()
        norm.train = partial(_stay, norm)  # type: ignore[method-assign]


def _stay(norm: _BatchNorm, mode: bool = True) -> _BatchNorm:  # noqa: ARG001
    """Take the place of `train`, which every `module.train()` around a layer calls."""
    return norm


def _normalise_groups(norm: _BatchNorm, splits: int, batch: Tensor) -> Tensor:
    """Run the layer's own forward on each group, which also works for subclasses such as timm's.

    A loop is fastest: folding groups into channels copies channels-last images twice and takes
    three times as long. Each group moves the running statistics by a different momentum, chosen so
    that all groups have the same weight in the end.
    """
    forward = type(norm).forward
    if splits == 1 or not norm.training:
        return forward(norm, batch)
    if len(batch) % splits or len(batch) < 2 * splits:
        raise InputError(
            f"model.key_bn_splits={splits} cannot split {len(batch)} keys into equal groups of at"
            " least two: choose a divisor of the batch size on this process."
        )
    momentum, groups = norm.momentum, []
    for number, group in enumerate(batch.chunk(splits), start=1):
        if momentum is not None:
            norm.momentum = momentum / (splits * (1 - momentum) + number * momentum)
        groups.append(forward(norm, group))
    norm.momentum = momentum
    return torch.cat(groups)


def synchronise_batch_norm(module: nn.Module, device: torch.device) -> nn.Module:
    """Make every batch norm in `module` use the batches of all processes; one process is unchanged.

    Two processes then compute the same as one with the whole batch. State and evaluation do not
    change. On GPUs this is torch's SyncBatchNorm, which does not support CPUs.
    """
    if world_size() == 1:
        return module
    if device.type == "cuda":
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
        return converted
    for norm in batch_norms(module):
        norm.forward = partial(_normalise_together, norm)  # type: ignore[method-assign]
    return module


def _normalise_together(norm: _BatchNorm, batch: Tensor) -> Tensor:
    if not norm.training:
        return type(norm).forward(norm, batch)
    axes = [axis for axis in range(batch.ndim) if axis != 1]
    shape = [1, -1, *[1] * (batch.ndim - 2)]
    mean: Tensor = _MeanOverProcesses.apply(batch.mean(dim=axes))
    centred = batch - mean.view(shape)
    variance: Tensor = _MeanOverProcesses.apply(centred.square().mean(dim=axes))
    _remember(norm, mean.detach(), variance.detach(), batch.numel() // batch.shape[1])
    scale = torch.rsqrt(variance + norm.eps)
    if norm.affine:
        scale = scale * norm.weight
        return centred * scale.view(shape) + norm.bias.view(shape)
    return centred * scale.view(shape)


@torch.no_grad()
def _remember(norm: _BatchNorm, mean: Tensor, variance: Tensor, number: int) -> None:
    """Move the running statistics as torch does, the variance with Bessel's correction."""
    if norm.running_mean is None or norm.running_var is None:
        return
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked += 1
    momentum = norm.momentum
    if momentum is None:
        momentum = 1 / float(norm.num_batches_tracked)
    number *= world_size()
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), momentum)
    unbiased = variance * (number / max(1, number - 1))
    norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), momentum)


class _MeanOverProcesses(torch.autograd.Function):
    """Average a tensor over all processes, and its gradient likewise.

    The loss is the mean of the processes' losses, and so is its gradient.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:  # noqa: ARG004
        return _mean(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # noqa: ARG004
        return _mean(gradients[0])


def _mean(value: Tensor) -> Tensor:
    total = value.detach().clone(memory_format=torch.contiguous_format)
    return add_up(total) / world_size()
