"""The paper's printed numbers, and whether a run of ours may stand beside one of them.

results.csv has one line per number of the paper's tables and of Fig. 3: facts only.
A run is called comparable where its settings are those of the recipe, which are the paper's as far
as it states them, and where it was evaluated by the paper's protocol. What the paper leaves open is
said each time. Configs come as plain values: they may be of older versions.
"""

import csv
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from hardmix.settings.recipes import RECIPES

DATA_SETS = {"imagenet100": "ImageNet-100", "imagenet1k": "ImageNet-1k"}
"""Recipes that repeat runs of the paper, and the paper's name of their images."""

OUR_DATA_NAMES = {"imagenet100": "imagenet100", "imagenet1k": "imagenet"}
"""The same images as `data.name` and the result files call them."""

METHODS = {"moco-v1": "MoCo", "moco-v2": "MoCo-v2", "mochi": "MoCHi", "supervised": "supervised"}

DETECTORS = {
    "voc": {"start": "run", "iterations": 24_000, "batch_size": 16, "test images": 4952},
    "coco": {"start": "run", "iterations": 90_000, "batch_size": 16, "test images": 5000},
}
"""What the paper's detectors have in common, by `task` (MoCo's configs of detectron2)."""

SCHEDULES = {100: 200, 200: 200}
"""Epochs in the tables, and of the schedule they belong to. The paper restarted its runs of 800
epochs from epoch 200 (App. C.1) and does not say how those of 400 and 1000 were scheduled."""

PLACES = {
    "table1": "Table 1",
    "table2": "Table 2",
    "table3_coco": "Table 3",
    "table1_supp": "Table 1 of the appendix",
    "table2_supp": "Table 2 of the appendix",
    "fig3a": "Fig. 3a",
    "fig3b": "Fig. 3b",
}
"""Where a number is printed, the first to be cited first."""

SETTING_NAMES = {
    "data.num_images": "number of images",
    "data.image_size": "image size",
    "data.channels": "channels",
    "data.augmentation": "augmentation",
    "data.blur": "blur",
    "data.min_scale": "smallest crop",
    "model.backbone": "backbone",
    "model.head": "head",
    "model.dim": "embedding dimensions",
    "model.key_momentum": "key momentum",
    "model.key_bn_splits": "groups of the key batch norm",
    "mix.warm_up_epochs": "epochs without mixing",
    "mix.warm_up_steps": "steps without mixing",
    "mix.strategy": "mixing strategy",
    "mix.real_negatives": "real negatives",
    "mix.through_query": "gradient through the query",
    "optimizer.lr": "learning rate",
    "optimizer.momentum": "SGD momentum",
    "optimizer.weight_decay": "weight decay",
    "optimizer.schedule": "schedule",
    "optimizer.milestones": "epochs of the step schedule",
    "train.batch_size": "batch size",
    "train.accumulate": "parts of a batch",
    "train.temperature": "temperature",
    "train.queue_start": "start of the queue",
    "train.exclude_same_image": "keys of the same image",
}
"""Settings that make a result another one; epochs, queue, N, s and s' are compared with the row."""


@dataclass(frozen=True)
class PaperRow:
    """One printed number and the settings the paper gives with it; None: it gives none."""

    source: str
    dataset: str
    task: str
    method: str
    oracle: bool
    mix: tuple[int, int, int] | None
    queue_size: int | None
    epochs: int | None
    temperature: float | None
    metric: str
    value: float
    std: float | None
    gain: float | None
    """Over MoCo-v2, where it is printed beside the value."""
    reproduced: bool
    """Measured by the paper's authors; otherwise copied from others."""
    all_queue: bool
    """The row "(all queue)", which the paper does not define."""

    @property
    def place(self) -> str:
        """Table or figure."""
        return PLACES.get(self.source, self.source)


@dataclass(frozen=True)
class Beside:
    """What the paper prints for a run, if anything, and a sentence on whether it compares."""

    row: PaperRow | None
    comparable: bool
    sentence: str


