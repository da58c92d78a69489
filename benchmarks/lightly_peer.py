"""lightly's MoCo, SimCLR, BYOL and SwAV as in its own examples, for comparison.

Written against lightly 1.6; the extra `peers` installs it.
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
"""The settings of its CIFAR-10 example."""


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


class LightlyMethodStep:
    """A complete training step of one of its methods on the views of a batch."""

    def __init__(self, networks: nn.ModuleDict, loss: Callable[..., Tensor], device: str) -> None:
        self.networks = networks.to(device).train()
        trained = [each for each in networks.parameters() if each.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=LR)
        self._loss = loss

    def __call__(self, *views: Tensor) -> Tensor:
        """Forward, backward, update; returns the loss."""
        loss = self._loss(self.networks, views)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def simclr(trunk: nn.Module, width: int, dim: int, temperature: float, device: str) -> Any:
    """Each view passes the network by itself, as in its example."""
    head = lightly("models.modules").SimCLRProjectionHead(width, width, dim)
    criterion = lightly("loss").NTXentLoss(temperature=temperature)

    def loss(networks: nn.ModuleDict, views: tuple[Tensor, ...]) -> Tensor:
        rows = [networks["head"](networks["trunk"](view).flatten(start_dim=1)) for view in views]
        found: Tensor = criterion(*rows)
        return found

    return LightlyMethodStep(nn.ModuleDict({"trunk": trunk, "head": head}), loss, device)


def byol(trunk: nn.Module, width: int, dim: int, hidden: int, momentum: float, device: str) -> Any:
    """Online network and target, both views in both directions."""
    modules, tools = lightly("models.modules"), lightly("models.utils")
    criterion = lightly("loss").NegativeCosineSimilarity()
    networks = nn.ModuleDict(
        {
            "trunk": trunk,
            "head": modules.BYOLProjectionHead(width, hidden, dim),
            "predictor": modules.BYOLPredictionHead(dim, hidden, dim),
        }
    )
    for name in ("trunk", "head"):
        networks[f"target_{name}"] = copy.deepcopy(networks[name])
        tools.deactivate_requires_grad(networks[f"target_{name}"])

    def loss(networks: nn.ModuleDict, views: tuple[Tensor, ...]) -> Tensor:
        for name in ("trunk", "head"):
            tools.update_momentum(networks[name], networks[f"target_{name}"], m=momentum)
        predicted, projected = [], []
        for view in views:
            rows = networks["head"](networks["trunk"](view).flatten(start_dim=1))
            predicted.append(networks["predictor"](rows))
            target = networks["target_trunk"](view).flatten(start_dim=1)
            projected.append(networks["target_head"](target).detach())
        both = criterion(predicted[0], projected[1]) + criterion(predicted[1], projected[0])
        half: Tensor = 0.5 * both
        return half

    return LightlyMethodStep(networks, loss, device)


def swav(trunk: nn.Module, width: int, dim: int, number: int, device: str) -> Any:
    """Each crop passes the network by itself; no queue."""
    modules, criterion = lightly("models.modules"), lightly("loss").SwaVLoss()
    head, prototypes = (
        modules.SwaVProjectionHead(width, width, dim),
        modules.SwaVPrototypes(dim, number),
    )
    networks = nn.ModuleDict({"trunk": trunk, "head": head, "prototypes": prototypes})

    def loss(networks: nn.ModuleDict, views: tuple[Tensor, ...]) -> Tensor:
        prototypes.normalize()
        scores = []
        for view in views:
            rows = networks["head"](networks["trunk"](view).flatten(start_dim=1))
            rows = nn.functional.normalize(rows, dim=1, p=2)
            scores.append(networks["prototypes"](rows))
        found: Tensor = criterion(scores[:2], scores[2:]).squeeze()
        return found

    return LightlyMethodStep(networks, loss, device)


def lightly(name: str) -> Any:
    """Import one of lightly's modules, which is optional, slow to import and untyped."""
    return import_module(f"lightly.{name}")
