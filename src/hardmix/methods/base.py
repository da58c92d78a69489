"""The interface of the loop to methods: a method is one file here and one line in `METHOD_FACTS`.

The loop (training/) owns accumulation, autocast, averaging over processes, NaN, the optimizer and
its schedule. A method has networks and a loss, stores what the next step needs, and reports
measures. The order of a step:

    begin_step -> for every part of the batch: loss, and its gradient -> the optimizer -> after_step
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar, NamedTuple, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from hardmix.data.batches import Batch, Loader
from hardmix.data.image_set import ImageSet
from hardmix.data.views import ViewKind, usual_views
from hardmix.errors import InputError
from hardmix.mixing.family import Denominator, Formula, NegativeFilter, NegativeWeights
from hardmix.mixing.infonce import Contrast
from hardmix.mixing.plans import MixPlan
from hardmix.mixing.queue import MemoryQueue
from hardmix.mixing.strategies import Strategy
from hardmix.models.encoders import Encoder, build_encoder
from hardmix.runtime.device import Compute, read_together
from hardmix.runtime.distributed import agree_on_max, data_parallel, share_state
from hardmix.settings.config import PretrainConfig
from hardmix.settings.methods import METHOD_FACTS, MethodName
from hardmix.settings.named_choices import Compiled


class TrainingPosition(NamedTuple):
    """The position of a step in training."""

    step: int
    epoch: int
    part: int = 0
    """Index of the part of its batch (train.accumulate)."""
    described: bool = True
    """Whether `describe` will be called for this step; if not, its outcomes are dropped."""
    progress: float = 0.0
    """Fraction of the schedule that is done, for a method's own schedules."""


class OwnMixing(NamedTuple):
    """The user's own functions in place of names in the settings."""

    strategy: Strategy | None = None
    """mix.strategy."""
    weights: NegativeWeights | None = None
    """loss.weights."""
    denominator: Denominator | Formula | None = None
    """loss.denominator."""
    filter_negatives: NegativeFilter | None = None
    """loss.filter."""


class Materials(NamedTuple):
    """The objects that a method is built with, besides its config."""

    compute: Compute
    """Device and number format."""
    trunk: nn.Module | None = None
    """The user's own network."""
    mixing: "OwnMixing | None" = None
    """The user's own parts of the loss."""
    num_images: int | None = None
    """Number of images in the data set; None for a stream."""
    num_classes: int = 0
    """Number of classes."""
    images: ImageSet | None = None
    """The images themselves, for methods that look at all of them between epochs."""

    def count_images(self, reason: str) -> int:
        """Return the number of images; raise InputError if they are a stream, `reason` says why."""
        if self.num_images is None:
            raise InputError(
                f"{reason}, but these shards are a stream without numbers: use shards on a disk, a"
                " folder or a list of images."
            )
        return self.num_images


@dataclass
class StepOutcome:
    """The result of a part of a batch; methods may add what they describe later, detached."""

    loss: Float[Tensor, ""]
    """Differentiable loss; the loop computes its gradient."""
    measures: dict[str, Tensor] = field(default_factory=dict, kw_only=True)
    """Numbers for metrics.jsonl by name, detached, such as further terms of the loss."""

    def kept(self) -> Float[Tensor, "numbers batch"]:
        """Return what is kept of every step for the next line of metrics.jsonl, in few launches."""
        return self.loss.new_zeros(0, 0)

    @classmethod
    def summary(cls, kept: Float[Tensor, "numbers queries"]) -> dict[str, Tensor]:  # noqa: ARG003
        """Return measures of what was kept of all steps since the last line, by name."""
        return {}

    def ranks(self) -> Float[Tensor, " top"] | None:
        """Return Fig. 2a for this part of a batch; None if there are no negatives."""
        return None


class NonFiniteError(Exception):
    """A loss or gradient is NaN or infinite; raised by all ranks at the same step."""


