"""The paper's printed numbers, and whether a run is comparable with one of them.

results.csv has one line per number of the paper's tables and of Fig. 3.
A run is comparable if its settings are those of the recipe, which are the paper's as far as it
states them, and if it was evaluated by the paper's protocol. What the paper leaves open is stated
each time. Settings are plain values by dotted name, and may be of older versions.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from hardmix.settings.methods import COUNTS, METHOD_FACTS
from hardmix.settings.recipes import RECIPES
from hardmix.settings.saved import FACTS, settings

DATA_SETS = {"imagenet100": "ImageNet-100", "imagenet1k": "ImageNet-1k"}
"""Recipes that reproduce runs of the paper, and the paper's name of their data set."""

OUR_DATA_NAMES = {"imagenet100": "imagenet100", "imagenet1k": "imagenet"}
"""The same data sets as named by `data.name` and the result files."""

METHODS = {"moco-v1": "MoCo", "moco-v2": "MoCo-v2", "mochi": "MoCHi", "supervised": "supervised"}
"""The paper's names of the methods that its authors trained; others are copied numbers."""

DETECTORS = {
    "voc": {"start": "run", "iterations": 24_000, "batch_size": 16, "test images": 4952},
    "coco": {"start": "run", "iterations": 90_000, "batch_size": 16, "test images": 5000},
}
"""Settings that the paper's detectors share, by `task` (MoCo's detectron2 configs)."""

SCHEDULES = {100: 200, 200: 200}
"""Epochs in the tables, and of the schedule they belong to."""
RESTARTED, RESTARTED_AT = 800, 200
"""The paper's runs of 800 epochs continue those of 200 with a schedule of 800 (App. C.1). It does
not say how those of 400 and 1000 epochs were scheduled."""

PLACES = {
    "table1": "Table 1",
    "table2": "Table 2",
    "table3_coco": "Table 3",
    "table1_supp": "Table 1 of the appendix",
    "table2_supp": "Table 2 of the appendix",
    "fig3a": "Fig. 3a",
    "fig3b": "Fig. 3b",
}
"""Where a number is printed, in the order of citation."""

NOT_COMPARED = {
    *(
        "recipe",
        "method",
        "oracle",
        "train.epochs",
        "train.stop_epoch",
        "train.queue_size",
        *COUNTS,
    ),
    *("data.name", "data.root"),
    *("train.seed", "train.precision", "data.max_pixels"),
}
"""Settings not compared with the recipe: those compared with the paper's row, those known from the
images, and those that do not change a result."""

SETTING_NAMES = {
    name: facts.name for name, facts in FACTS.items() if facts.identity and name not in NOT_COMPARED
}
"""Settings that change a result."""


@dataclass(frozen=True)
class PaperRow:
    """One printed number and the settings the paper states for it; None if it states none."""

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
    """Gain over MoCo-v2, if it is printed with the value."""
    reproduced: bool
    """Whether the paper's authors measured it, rather than copied it from others."""
    all_queue: bool
    """Whether it is the row "(all queue)", which the paper does not define."""

    @property
    def place(self) -> str:
        """Table or figure."""
        return PLACES.get(self.source, self.source)


@dataclass(frozen=True)
class Beside:
    """The paper's row for a run, if it has one, and a sentence on comparability."""

    row: PaperRow | None
    comparable: bool
    sentence: str


@cache
def printed_rows() -> tuple[PaperRow, ...]:
    """Return every number in the paper's tables and Fig. 3, including copied ones."""
    text = files("hardmix.paper").joinpath("results.csv").read_text(encoding="utf-8")
    return tuple(_row(line) for line in csv.DictReader(text.splitlines()))


@cache
def paper_rows() -> tuple[PaperRow, ...]:
    """Return every number that the paper's authors measured, without those they copied.

    The row "(all queue)" is left out too, because the paper does not define it.
    """
    return tuple(row for row in printed_rows() if row.reproduced and not row.all_queue)


def paper_beside(
    chosen: Mapping[str, Any],
    task: str,
    metric: str,
    result: Mapping[str, Any],
    lines: Sequence[Mapping[str, Any]] = (),
) -> Beside:
    """Return the paper's number for these settings; `task` and `metric` are as in results.csv.

    `lines` are those of metrics.jsonl, whose learning rates tell whether the run was restarted.
    """
    recipe, method = str(chosen.get("recipe")), str(chosen.get("method"))
    if recipe not in DATA_SETS or method not in METHODS:
        return Beside(None, False, "The paper has no run of this recipe.")
    wanted = (DATA_SETS[recipe], task, metric, METHODS[method], bool(chosen.get("oracle")))
    rows = [
        row
        for row in paper_rows()
        if (row.dataset, row.task, row.metric, row.method, row.oracle) == wanted
        and row.source in PLACES
    ]
    if not rows:
        return Beside(None, False, "The paper prints no such number.")
    row = min(rows, key=lambda each: _distance(each, chosen))
    evaluated = _linear_unlike(recipe, result) if task == "linear" else _detection_unlike(result)
    reasons = [
        *_other_images(recipe, chosen, result if task == "linear" else {}),
        *_unlike_row(row, chosen, lines),
        *_unlike_recipe(chosen),
        *evaluated,
    ]
    if reasons:
        return Beside(row, False, f"Not comparable: {'; '.join(reasons)}.")
    return Beside(row, True, f"Comparable with {row.place} as far as it goes: {_open(row)}")


