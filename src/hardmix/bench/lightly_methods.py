"""lightly's SimCLR, BYOL and SwAV as in its own examples, for comparison.

Written against lightly 1.6, which nothing else in hardmix imports but lightly_peer.py.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hardmix.bench.lightly_peer import lightly

LR = 0.06
"""Of its examples' SGD."""


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
