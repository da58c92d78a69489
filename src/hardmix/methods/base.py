"""The seam between the loop and what is trained. A method is one file here and one line in METHODS.

The loop (training/) owns accumulation, autocast, averaging over processes, NaN, the optimizer and
its schedule. A method has networks and a loss, remembers what the next step needs, and says what it
saw. The order of a step:

    begin_step -> for every part of the batch: loss, and its gradient -> the optimizer -> after_step
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from hardmix.data.batches import Batch, Loader
from hardmix.mixing.infonce import Contrast
from hardmix.mixing.plans import MixPlan, Strategy
from hardmix.mixing.queue import MemoryQueue
from hardmix.runtime.device import Compute
from hardmix.runtime.distributed import agree_on_max, data_parallel, share_state
from hardmix.settings.config import PretrainConfig
from hardmix.settings.methods import MethodOptions


class TrainingPosition(NamedTuple):
    """Where in training a step is."""

    step: int
    epoch: int
    part: int = 0
    """Number of the part of its batch (train.accumulate)."""
    described: bool = True
    """Whether `describe` will be asked about this step; else its outcomes are dropped."""


class Materials(NamedTuple):
    """What a method is built with beside its config."""

    compute: Compute
    """Where it computes."""
    trunk: nn.Module | None = None
    """A network of the user's own."""
    strategy: Strategy | None = None
    """The user's own way to plan points."""
    num_images: int | None = None
    """Of the data set; None for a stream."""
    num_classes: int = 0
    """Of its labels."""


@dataclass
class StepOutcome:
    """What a part of a batch gave. A method adds what it wants to describe, detached."""

    loss: Float[Tensor, ""]
    """Differentiable; the loop takes its gradient."""


class NonFiniteError(Exception):
    """A loss or gradient is NaN or infinite; raised by all ranks at the same step."""


class Method(nn.Module):
    """What is trained, and what it is trained for. Subclasses need `networks`, `trunk`, `loss`."""

    Options: ClassVar[type[MethodOptions] | None] = None
    """Its own settings, which are `--NAME.*` on the command line; they stand in settings."""
    views: ClassVar[int] = 2
    """How many views of an image it looks at."""
    needs_labels: ClassVar[bool] = False
    """Whether it trains on classes."""
    trunk: nn.Module
    """What is kept: images to features."""
    memory: MemoryQueue | None
    """Its queue of keys, where it has one."""

    def __init__(self, config: PretrainConfig, materials: Materials) -> None:
        super().__init__()
        self.config, self.materials = config, materials
        self.memory = None
        self._shared: dict[str, nn.Module] = {}  # not registered: they are not saved twice

    def networks(self) -> dict[str, nn.Module]:
        """What has gradients, by name; over many processes the loop averages them."""
        raise NotImplementedError

    def loss(self, part: Batch, at: TrainingPosition) -> StepOutcome:
        """The loss of a part of the batch. Networks are called through `network(name)`."""
        raise NotImplementedError

    def network(self, name: str) -> nn.Module:
        """A network as a step calls it: its gradients are those of all processes."""
        return self._shared[name] if name in self._shared else self.networks()[name]

    def compile_parts(self, also_loss: bool) -> None:  # noqa: ARG002
        """train.compile: let torch.compile translate the networks, and the loss where it can be."""
        for network in self.networks().values():
            network.compile()

    def parameter_groups(self) -> list[dict[str, Any]]:
        """What the optimizer moves, as torch's optimizers take it; "lr_factor" scales the rate."""
        networks = self.networks().values()
        every = [each for net in networks for each in net.parameters()]
        factor = self.config.trunk_lr
        if factor == 1:
            return [{"params": every}]
        kept = set(self.trunk.parameters())
        rest = [each for each in every if each not in kept]
        trunk = [each for each in every if each in kept]
        return [{"params": rest}, {"params": trunk, "lr_factor": factor}]

    def example(self, name: str) -> Float[Tensor, "2 channels size size"]:  # noqa: ARG002
        """Two black images that the network of this name takes."""
        data = self.config.data
        images = torch.zeros(2, data.channels, data.image_size, data.image_size)
        images = images.to(self.materials.compute.device)
        return images.contiguous(memory_format=torch.channels_last)

    def distribute(self) -> None:
        """Begin on all processes: rank 0's state everywhere, gradients averaged from now on."""
        share_state(self)
        self._shared = {
            name: data_parallel(network, self.example(name))
            for name, network in self.networks().items()
        }

    def prepare(self, loader: Loader) -> None:
        """Before the first step of a new run: fill a queue or a bank."""

    def begin_epoch(self, epoch: int) -> None:
        """Before an epoch's first step: cluster, freeze or unfreeze."""

    def begin_step(self, at: TrainingPosition) -> None:
        """Before a step: move what follows by momentum."""

    def after_step(self, batch: Batch, outcomes: Sequence[StepOutcome]) -> None:
        """After the optimizer: write queue, bank or prototypes."""

    def replicated(self) -> dict[str, Tensor]:
        """State beside the networks that must be equal on every rank, by name."""
        return {}

    def adopt(self, parts: dict[str, Tensor]) -> None:
        """Begin with what an imported run keeps beside its trunk (`weights.foreign.IMPORTED`)."""

    def forget_images(self) -> None:
        """The data set has changed: numbers of images and classes mean nothing any more."""

    def describe(self, outcomes: Sequence[StepOutcome]) -> dict[str, float]:  # noqa: ARG002
        """Measures of a step for metrics.jsonl; the loop takes their means over ranks."""
        return {}

    def hardness(self, outcomes: Sequence[StepOutcome]) -> dict[str, list[Any]] | None:  # noqa: ARG002
        """Fig. 2a's numbers of a step; None where there are no negatives."""
        return None

    def contrast_images(
        self,
        images: Float[Tensor, "batch channels y x"],
        exclude: Bool[Tensor, "batch K"] | None,
        generator: torch.Generator,
    ) -> tuple[Contrast, MixPlan | None]:
        """What the loss sees of images at the end of training; of methods with a `memory`."""
        raise NotImplementedError


def check_embeddings(**embeddings: Float[Tensor, "batch dim"]) -> None:
    """Refuse embeddings that are no numbers, on whichever rank, before anything is made of them."""
    broken = [name for name, rows in embeddings.items() if not bool(rows.isfinite().all())]
    if agree_on_max(len(broken)):
        where = f"the {' and the '.join(broken)} embeddings" if broken else "another rank's output"
        raise NonFiniteError(f"{where} hold NaN or infinity")
