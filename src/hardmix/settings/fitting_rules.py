"""The recipe `photos`: settings that fit a folder of images, a machine and a time budget.

They are a pure function of the config, of facts about the folder and of measurements, which
training/fitting.py makes. The rules were tried on the images of docs/own-images.md. Imports no
torch.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

from hardmix.errors import InputError
from hardmix.settings.config import PretrainConfig
from hardmix.settings.saved import settings, with_settings

FEWEST = 20
"""Fewest images: with fewer there is nothing to contrast."""
QUEUE_SHARE = 5
"""Images per slot of the queue, at least: older keys of an image are then rare."""
LARGEST_QUEUE = 4096
N_SHARE, QUERY_SHARE = 16, 8
"""K / N and s / s' of the paper's ImageNet-100 runs; s is N."""
LARGEST_BATCH = 64
"""On a CPU small batches learn more in the same time; on a GPU it is four times this."""
FINE = 0.25
"""Factor on the learning rate from pre-trained weights; the trunk has optimizer.trunk_lr too."""
MOST_EPOCHS, FEWEST_EPOCHS = 400, 10
"""More epochs are not worth their time. Rather than train fewer, fewer images are used; but from
pre-trained weights, which need few epochs, all images are used if one epoch fits."""
KNN_TIMES, SAVE_TIMES = 3, 20
"""How often k-NN accuracy is measured, and checkpoints are saved, in a run."""
FORWARD = 0.35
"""Time that it takes to evaluate the images of a training step, as a share of the step."""
JUDGED = 5000
"""Most images that the verdict looks at."""
MARGIN = 0.9
"""Share of the remaining time that is used."""
SMALL = 32
"""Pixels of a view on a CPU."""


class FolderFacts(NamedTuple):
    """Facts about the images, from a look at the folder."""

    images: int
    """Number of images."""
    short_side: int
    """Median of the shorter sides, in pixels."""
    colour: float
    """How much colour tells the images apart, 0 to 1: how often the colours of an image's right
    half are among the twentieth that is nearest to those of its left half, in up to 200 images."""
    labelled: bool = False
    """Whether k-NN accuracy can be measured."""
    tests: int = 0
    """Number of test images for it."""


class Machine(NamedTuple):
    """The device that computes the run."""

    gpu: bool = False
    processes: int = 1


class Pace(NamedTuple):
    """Times that were measured in a few steps."""

    step: float
    """Seconds of a training step."""
    decode: float
    """Seconds until an image is decoded, before the first epoch."""
    spent: float = 0.0
    """Seconds already spent on looking and measuring."""
    threads: int = 1
    """Threads of the process with which a step was fastest."""


class Choice(NamedTuple):
    """One line of the table."""

    name: str
    value: Any
    why: str


class Fitted(NamedTuple):
    """A config without open choices, and the reasons."""

    config: PretrainConfig
    choices: list[Choice]
    after: float = 0.0
    """Seconds that the measurements after training will take."""


CHOSEN = (
    "data.image_size",
    "data.reduce",
    "data.colour_strength",
    "data.num_images",
    "model.backbone",
    "train.batch_size",
    "optimizer.lr",
    "train.queue_size",
    "mix.num_hardest",
    "mix.num_pairs",
    "mix.num_with_query",
    "train.epochs",
    "mix.warm_up_epochs",
    "train.knn_every",
    "train.save_every",
    "optimizer.milestones",
)
"""Settings that the recipe `photos` chooses, in this order: later ones depend on earlier ones."""

SHOWN = CHOSEN[: CHOSEN.index("train.knn_every")]
"""Settings that the table shows."""


def fit(
    config: PretrainConfig, facts: FolderFacts, machine: Machine, pace: Pace | None = None
) -> Fitted:
    """Choose every setting in `config.choose`; without a pace, all but the length of the run."""
    if facts.images < FEWEST:
        raise InputError(
            f"data: there are {facts.images} images, but the recipe photos needs {FEWEST} or more:"
            " add images, or compare them with an encoder trained elsewhere (hardmix import)."
        )
    rules = _Rules(config, facts, machine, pace)
    choices = []
    for name in CHOSEN:
        if config.uses(name):
            choices.append(rules.choose(name))
    chosen = {each.name: each.value for each in choices if each.name in config.choose}
    fitted = with_settings(config, chosen)
    return Fitted(replace(fitted, choose=()), choices, sum(rules.measurements(rules.images)))


class _Rules:
    """One method per setting; each can read the values chosen before it."""

    def __init__(
        self, config: PretrainConfig, facts: FolderFacts, machine: Machine, pace: Pace | None
    ) -> None:
        self.config, self.facts, self.machine, self.pace = config, facts, machine, pace
        self.values = settings(config)

    def choose(self, name: str) -> Choice:
        """Return the user's value, or a value of ours with the reason."""
        if name not in self.config.choose:
            return Choice(name, self.values[name], "yours")
        value, why = getattr(self, name.replace(".", "_"))()
        self.values[name] = value
        return Choice(name, value, why)

    @property
    def images(self) -> int:
        """Number of images that are used."""
        limit = self.values["data.num_images"]
        return self.facts.images if limit is None else min(limit, self.facts.images)

    @property
    def batch(self) -> int:
        batch: int = self.values["train.batch_size"]
        return batch

    def data_image_size(self) -> tuple[int, str]:
        side = self.facts.short_side
        if self.config.model.init is not None:
            size, why = (224, "what") if self.machine.gpu else (128, "half of what")
            return size, f"{why} pre-trained networks are used to"
        if self.machine.gpu:
            size = max(32, min(224, side // 32 * 32))
            return size, f"the shorter sides have {side} px"
        if side < 2 * SMALL:
            return SMALL, f"the shorter sides have {side} px"
        return SMALL, "a CPU learns most per minute from small images"

    def data_reduce(self) -> tuple[bool, str]:
        small = self.facts.short_side <= 2 * self.values["data.image_size"]
        return not small, "already small" if small else "decoded faster, at most twice that size"

    def data_colour_strength(self) -> tuple[float, str]:
        strength = round(1 - self.facts.colour, 2)
        return strength, f"{self.facts.colour:.0%} of images are recognised by their colours"

    def data_num_images(self) -> tuple[int | None, str]:
        number = self.facts.images
        if self.pace is None:
            return None, ""
        fewest = FEWEST_EPOCHS + 1 if self.config.model.init is None else 1
        seconds = self.pace.decode + fewest * self.pace.step / self._measured_batch()
        affordable = int(self._seconds(number) / seconds)
        chosen = max(8 * FEWEST, 4 * self._measured_batch(), affordable)
        if chosen >= number:
            return None, f"all {number:,}"
        epochs = "an epoch" if fewest == 1 else f"{FEWEST_EPOCHS} epochs"
        return chosen, f"of {number:,}; {epochs} of more would take too long"

    def model_backbone(self) -> tuple[str, str]:
        if self.config.model.init is not None:
            return self.config.model.backbone, "that of the weights"
        if not self.machine.gpu:
            return "small", "a ResNet made for CPUs"
        if self.facts.images >= 50_000:
            return "resnet50", "many images, and a GPU"
        return "resnet18", "a GPU"

    def train_batch_size(self) -> tuple[int, str]:
        largest = LARGEST_BATCH * (4 if self.machine.gpu else 1)
        batch = max(8, min(largest, _power_of_two(self.images // 4)))
        unit = math.lcm(self.machine.processes, self.config.model.key_bn_splits)
        unit *= self.config.train.accumulate
        batch = max(unit, batch // unit * unit)
        return batch, "several batches in an epoch"

    def optimizer_lr(self) -> tuple[float, str]:
        lr = self.config.optimizer.lr * self.batch / LARGEST_BATCH
        if self.config.model.init is not None:
            return lr * FINE, "less than from random weights"
        return lr, "in proportion to the batch"

    def train_queue_size(self) -> tuple[int, str]:
        fifth = self.images // QUEUE_SHARE
        size = min(LARGEST_QUEUE, _power_of_two(fifth))
        return size, f"at most a fifth of {self.images:,} images"

    def mix_num_hardest(self) -> tuple[int, str]:
        size = self.values["train.queue_size"]
        return max(min(2, size), size // N_SHARE), "N: a sixteenth of the queue, as in the paper"

    def mix_num_pairs(self) -> tuple[int, str]:
        hardest = self.values["mix.num_hardest"]
        return (hardest if hardest > 1 else 0), "s: as many as N, as in the paper"

    def mix_num_with_query(self) -> tuple[int, str]:
        hardest = self.values["mix.num_hardest"]
        return max(1, hardest // QUERY_SHARE), "s': an eighth of N, as in the paper"

    def train_epochs(self) -> tuple[int, str]:
        if self.pace is None:
            return 1, ""
        steps = max(1, self.images // self.batch)
        epoch = steps * self.pace.step
        seconds = self._seconds(self.images) - self.images * self.pace.decode
        epochs = max(1, min(MOST_EPOCHS, int(seconds / epoch)))
        why = f"{epoch:.3g} s each; {self.config.minutes:g} minutes in all"
        return epochs, f"{MOST_EPOCHS} are enough" if epochs == MOST_EPOCHS else why

    def mix_warm_up_epochs(self) -> tuple[float, str]:
        epochs = self.values["train.epochs"]
        warm_up = max(1, round(epochs / 8)) if epochs >= 4 else epochs / 4
        return warm_up, "an eighth of the epochs, without mixing"

    def train_knn_every(self) -> tuple[int, str]:
        return max(1, math.ceil(self.values["train.epochs"] / KNN_TIMES)), ""

    def train_save_every(self) -> tuple[int, str]:
        return max(1, self.values["train.epochs"] // SAVE_TIMES), ""

    def optimizer_milestones(self) -> tuple[tuple[int, ...], str]:
        """Scale the recipe's milestones to the number of epochs."""
        before, after = self.config.train.epochs, self.values["train.epochs"]
        return tuple(at * after // before for at in self.config.optimizer.milestones), ""

    def _measured_batch(self) -> int:
        """Return the batch size of the measured steps, chosen before the number of images."""
        if "train.batch_size" in self.config.choose:
            return self.train_batch_size()[0]
        return self.batch

    def measurements(self, images: int) -> tuple[float, float]:
        """Return the time of the verdict, and of one measurement of k-NN accuracy."""
        if self.pace is None:
            return 0.0, 0.0
        forward = FORWARD * self.pace.step / self._measured_batch()
        judged = 3 * min(JUDGED, images + self.facts.tests)
        asked = min(10_000, images) + min(10_000, self.facts.tests)
        return judged * forward, asked * forward if self.facts.labelled else 0.0

    def _seconds(self, images: int) -> float:
        """Return the time that is left for decoding and training."""
        assert self.pace is not None
        verdict, knn = self.measurements(images)
        left = 60 * self.config.minutes - self.pace.spent - verdict - KNN_TIMES * knn
        return max(0.0, MARGIN * left)


def _power_of_two(number: int) -> int:
    """Return the largest power of two up to a number, at least 1."""
    return 1 << max(0, number.bit_length() - 1)
