"""Batch norm of a detector: synchronised over processes, and made precise before the test.

On GPUs, torch's SyncBatchNorm is used, which needs one call per layer and does not support CPUs. On
CPUs, it is detectron2's, used by official MoCo's detectors, in which every process counts equally.
"""

from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hardmix.models.synchronised import mean_over_processes
from hardmix.runtime.distributed import add_up, world_size

CPU = torch.device("cpu")


class SyncedBatchNorm2d(nn.BatchNorm2d):
    """Batch norm over the batches of all processes; with one process, exactly BatchNorm2d."""

    def forward(self, maps: Float[Tensor, "n channels y x"]) -> Float[Tensor, "n channels y x"]:
        """Normalised maps; the running variance is that of the batch, without correction."""
        if not self.training or world_size() == 1:
            return super().forward(maps)
        mean = mean_over_processes(maps.mean(dim=(0, 2, 3)))
        centred = maps - mean[:, None, None]
        variance = mean_over_processes(centred.square().mean(dim=(0, 2, 3)))
        self._remember(mean.detach(), variance.detach())
        scale = self.weight * torch.rsqrt(variance + self.eps)
        return centred * scale[:, None, None] + self.bias[:, None, None]

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        momentum = 0.1 if self.momentum is None else self.momentum
        assert self.running_mean is not None
        assert self.running_var is not None
        self.running_mean.lerp_(mean, momentum)
        self.running_var.lerp_(variance, momentum)


def synchronised(module: nn.Module, device: torch.device = CPU) -> nn.Module:
    """The same module, its batch norms replaced by synchronised ones with the same tensors.

    The kind depends on the device that it will run on.
    """
    kind = nn.SyncBatchNorm if device.type == "cuda" else SyncedBatchNorm2d
    for name, child in module.named_children():
        if type(child) is nn.BatchNorm2d:
            synced = kind(child.num_features, child.eps, child.momentum)
            synced.load_state_dict(child.state_dict())
            setattr(module, name, synced.to(child.weight.device))
        else:
            synchronised(child, device)
    return module


def batch_norms(module: nn.Module) -> list[_BatchNorm]:
    """Return all batch norms of a module, including synchronised ones."""
    return [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]


class _Sums:
    """Count, sum and sum of squares of a batch norm's inputs, by channel."""

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
    """Replace the running statistics by those of all these training batches together.

    Batches are run in training mode and weighted by size (as in fvcore's precise BN). The batches
    of all processes are pooled, so that the processes agree.
    """
    detector.train()
    all_sums = [_Sums(norm) for norm in batch_norms(detector)]
    for images, targets in batches:
        detector(images, targets)
    for sums in all_sums:
        sums.write()