class Method(nn.Module):
    """A training method. Subclasses must define `networks`, `trunk` and `loss`."""

    views: ClassVar[int] = 2
    """Number of views per image, all as data.* says; for others see `view_kinds`."""
    needs_labels: ClassVar[bool] = False
    """Whether it trains on labels."""
    trunk: nn.Module
    """The network that is kept: images to features. Of the calls in `loss` with images of their
    size, the first begins with the first views: train.probe reads their features."""
    memory: MemoryQueue | None
    """The queue of keys, if there is one."""
    options: Any
    """The method's own settings, `--NAME.*`; subclasses annotate the name with their class."""

    def __init__(self, config: PretrainConfig, materials: Materials) -> None:
        super().__init__()
        self.config, self.materials, self.options = config, materials, config.options
        self.memory = None
        self._shared: dict[str, nn.Module] = {}  # not registered, so that they are not saved twice

    @classmethod
    def view_kinds(cls, config: PretrainConfig) -> tuple[ViewKind, ...]:
        """Return the kinds of views that a batch has, in order: sizes, crops and colours."""
        data = config.data
        return usual_views(cls.views, data.augmentation if data.views is None else None)

    def new_encoder(self) -> Encoder:
        """Return trunk and head as the settings say, or with the user's own trunk."""
        model, data = self.config.model, self.config.data
        return build_encoder(model, data.channels, self.materials.trunk, image_size=data.image_size)

    def networks(self) -> dict[str, nn.Module]:
        """Return the networks to train, by name; the loop averages gradients over processes."""
        raise NotImplementedError

    def loss(self, part: Batch, at: TrainingPosition) -> StepOutcome:
        """Return the loss of a part of the batch. Call networks through `network(name)`."""
        raise NotImplementedError

    def network(self, name: str) -> nn.Module:
        """Return a network for use in a step, with gradients averaged over processes."""
        return self._shared[name] if name in self._shared else self.networks()[name]

    def compile_parts(self, what: Compiled) -> None:
        """Compile the networks by torch.compile; a subclass may compile its loss too."""
        for network in self.networks().values():
            network.compile(**compile_options(what))

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return parameter groups for torch's optimizers; "lr_factor" scales the learning rate."""
        networks = self.networks().values()
        parameters = [parameter for network in networks for parameter in network.parameters()]
        factor = self.config.trunk_lr
        if factor == 1:
            return [{"params": parameters}]
        of_trunk = set(self.trunk.parameters())
        rest = [parameter for parameter in parameters if parameter not in of_trunk]
        trunk = [parameter for parameter in parameters if parameter in of_trunk]
        return [{"params": rest}, {"params": trunk, "lr_factor": factor}]

    def example(self, name: str) -> tuple[Tensor, ...]:  # noqa: ARG002
        """Return an input for the network of this name: two black images."""
        data = self.config.data
        images = torch.zeros(2, data.channels, data.image_size, data.image_size)
        images = images.to(self.materials.compute.device)
        return (images.contiguous(memory_format=torch.channels_last),)

    def distribute(self) -> None:
        """Copy rank 0's state to all processes, and average gradients from now on."""
        share_state(self)
        self._shared = {
            name: data_parallel(network, *self.example(name))
            for name, network in self.networks().items()
        }

    def prepare(self, loader: Loader) -> None:
        """Called before the first step of a new run: fill a queue or a bank."""

    def begin_epoch(self, epoch: int) -> None:
        """Called before an epoch's first step: cluster, freeze or unfreeze."""

    def begin_step(self, at: TrainingPosition) -> None:
        """Called before a step: update momentum encoders."""

    def after_step(self, batch: Batch, outcomes: Sequence[StepOutcome]) -> None:
        """Called after the optimizer's step: write queue, bank or prototypes."""

    def replicated(self) -> dict[str, Tensor]:
        """Return state outside the networks that must be equal on every rank, by name."""
        return {}

    def adopt(self, parts: dict[str, Tensor]) -> None:
        """Start from what an imported run has besides its trunk (`weights.foreign.IMPORTED`)."""

    def forget_images(self) -> None:
        """Called if the data set has changed: image ids and labels are no longer valid."""

    def describe(self, outcomes: Sequence[StepOutcome]) -> dict[str, float]:
        """Return numbers of a step for metrics.jsonl; the loop averages them over ranks.

        These are the outcomes' measures, averaged over the parts of the batch.
        """
        names = outcomes[-1].measures
        means = {
            name: torch.stack([outcome.measures[name] for outcome in outcomes]).mean()
            for name in names
        }
        return read_together(means) if means else {}

    def hardness(self, outcomes: Sequence[StepOutcome]) -> dict[str, list[Any]] | None:  # noqa: ARG002
        """Return Fig. 2a's numbers of a step; None if there are no negatives."""
        return None

    def contrast_images(
        self,
        images: Float[Tensor, "batch channels y x"],
        exclude: Bool[Tensor, "batch K"] | None,
        generator: torch.Generator,
    ) -> tuple[Contrast, MixPlan | None]:
        """Contrast images with the `memory` at the end of training, for methods that have one."""
        raise NotImplementedError


def compile_options(what: Compiled) -> dict[str, str]:
    """Return torch.compile's options for an encoder: CUDA graphs, if train.compile=graphs."""
    return {"mode": "reduce-overhead"} if what == "graphs" else {}


def method_class(name: MethodName) -> type[Method]:
    """Return the class of a method, whose module is imported when it is first asked for."""
    module, kind = METHOD_FACTS[name].home.split(".")
    return cast("type[Method]", getattr(import_module(f"hardmix.methods.{module}"), kind))


def build_method(config: PretrainConfig, materials: Materials) -> Method:
    """Build the method of a run, with random weights."""
    return method_class(config.method)(config, materials)


def check_embeddings(**embeddings: Float[Tensor, "batch dim"]) -> None:
    """Raise NonFiniteError if embeddings are NaN or infinite on any rank.

    On a GPU they are not read, because that would wait for it: there, the gradients tell.
    """
    if any(rows.device.type != "cpu" for rows in embeddings.values()):
        return
    broken = [name for name, rows in embeddings.items() if not bool(rows.isfinite().all())]
    if agree_on_max(len(broken)):
        where = f"the {' and the '.join(broken)} embeddings" if broken else "another rank's output"
        raise NonFiniteError(f"{where} contain NaN or infinity")
