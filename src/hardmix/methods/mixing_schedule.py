"""When and how a run mixes, for every method that has negatives.

The loss of the run, its warm-up, and the random numbers of a step, which do not depend on how many
processes share a batch.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from hardmix.errors import InputError
from hardmix.methods.base import OwnMixing, TrainingPosition
from hardmix.mixing.family import DENOMINATORS, FILTERS, WEIGHTS
from hardmix.mixing.loss import MochiLoss
from hardmix.mixing.random_draws import uniform_rows
from hardmix.mixing.strategies import STRATEGIES, MixingChoice
from hardmix.runtime.distributed import rank
from hardmix.runtime.own_code import load_own
from hardmix.runtime.random_numbers import seed_of
from hardmix.settings.config import LossConfig, MixConfig, PretrainConfig
from hardmix.settings.schedules import mixing_started


class RowsGenerator(torch.Generator):
    """Random numbers that depend on the seed, the call, and a row's place in the global batch.

    Nothing is drawn for other processes, and a row's numbers do not depend on how many there are.
    Code that uses it as an ordinary generator gets the same numbers on every process.
    """

    part: int = 0
    """Index of the rows' part of the global batch: the rank."""
    calls: int = 0
    """Number of calls so far: every call is a purpose of its own."""

    def uniform_rows(
        self, rows: int, columns: int, dtype: torch.dtype, device: torch.device | str
    ) -> Float[Tensor, "rows columns"]:
        """Return uniform numbers in [0, 1), made on the device."""
        seed = seed_of("rows", self.initial_seed(), self.calls)
        self.calls += 1
        return uniform_rows(seed, self.part * rows, rows, columns, dtype, device)


class RowDraws:
    """The numbers of a `RowsGenerator`, from an object that `torch.compile` takes into its graph.

    The seeds are an input of that graph, so that it serves every step.
    """

    MOST_CALLS = 8

    def __init__(self, seed: int, part: int = 0) -> None:
        self.part, self.calls = part, 0
        self.seeds = torch.tensor([seed_of("rows", seed, call) for call in range(self.MOST_CALLS)])

    def uniform_rows(
        self, rows: int, columns: int, dtype: torch.dtype, device: torch.device | str
    ) -> Float[Tensor, "rows columns"]:
        """Return uniform numbers in [0, 1), made on the device."""
        seed = self.seeds[self.calls]
        self.calls += 1
        plain = seed if torch.compiler.is_compiling() else int(seed)
        return uniform_rows(plain, self.part * rows, rows, columns, dtype, device)


class MixingSchedule:
    """MoCHi's part of a run: the loss, the warm-up, the random numbers."""

    def __init__(self, config: PretrainConfig, own: OwnMixing | None = None) -> None:
        self.config, own = config, own or OwnMixing()
        self.wanted = config.uses("mix.num_pairs")
        """Whether the method mixes at all."""
        mix, family = config.mix, choose_family(config.loss, own)
        self._choice = choose_strategy(mix, own)
        self.loss = MochiLoss(
            mix.num_hardest,
            mix.num_pairs,
            mix.num_with_query,
            config.train.temperature,
            strategy=self._choice,
            real_negatives=mix.real_negatives,
            through_query=mix.through_query,
            weights=family.weights,
            denominator=family.denominator,
            filter_negatives=family.filter_negatives,
        )
        """The run's loss."""

    def started(self, at: TrainingPosition) -> bool:
        """Return whether mixing has started: not during the warm-up (Sec. 5)."""
        mix = self.config.mix
        if mix.warm_up_steps is not None:
            return self.wanted and mixing_started(at.step, mix.warm_up_steps)
        return self.wanted and mixing_started(at.epoch, mix.warm_up_epochs)

    def progress(self, epoch: float) -> Tensor:
        """Return how much of the training is done, for strategies that change with it.

        It is a tensor on the host, so that a compiled loss serves every epoch. It has an axis
        because torch.compile traces a loss twice if it is passed a float64 scalar.
        """
        return torch.tensor([min(epoch / self.config.train.epochs, 1.0)], dtype=torch.float64)

    def generator(self, at: TrainingPosition, purpose: int = 0) -> RowsGenerator | RowDraws:
        """Return the source of a step's random numbers.

        It is a generator for the user's own strategy, which may ask PyTorch for numbers with it,
        and for one that draws for the whole batch. `purpose` distinguishes the draws of several
        losses of one step.
        """
        seed = seed_of("mixing", self.config.train.seed, at.step, at.part, purpose)
        if not self._choice.checked and self._choice.transformation is None:
            return RowDraws(seed, rank())
        generator = RowsGenerator()
        generator.manual_seed(seed)
        generator.part = rank()
        return generator


class Family(NamedTuple):
    """The parts of the loss around MoCHi's points."""

    weights: Any
    denominator: Any
    filter_negatives: Any


RENAMED = {"low": "ring_low", "high": "ring_high"}
"""Arguments of the family's factories whose settings have another name."""


def choose_family(loss: LossConfig, own: OwnMixing | None = None) -> Family:
    """Return weights, denominator and filter by name, with their settings."""
    own = own or OwnMixing()
    # The method makes the mask of loss.filter=same-cluster: the loss does not see the images.
    chosen = "none" if loss.filter == "same-cluster" else loss.filter
    return Family(
        _member("weights", loss.weights, WEIGHTS, own.weights, loss),
        _member("denominator", loss.denominator, DENOMINATORS, own.denominator, loss),
        _member("filter", chosen, FILTERS, own.filter_negatives, loss),
    )


def _member(
    setting: str, name: str, table: dict[str, Callable[..., Any]], own: Any, loss: LossConfig
) -> Any:
    if name == "own":
        argument = "filter_negatives" if setting == "filter" else setting
        return _needed(own, f"loss.{setting}", argument)
    if name == "none":
        return name
    if name not in table:
        return load_own(name, f"loss.{setting}")
    arguments = inspect.signature(table[name]).parameters
    settings = {argument: RENAMED.get(argument, argument) for argument in arguments}
    return table[name](
        **{arg: getattr(loss, field) for arg, field in settings.items() if hasattr(loss, field)}
    )


def choose_strategy(mix: MixConfig, own: OwnMixing | None = None) -> MixingChoice:
    """Return the strategy by name, with its options."""
    if mix.strategy == "own":
        strategy = own.strategy if own is not None else None
        return MixingChoice(_needed(strategy, "mix.strategy", "strategy"), checked=True)
    if mix.strategy not in STRATEGIES:
        return MixingChoice(load_own(mix.strategy, "mix.strategy"), checked=True)
    choice = STRATEGIES[mix.strategy]
    function = choice.strategy
    options = {
        name: getattr(mix, name)
        for name in inspect.signature(function).parameters
        if hasattr(mix, name) and not (isinstance(function, partial) and name in function.keywords)
    }
    return choice._replace(strategy=partial(function, **options)) if options else choice


def _needed(own: Any, setting: str, argument: str) -> Any:
    if own is None:
        raise InputError(
            f"{setting}=own is a function that is not saved with the run: pass it again, as"
            f" pretrain(..., {argument}=...), or choose one by name; 'mypackage:function' is saved."
        )
    return own