@cache
def printed_rows() -> tuple[PaperRow, ...]:
    """Every number in the paper's tables and Fig. 3, also those its authors copied."""
    text = files("hardmix.paper").joinpath("results.csv").read_text(encoding="utf-8")
    return tuple(_row(line) for line in csv.DictReader(text.splitlines()))


@cache
def paper_rows() -> tuple[PaperRow, ...]:
    """Every number that the paper's authors measured; those they copied are left out.

    So is the row "(all queue)", which the paper does not define.
    """
    return tuple(row for row in printed_rows() if row.reproduced and not row.all_queue)


def paper_beside(
    config: Mapping[str, Any], task: str, metric: str, result: Mapping[str, Any]
) -> Beside:
    """The paper's number for this config; `task` and `metric` are as in the table of numbers."""
    recipe, method = str(config.get("recipe")), str(config.get("method"))
    if recipe not in DATA_SETS or method not in METHODS:
        return Beside(None, False, "The paper has no run of this recipe.")
    wanted = (DATA_SETS[recipe], task, metric, METHODS[method], bool(config.get("oracle")))
    rows = [
        row
        for row in paper_rows()
        if (row.dataset, row.task, row.metric, row.method, row.oracle) == wanted
        and row.source in PLACES
    ]
    if not rows:
        return Beside(None, False, "The paper prints no such number.")
    row = min(rows, key=lambda each: _distance(each, config))
    evaluated = _linear_unlike(recipe, result) if task == "linear" else _detection_unlike(result)
    reasons = [
        *_other_images(recipe, config, result if task == "linear" else {}),
        *_unlike_row(row, config),
        *_unlike_recipe(config),
        *evaluated,
    ]
    if reasons:
        return Beside(row, False, f"Not comparable: {'; '.join(reasons)}.")
    return Beside(row, True, f"Comparable with {row.place} as far as it goes: {_open(row)}")


def _open(row: PaperRow) -> str:
    """What the paper does not state of a row, so that a recipe had to choose it."""
    unknown = ["weight decay", "augmentation parameters"]
    if row.method == "supervised":
        unknown = ["the supervised training recipe"]
    elif row.temperature is None:
        unknown.insert(0, "the temperature")
    if row.dataset == "ImageNet-100":
        unknown.insert(0, "the backbone")
    return f"the paper does not state {', '.join(unknown)}; the recipe had to choose."


def _linear_unlike(recipe: str, result: Mapping[str, Any]) -> list[str]:
    protocol = result.get("protocol")
    if protocol == f"preset {recipe}":
        return []
    return [f"evaluated otherwise than in the paper ({protocol or 'protocol unknown'})"]


def _detection_unlike(result: Mapping[str, Any]) -> list[str]:
    """Other steps, batches, start or test images than the paper's detectors (Sec. 5.2)."""
    settings, images = _group(result, "settings"), _group(result, "images")
    wanted = DETECTORS.get(str(settings.get("task")), {})
    ours = {**settings, "test images": images.get("test")}
    return [
        f"{words.replace('_', ' ')} {_said(ours.get(words))} instead of {value}"
        for words, value in wanted.items()
        if ours.get(words) != value
    ]


def _row(line: Mapping[str, str]) -> PaperRow:
    mix = (line["num_hardest"], line["num_pairs"], line["num_with_query"])
    return PaperRow(
        source=line["source"],
        dataset=line["dataset"],
        task=line["task"],
        method=line["method"],
        oracle=line["oracle"] == "yes",
        mix=(int(mix[0]), int(mix[1]), int(mix[2])) if all(mix) else None,
        queue_size=int(line["queue_size"]) if line["queue_size"] else None,
        epochs=int(line["epochs"]) if line["epochs"] else None,
        temperature=float(line["temperature"]) if line["temperature"] else None,
        metric=line["metric"],
        value=float(line["value"]),
        std=float(line["std"]) if line["std"] else None,
        gain=float(line["gain_printed"]) if line["gain_printed"] else None,
        reproduced=line["reproduced"] == "yes",
        all_queue="all queue" in line["note"],
    )


