"""lightly's MoCo as in its own CIFAR-10 example, for comparison.

Written against lightly 1.6; the extra `peers` installs it, and nothing else in hardmix imports it.
"""

import copy
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn

Images = Float[Tensor, "batch channels y x"]
DIM, MOMENTUM, LR = 128, 0.99, 0.06
"""Its example's."""


class LightlyStep:
    """A complete training step; returns the loss. The optimizer has no momentum, as in lightly."""

    def __init__(
        self, trunk: nn.Module, width: int, size: int, temperature: float, device: str
    ) -> None:
        losses, tools = lightly("loss"), lightly("models.utils")
        self._update_momentum: Callable[..., None] = tools.update_momentum
        self.trunk = trunk
        self.head: nn.Module = lightly("models.modules").MoCoProjectionHead(width, width, DIM)
        self.key_trunk, self.key_head = copy.deepcopy(self.trunk), copy.deepcopy(self.head)
        for network in (self.key_trunk, self.key_head):
            tools.deactivate_requires_grad(network)
        for network in (self.trunk, self.head, self.key_trunk, self.key_head):
            network.to(device).train()
        loss = losses.NTXentLoss(temperature=temperature, memory_bank_size=(size, DIM))
        self.criterion: nn.Module = loss.to(device)
        trained = [*self.trunk.parameters(), *self.head.parameters()]
        self.optimizer = torch.optim.SGD(trained, lr=LR)

    def __call__(self, query_images: Images, key_images: Images) -> Float[Tensor, ""]:
        """Forward, backward, update."""
        self._update_momentum(self.trunk, self.key_trunk, m=MOMENTUM)
        self._update_momentum(self.head, self.key_head, m=MOMENTUM)
        query = self.head(self.trunk(query_images).flatten(start_dim=1))
        key = self.key_head(self.key_trunk(key_images).flatten(start_dim=1)).detach()
        loss: Tensor = self.criterion(query, key)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class LightlyViews:
    """Its MoCo-v2 views of a PIL image."""

    def __init__(self, size: int) -> None:
        make = lightly("transforms").MoCoV2Transform
        self.transform: Callable[[Image.Image], Sequence[Tensor]] = make(input_size=size)

    def __call__(self, image: Image.Image) -> list[Float[Tensor, "3 size size"]]:
        """Query and key."""
        return list(self.transform(image))


def lightly(name: str) -> Any:
    """Import one of lightly's modules, which is optional, slow to import and untyped."""
    return import_module(f"lightly.{name}")
