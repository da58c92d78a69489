"""A row of a grid, and the paper's numbers for it. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from hardmix.paper.numbers import METHODS, PaperRow, printed_rows
from hardmix.settings.config import PretrainConfig
from hardmix.settings.methods import METHOD_FACTS, MethodName
from hardmix.settings.recipes import RECIPES

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
"""Evaluations of a row: transfer is the probe on images of another data set, embedding alignment
and uniformity of the features, queue the same of the embedding used by the loss, proxy the logged
accuracy of the task of Sec. 3.2, cost speed, memory and time of training."""

Mix = tuple[int, int, int]
"""(N, s, s')."""

RESTARTED = 800
"""Epochs of the runs that continue from the end of 200 epochs (App. C.1)."""
HALF_WAY = 100
"""Epochs of the results that are epoch 100 of a schedule of 200 (App. C.1)."""
SCHEDULE = 200
"""Epochs of the paper's usual schedule."""

LEFT_OUT = {
    "DeeperCluster": "numbers only: not implemented here",
    "SeLa": "numbers only: not implemented here",
    "InterCLR": "numbers only: not implemented here",
    "MoCo": "copied from its own paper; the rows measured by the authors are there",
    "MoCo-v2": "copied from its own paper; the rows measured by the authors are there",
    "supervised": "on ImageNet-1k: copied, the weights are not the authors'",
}
"""Methods whose copied numbers have no row, and why."""


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
    """What the paper says in words, or how it is interpreted here."""
    id: str = ""
    """Its id in the user's file."""
    baseline: str = ""
    """In the user's file, the id of its baseline; empty if it has none."""
    own: PretrainConfig | None = None
    """In the user's file, its complete config, which no scale changes."""

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
    paper_only: str = ""
    """Why it has no small scale; empty if it has one."""
    own: bool = False
    """Whether it is the user's own, for which the paper has no numbers."""
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


def baseline_of(row: Row, rows: Sequence[Row]) -> Row | None:
    """Return the MoCo-v2 row that is the baseline: same K and epochs.

    For MoCHi with the oracle, the baseline has the oracle too; otherwise not. A row of a file names
    its own baseline.
    """
    if row.own is not None:
        named = row.baseline or next((row.id for each in rows if each.baseline == row.id), "")
        return next((each for each in rows if named and each.id == named), None)
    oracle = row.oracle and row.method == "mochi"
    wanted = ("moco-v2", oracle, row.recipe, row.epochs, "")
    for each in rows:
        same = (each.method, each.oracle, each.recipe, each.epochs, each.printed) == wanted
        if same and (each.queue_size == row.queue_size or row.printed):
            return each
    return None


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