def _distance(row: PaperRow, config: Mapping[str, Any]) -> tuple[int, float, int]:
    """Rows by how many settings differ, then how far epochs are away, then where they stand."""
    train = _group(config, "train")
    far = abs((row.epochs or 0) - (_epochs(config) or 0))
    other_temperature = row.temperature not in (None, train.get("temperature"))
    differences = len(_unlike_row(row, config)) + other_temperature
    return differences, far, list(PLACES).index(row.source)


def _other_images(recipe: str, config: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    """Trained or evaluated on other images; a config without a name has those of the result."""
    wanted = OUR_DATA_NAMES[recipe]
    named = _group(config, "data").get("name")
    evaluated = str(result.get("data", named or "unknown images"))
    trained = named or evaluated
    reasons = [] if trained == wanted else [f"trained on {trained} instead of {DATA_SETS[recipe]}"]
    if evaluated not in (wanted, trained):
        reasons.append(f"evaluated on {evaluated}")
    return reasons


def _unlike_row(row: PaperRow, config: Mapping[str, Any]) -> list[str]:
    """Differences in what the paper's tables name: epochs, queue, (N, s, s')."""
    mix, queue = _group(config, "mix"), _group(config, "train").get("queue_size")
    ours = tuple(mix.get(name) for name in ("num_hardest", "num_pairs", "num_with_query"))
    epochs = _epochs(config)
    reasons = []
    if row.epochs is not None and row.epochs != epochs:
        reasons.append(f"{_said(epochs)} epochs instead of {row.epochs}")
    elif row.epochs in SCHEDULES and _group(config, "train").get("epochs") != SCHEDULES[row.epochs]:
        planned = _group(config, "train").get("epochs")
        reasons.append(
            f"a schedule of {_said(planned)} epochs, where the paper stops one of"
            f" {SCHEDULES[row.epochs]} at {row.epochs}"
        )
    elif row.epochs is not None and row.epochs not in SCHEDULES:
        reasons.append(f"the paper's {row.epochs} epochs are not one plain schedule (App. C.1)")
    if row.queue_size is not None and row.queue_size != queue:
        reasons.append(f"a queue of {_said(queue)} instead of {row.queue_size}")
    if row.mix is not None and row.mix != ours:
        reasons.append(f"(N, s, s') ({', '.join(map(_said, ours))}) instead of {row.mix}")
    return reasons


def _unlike_recipe(config: Mapping[str, Any]) -> list[str]:
    """Differences from the recipe's own settings, in the order of SETTING_NAMES."""
    method = str(config["method"])
    built = RECIPES[str(config["recipe"])].build(method, bool(config.get("oracle")))
    paper = dataclasses.asdict(built)
    reasons = []
    for setting, words in SETTING_NAMES.items():
        group, name = setting.split(".")
        if group == "mix" and method != "mochi":
            continue
        ours, theirs = _group(config, group).get(name, "unknown"), paper[group][name]
        if isinstance(theirs, tuple):  # JSON has lists alone
            theirs = list(theirs)
        if setting == "optimizer.milestones" and paper["optimizer"]["schedule"] != "step":
            continue
        if ours != theirs:
            reasons.append(f"{words} {_said(ours)} instead of {_said(theirs)}")
    return reasons


def _group(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    group = config.get(name)
    return group if isinstance(group, dict) else {}


def _epochs(config: Mapping[str, Any]) -> int | None:
    """Epochs trained: the paper's 100 are the first 100 of a schedule of 200."""
    train = _group(config, "train")
    numbers = [n for n in (train.get("epochs"), train.get("stop_epoch")) if isinstance(n, int)]
    return min(numbers, default=None)


def _said(value: object) -> str:
    return "all" if value is None else str(value)