def _open(row: PaperRow) -> str:
    """Return what the paper does not state about a row, so that the recipe had to choose."""
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
    return [f"evaluated differently from the paper ({protocol or 'protocol unknown'})"]


def _detection_unlike(result: Mapping[str, Any]) -> list[str]:
    """Return how steps, batches, start or test images differ from the paper (Sec. 5.2)."""
    parts = (result.get("settings"), result.get("images"))
    detector, images = (part if isinstance(part, dict) else {} for part in parts)
    wanted = DETECTORS.get(str(detector.get("task")), {})
    ours = {**detector, "test images": images.get("test")}
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


def _distance(row: PaperRow, chosen: Mapping[str, Any]) -> tuple[int, float, int]:
    """Return a sort key: how many settings differ, how far the epochs are, and the place."""
    far = abs((row.epochs or 0) - (_epochs(chosen) or 0))
    other_temperature = row.temperature not in (None, chosen.get("train.temperature"))
    differences = len(_unlike_row(row, chosen)) + other_temperature
    return differences, far, list(PLACES).index(row.source)


def _other_images(recipe: str, chosen: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    """Return whether it was trained or evaluated on other images, in words."""
    wanted = OUR_DATA_NAMES[recipe]
    named = chosen.get("data.name")
    evaluated = str(result.get("data", named or "unknown images"))
    trained = named or evaluated
    reasons = [] if trained == wanted else [f"trained on {trained} instead of {DATA_SETS[recipe]}"]
    if evaluated not in (wanted, trained):
        reasons.append(f"evaluated on {evaluated}")
    return reasons


def _unlike_row(
    row: PaperRow, chosen: Mapping[str, Any], lines: Sequence[Mapping[str, Any]] = ()
) -> list[str]:
    """Return differences in what the paper's tables state: epochs, queue, (N, s, s')."""
    queue, planned = chosen.get("train.queue_size"), chosen.get("train.epochs")
    ours = tuple(chosen.get(name) for name in COUNTS)
    epochs = _epochs(chosen)
    reasons = []
    if row.epochs is not None and row.epochs != epochs:
        reasons.append(f"{_said(epochs)} epochs instead of {row.epochs}")
    elif row.epochs in SCHEDULES and planned != SCHEDULES[row.epochs]:
        reasons.append(
            f"a schedule of {_said(planned)} epochs, where the paper stops one of"
            f" {SCHEDULES[row.epochs]} at {row.epochs}"
        )
    elif row.epochs == RESTARTED and not was_restarted(lines):
        reasons.append(
            f"the paper's {RESTARTED} epochs are not one plain schedule: they continue a run of"
            f" {RESTARTED_AT} (App. C.1), which this run did not"
        )
    elif row.epochs is not None and row.epochs not in (*SCHEDULES, RESTARTED):
        reasons.append(f"the paper does not say how its {row.epochs} epochs were scheduled")
    if row.queue_size is not None and row.queue_size != queue:
        reasons.append(f"a queue of {_said(queue)} instead of {row.queue_size}")
    if row.mix is not None and row.mix != ours:
        reasons.append(f"(N, s, s') ({', '.join(map(_said, ours))}) instead of {row.mix}")
    return reasons


def was_restarted(lines: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the learning rate rose again at epoch 200, as in App. C.1.

    A schedule of 200 epochs has come down to almost nothing by then; one of 800 continues at 85 %
    of the initial rate.
    """
    rates: dict[bool, list[float]] = {True: [], False: []}
    for line in lines:
        epoch, rate = line.get("epoch"), line.get("lr")
        if isinstance(epoch, int) and isinstance(rate, int | float):
            rates[epoch < RESTARTED_AT].append(float(rate))
    before, after = rates[True], rates[False]
    return bool(before and after) and before[-1] < 0.01 * max(before) and after[0] > 0.8 * before[0]


def _unlike_recipe(chosen: Mapping[str, Any]) -> list[str]:
    """Return differences from the recipe's settings, in the order of SETTING_NAMES."""
    method = str(chosen["method"])
    paper = settings(RECIPES[str(chosen["recipe"])].build(method, bool(chosen.get("oracle"))))
    reasons = []
    for name, words in SETTING_NAMES.items():
        if not METHOD_FACTS[method].uses(name):
            continue
        if name == "optimizer.milestones" and paper["optimizer.schedule"] != "step":
            continue
        ours, theirs = chosen.get(name, "unknown"), paper[name]
        if isinstance(theirs, tuple):  # JSON has only lists
            theirs = list(theirs)
        if ours != theirs:
            reasons.append(f"{words} {_said(ours)} instead of {_said(theirs)}")
    return reasons


def _epochs(chosen: Mapping[str, Any]) -> int | None:
    """Return the epochs trained: the paper's 100 are the first 100 of a schedule of 200."""
    found = (chosen.get("train.epochs"), chosen.get("train.stop_epoch"))
    return min((number for number in found if isinstance(number, int)), default=None)


def _said(value: object) -> str:
    return "all" if value is None else str(value)
