"""An online linear probe (train.probe): a linear classifier that learns beside the method.

It reads the trunk's features of the first views as the method computes them, detached, and the
labels. Nothing flows back: the encoder and all random numbers stay the same bit for bit, as long as
torch.compile compiles nothing. Each batch is classified before the probe learns from it. Images
without a label take no part, and gradients are sums over all processes, so that the probe does not
depend on their number.

Features have unit length here, so that one learning rate is stable for every trunk: momentum SGD
needs lr < 2 (1 + momentum) / curvature, and the curvature, with the bias, is at most 1.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from hardmix.errors import InputError
from hardmix.methods.base import Materials
from hardmix.mixing.queue import UNKNOWN
from hardmix.models.backbones import feature_width
from hardmix.runtime.distributed import add_up
from hardmix.settings.config import DataConfig, OptimizerConfig
from hardmix.training.optimizers import build_optimizer

SGD = OptimizerConfig(lr=2.0, momentum=0.9, weight_decay=0.0)
"""The probe's own optimizer; its learning rate is constant, as the features keep changing."""

Call = tuple[torch.Size, Tensor]
"""Shape of the images of a call of the trunk, and their features."""
Hook = Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]


class OnlineProbe:
    """A linear layer from features to classes, its optimizer, and its accuracy since a log line."""

    def __init__(self, width: int, classes: int, device: torch.device) -> None:
        # Weights of zero need no random numbers; the problem is convex.
        self.classifier = nn.utils.skip_init(nn.Linear, width, classes, device=device)
        for parameter in self.classifier.parameters():
            nn.init.zeros_(parameter)
        self._optimizer = build_optimizer([{"params": list(self.classifier.parameters())}], SGD)
        self._counts = torch.zeros(2, device=device)  # images classified correctly, and in all
        self._calls: list[Call] = []
        self._parts: list[Tensor] = []
        self._ears: torch.utils.hooks.RemovableHandle | None = None

    def listen_to(self, trunk: nn.Module) -> None:
        """Hear the trunk's features from now on; call this before it is compiled."""
        self._ears = trunk.register_forward_hook(_note_in(self._calls))

    def close(self) -> None:
        """Leave the trunk, which may be the user's own, without a trace."""
        if self._ears is not None:
            self._ears.remove()

    def forget(self) -> None:
        """Forget the features of a step that was not completed."""
        self._parts.clear()

    @contextmanager
    def hears(self, views: Float[Tensor, "batch channels y x"]) -> Iterator[None]:
        """Keep the features of the first views, which a method's loss computes within the context.

        They are the first rows of the trunk's first call with images of their size (see
        `Method.trunk`).
        """
        self._calls.clear()
        yield
        features = (each for shape, each in self._calls if shape == views.shape[1:])
        mine = next(features, None)
        if mine is None:
            raise InputError(
                "train.probe=True, but this method's loss does not pass its first views through"
                " its trunk, so that there are no features to classify: leave train.probe off."
            )
        self._parts.append(mine[: len(views)])
        self._calls.clear()

    def learn(self, labels: Int64[Tensor, " batch"], broken: Float[Tensor, ""]) -> None:
        """Classify the step's images, then take a step of SGD, unless the method's is `broken`."""
        features = normalize(torch.cat(self._parts).float(), dim=1)
        self.forget()
        logits = self.classifier(features)
        loss = cross_entropy(logits, labels, ignore_index=UNKNOWN, reduction="sum")
        parameters = list(self.classifier.parameters())
        gradients = torch.autograd.grad(loss, parameters)
        counts = torch.stack([logits.argmax(dim=1) == labels, labels != UNKNOWN]).sum(dim=1)
        sums = add_up(torch.cat([*map(torch.flatten, gradients), counts]))
        known = sums[-1].clamp(min=1)
        sizes = [parameter.numel() for parameter in parameters]
        for parameter, total in zip(parameters, sums[:-2].split(sizes), strict=True):
            parameter.grad = (total / known).view_as(parameter)
        self._optimizer.found_inf = broken  # type: ignore[attr-defined]  # torch reads this name
        self._optimizer.step()
        self._counts += torch.where(broken > 0, 0.0, sums[-2:])

    def take_accuracy(self) -> Float[Tensor, ""]:
        """Return the accuracy on all labelled images since the last call; NaN if there are none."""
        accuracy: Tensor = self._counts[0] / self._counts[1]
        self._counts.zero_()
        return accuracy

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint stores."""
        named = dict(self.classifier.named_parameters())
        state = self._optimizer.state
        momentum = {f"momentum.{k}": state[each]["momentum_buffer"] for k, each in named.items()}
        return {k: each.detach() for k, each in named.items()} | momentum | {"counts": self._counts}


def build_probe(trunk: nn.Module, data: DataConfig, materials: Materials) -> OnlineProbe:
    """Return a probe that hears this trunk."""
    width = feature_width(trunk, data.channels, data.image_size)
    probe = OnlineProbe(width, materials.num_classes, materials.compute.device)
    probe.listen_to(trunk)
    return probe


def _note_in(calls: list[Call]) -> Hook:
    """Return a hook that appends a trunk's features to a list, with the shape of an image.

    It is a function, which copies of a trunk share; torch.compile leaves it alone.
    """

    def note(trunk: nn.Module, inputs: tuple[Tensor, ...], features: Tensor) -> None:  # noqa: ARG001
        calls.append((inputs[0].shape[1:], features.detach()))

    hook: Hook = torch.compiler.disable(note)
    return hook
