"""How a row of the paper becomes a run: at the paper's own scale, or on a laptop's CPU.

A small scale keeps the paper's ratios: N/K, s/K, s'/K, epochs without mixing over epochs, and 100 :
200 : 400 : 800 epochs. Everything else is the recipe's. Imports no torch.
"""

from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Literal

from hardmix.settings.config import PretrainConfig, TrainConfig
from hardmix.settings.recipes import RECIPES
from hardmix.settings.saved import with_settings
from hardmix.sweep.grid_rows import HALF_WAY, SCHEDULE, Row

ScaleName = Literal["paper", "cifar10", "cifar100", "shapes"]

SMALL_RECIPES = {"cifar10": "cifar10", "cifar100": "cifar10", "shapes": "demo"}
"""The recipe of each small scale; CIFAR-100 has CIFAR-10's, and is recognised from its folder."""

IMAGES = {"imagenet100": 126_689, "imagenet1k": 1_281_167, "cifar10": 50_000, "demo": 10_000}
"""Training images of a recipe, for estimates of time."""

IMAGES_PER_SECOND = {"imagenet100": 490.0, "imagenet1k": 490.0, "cifar10": 1430.0, "demo": 1330.0}
"""Guesses from the cost stated by recipes and paper: 24 GPU days for 200 epochs of ImageNet-1k
(Broader Impact) on 4 GPUs, 35 and 2 minutes on 2 cores."""


@cache  # a claim's table asks for each of its rows again
def config_at(
    row: Row, scale: ScaleName, epochs: int | None = None, temperature: float | None = None
) -> PretrainConfig:
    """Return a row's config; `epochs` replace the paper's 200, `temperature` MoCo-v2's 0.2.

    Unset, both are the recipe's own.
    """
    paper = RECIPES[row.recipe].build(row.method, row.oracle)
    base = RECIPES[recipe_at(row, scale)].build(row.method, row.oracle)
    width = Fraction(base.train.queue_size, paper.train.queue_size)
    length = Fraction(epochs or base.train.epochs, paper.train.epochs)
    total, stop = _epochs_at(row, length)
    train = replace(
        base.train,
        epochs=total,
        stop_epoch=stop,
        queue_size=_nearest_power(row.queue_size * width),
        temperature=_temperature_at(row, base, temperature),
    )
    mix = base.mix
    if row.mix is not None:
        hardest, pairs, with_query = (_nearest_power(count * width) for count in row.mix)
        mix = replace(
            mix,
            num_hardest=max(2, hardest),
            num_pairs=pairs,
            num_with_query=with_query,
            warm_up_epochs=_whole(Fraction(paper.mix.warm_up_epochs) * length),
        )
    if scale == "cifar100":
        base = replace(base, data=replace(base.data, name=None))
    factor = Fraction(train.epochs, base.train.epochs)
    milestones = tuple(max(1, _whole(each * factor)) for each in base.optimizer.milestones)
    if base.optimizer.schedule != "step":
        milestones = base.optimizer.milestones
    optimizer = replace(base.optimizer, milestones=milestones)
    config = replace(base, mix=mix, optimizer=optimizer, train=train)
    return _with_milestones(with_settings(config, dict(row.changes)), base)


def _with_milestones(config: PretrainConfig, base: PretrainConfig) -> PretrainConfig:
    """Return the config with milestones in proportion, if the row has chosen a step schedule."""
    optimizer, epochs = config.optimizer, config.train.epochs
    if optimizer.schedule == base.optimizer.schedule or optimizer.schedule != "step":
        return config
    milestones = (max(1, epochs * 3 // 5), max(1, epochs * 4 // 5))
    return replace(config, optimizer=replace(optimizer, milestones=milestones))


def recipe_at(row: Row, scale: ScaleName) -> str:
    """Return the paper's recipe for the row, or that of the small scale."""
    return SMALL_RECIPES.get(scale, row.recipe)


def describe_scale(
    row: Row, scale: ScaleName, epochs: int | None = None, temperature: float | None = None
) -> list[str]:
    """Return sentences on how the paper's settings were changed; `row` tells the data set."""
    if scale == "paper":
        return [
            "Settings are the paper's, as far as it states them; docs/recipes.md lists what it"
            " leaves open."
        ]
    paper, base = (
        RECIPES[name].build("mochi", False) for name in (row.recipe, SMALL_RECIPES[scale])
    )
    v2, length = temperature or base.train.temperature, epochs or base.train.epochs
    warm_up = _whole(Fraction(paper.mix.warm_up_epochs) * Fraction(length, SCHEDULE))
    share = paper.train.queue_size // base.train.queue_size
    return [
        f"K, N, s and s' are the paper's divided by {share} (K = {paper.train.queue_size} becomes"
        f" {base.train.queue_size}), so that N/K, s/K and s'/K are the paper's.",
        f"{SCHEDULE} epochs become {length}, and other lengths in proportion; the first"
        f" {paper.mix.warm_up_epochs:g} without mixing become {warm_up}.",
        f"The temperature of MoCo-v2, 0.2 in the paper, is {v2:g} here.",
        f"All other settings are those of the recipe {base.recipe}: {base.model.backbone} backbone,"
        f" {base.data.image_size} pixels, batches of {base.train.batch_size}.",
    ]


def comparable(scale: ScaleName) -> tuple[bool, str]:
    """Return whether numbers are comparable with the paper's, and a sentence on it."""
    if scale == "paper":
        return True, (
            "Comparable with the paper's numbers as far as it states its settings; the report lists"
            " for each row what it leaves open."
        )
    names = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "shapes": "drawn shapes"}
    images = names[scale]
    return False, (
        f"Not comparable: {images}, a small backbone and short training instead of ImageNet and"
        " ResNet-50. The paper's numbers are shown only for their signs and order."
    )


def _epochs_at(row: Row, length: Fraction) -> tuple[int, int | None]:
    """Return length and stop: epoch 100 of 200 stays half-way; None for a stop at the end."""
    if row.epochs != HALF_WAY:
        return max(1, _whole(row.epochs * length)), None
    epochs = max(1, _whole(SCHEDULE * length))
    stop = max(1, _whole(HALF_WAY * length))
    return epochs, stop if stop < epochs else None


def _temperature_at(row: Row, base: PretrainConfig, chosen: float | None) -> float:
    """Return tau: the paper's for MoCo-v2 becomes the chosen one or the recipe's."""
    if not base.uses("train.temperature"):
        return base.train.temperature
    usual = TrainConfig().temperature
    own = base.train.temperature if row.temperature is None else row.temperature
    theirs = RECIPES[base.recipe].build("moco-v2", False).train.temperature
    return (chosen or theirs) if own in (usual, theirs) else own


def _nearest_power(count: Fraction | int) -> int:
    """Return integers unchanged; other counts become the nearest power of two."""
    if Fraction(count).denominator == 1:
        return int(count)
    powers = [1 << exponent for exponent in range(20)]
    return min(powers, key=lambda power: abs(power - float(count)))


def _whole(number: Fraction) -> int:
    """Return a number rounded, halves up."""
    return int(number + Fraction(1, 2))
