"""A row of a grid, the paper's numbers for it, and the run that it becomes. Imports no torch.

A row has the paper's scale or a small one, for a laptop's CPU. A small scale keeps the paper's
ratios: N/K, s/K, s'/K, epochs without mixing over epochs, and 100 : 200 : 400 : 800 epochs. All
other settings are the recipe's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Any, Literal

from hardmix.paper.numbers import DATA_SETS, METHODS, PaperRow, printed_rows
from hardmix.settings.config import PretrainConfig, TrainConfig
from hardmix.settings.methods import METHOD_FACTS, MethodName
from hardmix.settings.recipes import RECIPES
from hardmix.settings.saved import with_settings

Evaluation = Literal[
    "linear",
    "linear-cached",
    "knn",
    "transfer",
    "embedding",
    "queue",
    "proxy",
    "cost",
    "voc",
    "coco",
]
"""Evaluations of a row. transfer: the probe on the images of another data set; embedding: alignment
and uniformity of the features; queue: the same for the embedding that the loss uses; proxy: the
logged accuracy of the task of Sec. 3.2; cost: speed, memory and time of training."""

Mix = tuple[int, int, int]
"""(N, s, s')."""

RESTARTED = 800
"""Epochs of the runs that continue from the end of 200 epochs (App. C.1)."""
HALF_WAY = 100
"""Epochs of the results that are epoch 100 of a schedule of 200 (App. C.1)."""
SCHEDULE = 200
"""Epochs of the schedule that the paper uses most."""

LEFT_OUT = {
    ("DeeperCluster", "ImageNet-1k"): "numbers only: not implemented here",
    ("SeLa", "ImageNet-1k"): "numbers only: not implemented here",
    ("InterCLR", "ImageNet-1k"): "numbers only: not implemented here",
    ("MoCo", "ImageNet-100"): "copied; the rows measured by the authors are there",
    ("MoCo", "1B-image"): "numbers only: its images are not public",
    ("MoCo-v2", "ImageNet-1k"): "copied; the rows measured by the authors are there",
}
"""Copied numbers without a row, by method and data set, and why."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a grid, in the paper's units or as in the user's file."""

    label: str
    method: MethodName
    recipe: str
    queue_size: int
    mix: Mix | None = None
    epochs: int = SCHEDULE
    oracle: bool = False
    temperature: float | None = None
    """tau, if the table states it."""
    changes: tuple[tuple[str, Any], ...] = ()
    """Further settings by name: variants, and steps from MoCo to MoCo-v2."""
    evaluations: tuple[Evaluation, ...] = ("linear", "knn", "embedding")
    source: str = ""
    """Where the paper prints its numbers; empty if it does not."""
    printed: str = ""
    """The paper's name of a method whose numbers it copied; empty for those it measured."""
    note: str = ""
    """The paper's own words, or how they are interpreted here."""
    id: str = ""
    """Its id in the user's file."""
    baseline: str = ""
    """In the user's file, the id of its baseline; empty if it has none."""
    own: PretrainConfig | None = None
    """In the user's file, its complete config, which no scale changes."""
    read: str = ""
    """Suffix of the result files of other runs that it is read from, such as "supervised" for those
    of `detect --from supervised`; nothing is trained for it."""

    @property
    def all_queue(self) -> bool:
        """Whether it is the row that the paper calls "(all queue)"."""
        return ("mix.real_negatives", "drop_all") in self.changes

    @property
    def start(self) -> "Row | None":
        """The row whose finished run this one continues."""
        restarted = self.epochs == RESTARTED and not self.printed
        return replace(self, epochs=SCHEDULE) if restarted else None


@dataclass(frozen=True)
class Trend:
    """Whether gains increase with another measure: one slope per seed, over these rows."""

    over: str
    """Id of a measure, taken from the baseline, or from the row if the baseline lacks it."""
    rows: tuple[str, ...]
    """Ids of the rows."""


@dataclass(frozen=True)
class Grid:
    """Rows to compare with each other."""

    place: str
    """Its place in the paper, or the title of the user's file."""
    rows: tuple[Row, ...]
    own: bool = False
    """Whether it is the user's own grid, for which the paper has no numbers."""
    images: str = ""
    """Name of the images, the first word of the runs' names; empty means the recipe."""
    seeds: int = 3
    """Default number of seeds per row."""
    first_seed: int = 0
    labelled_images: int | None = None
    """Number of training and of test images for evaluations; None means the run's own."""
    probe_images: int | None = None
    """The same for the linear probe and transfer; None means `labelled_images`."""
    probe_penalty: float | None = None
    """Penalty of the linear probe and of transfer; None cross-validates it for every run."""
    trends: tuple[Trend, ...] = ()


def paper_numbers(row: Row) -> dict[tuple[str, str], PaperRow]:
    """Return what the paper prints for a row, by (task, metric)."""
    if row.printed:
        return {
            (each.task, each.metric): each
            for each in printed_rows()
            if (each.source, each.reproduced, each.method) == (row.source, False, row.printed)
            and each.dataset == DATA_SETS[row.recipe]
            and each.epochs in (None, row.epochs)
        }
    if row.method not in METHODS:
        return {}
    wanted = (row.source, True, METHODS[row.method], row.oracle, row.mix, row.temperature)
    return {
        (each.task, each.metric): each
        for each in printed_rows()
        if (each.source, each.reproduced, each.method, each.oracle, each.mix, each.temperature)
        == wanted
        and each.queue_size in (None, row.queue_size)
        and each.epochs in (None, row.epochs)
        and each.all_queue == row.all_queue
    }


PAPER_COLUMNS: dict[tuple[str, str], str] = {
    ("linear", "top1"): "top-1",
    ("linear", "top1_gain"): "gain in top-1",
    **{("voc_detection", f"AP{end}"): f"VOC AP{end}" for end in ("50", "", "75")},
    **{("coco_detection", f"APbb{end}"): f"COCO APbb{end}" for end in ("", "50", "75")},
    **{("coco_segmentation", f"APmk{end}"): f"COCO APmk{end}" for end in ("", "50", "75")},
}
"""The columns of the paper's tables in its order, by (task, metric), and their names."""


def paper_columns(rows: Sequence[Row]) -> list[str]:
    """Return the names of the columns that the paper prints for these rows, in its order."""
    printed = {key for row in rows for key in paper_numbers(row)}
    return [name for key, name in PAPER_COLUMNS.items() if key in printed]


def paper_text(row: Row) -> str:
    """Return what the paper prints for a row, column by column; empty if it prints nothing."""
    numbers = paper_numbers(row)
    texts = []
    for key in PAPER_COLUMNS:
        if key in numbers:
            number, sign = numbers[key], "+" if key[1].endswith("_gain") else ""
            spread = "" if number.std is None else f"±{number.std:.1f}"
            texts.append(f"{number.value:{sign}.1f}{spread}")
    return " / ".join(texts)


def baseline_of(row: Row, rows: Sequence[Row]) -> Row | None:
    """Return the MoCo-v2 row that is the baseline: same K, epochs and, if there is one, tau.

    For MoCHi with the oracle, the baseline has the oracle too; otherwise not. A row of a file names
    its own baseline.
    """
    if row.own is not None:
        named = row.baseline or next((row.id for each in rows if each.baseline == row.id), "")
        return next((each for each in rows if named and each.id == named), None)
    oracle = row.oracle and row.method == "mochi"
    wanted = ("moco-v2", oracle, row.recipe, row.epochs, "")
    fitting = [
        each
        for each in rows
        if (each.method, each.oracle, each.recipe, each.epochs, each.printed) == wanted
        and (each.queue_size == row.queue_size or row.printed)
    ]
    same = [each for each in fitting if each.temperature == row.temperature]
    return next(iter(same or fitting), None)


def make_row(method: MethodName, mix: Mix | None = None, **fields: Any) -> Row:
    """Return a row with a label that is unique in its grid."""
    recipe = fields.setdefault("recipe", "imagenet100")
    usual = RECIPES[recipe].build(method, False).train.queue_size
    queue = fields.setdefault("queue_size", usual)
    title = METHODS.get(method) or METHOD_FACTS[method].title
    label = title + (f" {mix}" if mix else "")
    if "temperature" in fields:
        label += f" (t = {fields['temperature']})"
    if fields.get("oracle"):
        label += ", oracle"
    if queue != usual:
        label += f", K = {queue}"
    if fields.get("epochs", SCHEDULE) != SCHEDULE:
        label += f", {fields['epochs']} epochs"
    fields.setdefault("label", label)
    return Row(method=method, mix=mix, **fields)


# -- scales

ScaleName = Literal["paper", "cifar10", "cifar100", "shapes"]

SMALL_RECIPES = {"cifar10": "cifar10", "cifar100": "cifar10", "shapes": "demo"}
"""The recipe of each small scale; CIFAR-100 has CIFAR-10's, and is recognised from its folder."""

IMAGES = {"imagenet100": 126_689, "imagenet1k": 1_281_167, "cifar10": 50_000, "demo": 10_000}
"""Training images of a recipe, for estimates of time."""

IMAGES_PER_SECOND = {"imagenet100": 490.0, "imagenet1k": 490.0, "cifar10": 1430.0, "demo": 1330.0}
"""Guesses for MoCo from the cost stated by recipes and paper: 24 GPU days for 200 epochs of
ImageNet-1k (Broader Impact) on 4 GPUs, 35 and 2 minutes on 2 cores."""

PAPER_GPUS = {"imagenet100": 4, "imagenet1k": 4}
"""GPUs of the recipes whose speed is stated for GPUs."""


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
    """Return sentences on how the paper's settings were changed; `row` names the data set."""
    if scale == "paper":
        return ["Settings are the paper's, as far as it states them."]
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
