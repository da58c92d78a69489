"""Optimizers by name, and their learning rate at any step.

To add one, write a function here, list it in `OPTIMIZERS`, and add its name to the settings.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hardmix.settings.config import OptimizerConfig, PretrainConfig
from hardmix.settings.named_choices import OptimizerName
from hardmix.settings.schedules import cosine, step, warm_up

Groups = list[dict[str, Any]]
"""Parameter groups with their own settings, as torch's optimizers take them."""

TRUST = 0.001
"""Trust coefficient of LARS (eta in You et al. 2017; SimCLR uses the same value)."""


class Lars(torch.optim.Optimizer):
    """SGD with momentum, each layer's step scaled by the norm of its weights (You et al. 2017).

    As in SimCLR's and BYOL's code, the scale is |w| / |g + decay w|; You et al. divide by
    |g| + decay |w|, and so does LARC. Norms and biases that are not decayed
    (optimizer.decay_all=False) are updated by plain SGD, also as there, and so is a layer whose
    weights or gradients are all 0.
    """

    found_inf: Tensor | None = None
    """1 if gradients are NaN or infinite, so that nothing may be updated; the name is the one that
    torch's optimizers use."""

    def __init__(
        self, params: Any, lr: float, momentum: float = 0.9, weight_decay: float = 0.0
    ) -> None:
        options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, {**options, "in_proportion": True})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step; parameters without a gradient are skipped."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group)

    def _move(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient = parameter.grad
        assert gradient is not None
        decay = group["weight_decay"]
        gradient = gradient.add(parameter, alpha=decay)
        if group["in_proportion"]:
            length, slope = parameter.norm(), gradient.norm()
            gradient *= torch.where((length > 0) & (slope > 0), TRUST * length / slope, 1.0)
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer = state["momentum_buffer"]
        moved = buffer.mul(group["momentum"]).add_(gradient)
        if self.found_inf is not None:  # only the device knows whether the step is skipped
            moved = torch.where(self.found_inf > 0, buffer, moved)
        step = moved if self.found_inf is None else moved * (1 - self.found_inf)
        buffer.copy_(moved)
        parameter.add_(step, alpha=-group["lr"])


def build_optimizer(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return the optimizer of a run; a group's learning rate is `lr` times its "lr_factor"."""
    if not config.decay_all:
        groups = [part for group in groups for part in _without_decay(group)]
    return OPTIMIZERS[config.name](groups, config)


def _without_decay(group: dict[str, Any]) -> Groups:
    """Split a group into weights, and norms and biases (one dimension), which are not decayed."""
    weights = [parameter for parameter in group["params"] if parameter.ndim > 1]
    others = [parameter for parameter in group["params"] if parameter.ndim <= 1]
    plain = {"weight_decay": 0.0, "in_proportion": False}
    parts = [{**group, "params": weights}, {**group, "params": others, **plain}]
    return [part for part in parts if part["params"]]


def _sgd(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return SGD as in App. C.1 and official MoCo."""
    optimizer = torch.optim.SGD(
        groups,
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        fused=True,
    )
    if config.momentum:
        # Torch makes these buffers at the first step from uninitialised memory, and if that step
        # is broken and skipped, they keep it.
        for parameter in parameters_of(optimizer):
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def _lars(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    return Lars(groups, config.lr, config.momentum, config.weight_decay)


def _adamw(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return AdamW (Loshchilov and Hutter, 2019)."""
    return torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        weight_decay=config.weight_decay,
        fused=True,
    )


OPTIMIZERS: dict[OptimizerName, Callable[[Groups, OptimizerConfig], torch.optim.Optimizer]] = {
    "sgd": _sgd,
    "lars": _lars,
    "adamw": _adamw,
}
"""Optimizers by the name in optimizer.name."""


def set_learning_rate(
    optimizer: torch.optim.Optimizer, config: PretrainConfig, epoch: int, done: float
) -> None:
    """Set the learning rate: per epoch as in official MoCo, per step during the warm-up."""
    options = config.optimizer
    if epoch + done < options.warm_up_epochs:
        factor = warm_up(epoch + done, options.warm_up_epochs)
    elif options.schedule == "cosine":
        factor = cosine(
            epoch - options.warm_up_epochs, config.train.epochs - options.warm_up_epochs
        )
    else:
        factor = step(epoch, options.milestones)
    for group in optimizer.param_groups:
        group["lr"] = options.lr * factor * group.get("lr_factor", 1.0)


def clip_gradients(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> None:
    """Clip the norm of all gradients together to optimizer.clip, if it is set."""
    if config.clip is not None:
        torch.nn.utils.clip_grad_norm_(list(parameters), config.clip)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters of an optimizer, in the order of its state."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
