"""Batch norm over the batches of all processes, with its gradient.

SimCLR, BYOL and SwAV compare the images of a batch with each other: with statistics of its own a
process could tell its images from those of others (SimCLR, Sec. 2.3, "global BN").
"""

from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hardmix.runtime.distributed import add_up, world_size


def synchronise_batch_norm(module: nn.Module, device: torch.device) -> nn.Module:
    """Make every batch norm in `module` one over all processes; nothing changes on one process.

    State and evaluation stay as they were. Two processes then compute what one does with the whole
    batch. On GPUs these are torch's own SyncBatchNorm, which does not support CPUs.
    """
    if world_size() == 1:
        return module
    if device.type == "cuda":
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
        return converted
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            layer.forward = partial(_normalise_together, layer)  # type: ignore[method-assign]
    return module


def _normalise_together(norm: _BatchNorm, batch: Tensor) -> Tensor:
    if not norm.training:
        return type(norm).forward(norm, batch)
    axes = [axis for axis in range(batch.ndim) if axis != 1]
    shape = [1, -1, *[1] * (batch.ndim - 2)]
    mean = mean_over_processes(batch.mean(dim=axes))
    centred = batch - mean.view(shape)
    variance = mean_over_processes(centred.square().mean(dim=axes))
    _remember(norm, mean.detach(), variance.detach(), batch.numel() // batch.shape[1])
    scale = torch.rsqrt(variance + norm.eps)
    if norm.affine:
        scale = scale * norm.weight
        return centred * scale.view(shape) + norm.bias.view(shape)
    return centred * scale.view(shape)


@torch.no_grad()
def _remember(norm: _BatchNorm, mean: Tensor, variance: Tensor, number: int) -> None:
    """Move the running statistics as torch does: the variance with Bessel's correction."""
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
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:  # noqa: ARG004
        return _mean(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # noqa: ARG004
        # The loss is the mean of the processes' losses, and so is its gradient.
        return _mean(gradients[0])


def _mean(value: Tensor) -> Tensor:
    total = value.detach().clone(memory_format=torch.contiguous_format)
    return add_up(total) / world_size()


def mean_over_processes(value: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """The processes' mean of a tensor, through which gradients pass; itself on one process."""
    if world_size() == 1:
        return value
    mean: Tensor = _MeanOverProcesses.apply(value)
    return mean
