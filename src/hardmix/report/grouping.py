"""Runs that differ by the seed alone are one row: mean, deviation, gain over MoCo-v2."""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hardmix.evaluation.accuracy import mean_and_deviation
from hardmix.paper.numbers import Beside, paper_beside
from hardmix.report.reading import NOT_THE_RUN, RunFacts, number
from hardmix.runs.labels import tell_apart

BASELINE = "moco-v2"
TITLES = {"linear": "Linear evaluation", "linear-cached": "Linear probe", "knn": "k-NN"}
PAPER_AP = {
    "VOC07 11-point": ("voc_detection", "AP"),
    "COCO box": ("coco_detection", "APbb"),
    "COCO mask": ("coco_segmentation", "APmk"),
}
"""Definitions of AP in `hardmix detect`, as the paper's tables call them."""
PROTOCOL = ("schedule", "iterations", "epochs", "batch_size", "lr", "trials")
"""Settings of an evaluation that its heading tells."""


@dataclass(frozen=True)
class Measure:
    """One number of a result file, and a second that stands beside it, as shares of 1."""

    title: str
    metric: str
    value: float
    second: str
    second_value: float | None
    paper: tuple[str, str]
    """Task and metric in the paper's numbers."""
    result: dict[str, Any]


@dataclass(frozen=True)
class Group:
    """Runs of one config with different seeds."""

    runs: list[RunFacts]
    label: str
    number: int

    @property
    def settings(self) -> dict[str, Any]:
        """Of its first run."""
        return self.runs[0].settings

    @property
    def seeds(self) -> str:
        """Of all its runs, in their order."""
        return ", ".join("not recorded" if run.seed is None else str(run.seed) for run in self.runs)


@dataclass(frozen=True)
class Score:
    """A group's result in one evaluation, in percent; deviation None: a single seed."""

    group: Group
    values: list[float]
    mean: float
    deviation: float | None
    second: float | None
    gain: "Gain"
    paper: Beside


@dataclass(frozen=True)
class Gain:
    """Points over the MoCo-v2 baseline, or why there are none."""

    points: float | None
    error: float | None
    """Standard error of the difference; None where one side has a single seed."""
    word: str


@dataclass(frozen=True)
class Evaluation:
    """One protocol on one set of images, with the score of every group that has it."""

    title: str
    protocol: str
    metric: str
    second: str
    scores: list[Score]
    floor: list[tuple[str, float]]
    """What needs no training, where a result file holds it: mean over the runs."""

    @property
    def has_paper(self) -> bool:
        """Whether the paper prints a number for any of its rows."""
        return any(score.paper.row is not None for score in self.scores)

    @property
    def beside_paper(self) -> list[tuple[str, str]]:
        """Sentences on the paper's numbers, each with the rows it is of; none if it is of all."""
        found: dict[str, list[str]] = {}
        for score in self.scores:
            found.setdefault(score.paper.sentence, []).append(score.group.label)
        return [
            (sentence, "" if len(found) == 1 else ", ".join(labels))
            for sentence, labels in found.items()
        ]


def group_runs(runs: Sequence[RunFacts]) -> list[Group]:
    """Same config but the seed; runs without a config stay alone."""
    found: dict[str, list[RunFacts]] = {}
    for run in runs:
        found.setdefault(group_key(run.settings) or f"alone {run.name}", []).append(run)
    return [
        Group(members, label, number)
        for number, (members, label) in enumerate(
            zip(found.values(), _labels(found.values()), strict=True)
        )
    ]


def _labels(groups: Collection[Sequence[RunFacts]]) -> list[str]:
    """The method; where groups share it, what tells them apart, or else the first run's name."""
    firsts = [members[0] for members in groups]
    without_seed = [{**first.settings, "train.seed": None} for first in firsts]
    labels = tell_apart([first.label for first in firsts], without_seed)
    return [
        label if labels.count(label) == 1 else f"{label}, {first.name}"
        for label, first in zip(labels, firsts, strict=True)
    ]


def group_key(settings: Mapping[str, Any], method: object = None) -> str:
    """What the runs of a group share; empty where nothing is known.

    With another `method`, the key of the run that differs by method and mixing alone.
    """
    kept = {k: v for k, v in settings.items() if k not in NOT_THE_RUN and k != "train.seed"}
    if not kept:
        return ""
    kept["method"] = settings.get("method") if method is None else method
    if kept["method"] != "mochi":
        kept = {k: v for k, v in kept.items() if not k.startswith("mix.")}
    return json.dumps({k: _plain(v) for k, v in sorted(kept.items())})


def evaluations_of(groups: Sequence[Group]) -> list[Evaluation]:
    """Every evaluation found in results/*.json, linear and k-NN first."""
    found: dict[tuple[str, str], dict[int, list[Measure]]] = {}
    for group in groups:
        for run in group.runs:
            for name, result in run.results.items():
                for measure in measures_of(name, result):
                    cell = found.setdefault((measure.title, protocol_key(result)), {})
                    cell.setdefault(group.number, []).append(measure)
    order = list(TITLES.values())
    ranked = sorted(
        found, key=lambda key: (order.index(key[0]) if key[0] in order else len(order), key)
    )
    return [_evaluation(found[key], groups) for key in ranked]


def repeated_seeds(groups: Sequence[Group]) -> list[str]:
    """Runs that are copies of each other: no second seed, though each counts in the mean."""
    sentences = []
    for group in groups:
        known = [str(run.seed) for run in group.runs if run.seed is not None]
        for seed in sorted({seed for seed in known if known.count(seed) > 1}):
            names = [run.name for run in group.runs if str(run.seed) == seed]
            sentences.append(
                f"{', '.join(names)} have the same settings and the same seed {seed}: the table"
                " counts each, but they are not independent."
            )
    return sentences


def unknown_results(runs: Sequence[RunFacts]) -> list[str]:
    """Result files that hold no number for the table, in sentences."""
    return [
        f"{run.name}: results/{name}.json has no number that the table knows."
        for run in runs
        for name, result in run.results.items()
        if name not in ("pretrain", "embedding") and not measures_of(name, result)
    ]


def measures_of(name: str, result: dict[str, Any]) -> list[Measure]:
    """Accuracy of a classifier, or AP of a detector by each of its definitions."""
    top1 = number(result.get("top1"))
    if top1 is not None:
        task = "linear" if name.startswith("linear") else "none"
        second = number(result.get("top5"))
        title = evaluation_title(name)
        return [Measure(title, "Top-1", top1, "Top-5", second, (task, "top1"), result)]
    found = []
    metrics = result.get("metrics")
    for metric, numbers in metrics.items() if isinstance(metrics, dict) else ():
        ap, ap50 = (_trial_mean(numbers, key) for key in ("ap", "ap50"))
        if ap is not None:
            title, paper = f"Detection, {metric}", PAPER_AP.get(metric, ("none", "AP"))
            if result.get("start") in ("random", "supervised"):  # not the run's own encoder
                title, paper = f"{title}, from {result['start']} weights", ("none", "AP")
            found.append(Measure(title, "AP", ap, "AP50", ap50, paper, result))
    return found


def evaluation_title(name: str) -> str:
    """A result file's name in words."""
    if name in TITLES:
        return TITLES[name]
    share, _, start = name.removeprefix("finetune-").partition("-")
    if name.startswith("finetune-") and share.replace(".", "", 1).isdigit():
        title = f"Fine-tuned on {float(share):.4g} of the labels"
        return f"{title}, from random weights" if start == "untrained" else title
    return name


def protocol_key(result: Mapping[str, Any]) -> str:
    """What must be equal for two results to be of one kind: all that was set but the seed."""
    settings = result.get("settings")
    if isinstance(settings, dict):
        settings = {name: value for name, value in settings.items() if name != "seed"}
    return describe_protocol(result) + json.dumps(settings, sort_keys=True)


def describe_protocol(result: Mapping[str, Any]) -> str:
    """How it was evaluated, in a few words."""
    words = [str(result["protocol"])] if "protocol" in result else []
    words += [f"{name} {result[name]}" for name in ("k", "temperature", "start") if name in result]
    settings = result.get("settings")
    if isinstance(settings, dict) and "protocol" not in result:
        told = [name for name in PROTOCOL if name in settings]
        words += [f"{name.replace('_', ' ')} {settings[name]}" for name in told]
    if "data" in result:
        words.append(f"on {result['data']}")
    return ", ".join(words)


def _evaluation(cells: Mapping[int, list[Measure]], groups: Sequence[Group]) -> Evaluation:
    values = {number: [100 * each.value for each in cell] for number, cell in cells.items()}
    by_key = {group_key(group.settings): group.number for group in groups if group.settings}
    scores = []
    for group in (group for group in groups if group.number in cells):
        base = by_key.get(group_key(group.settings, BASELINE)) if group.settings else None
        mean, deviation = mean_and_deviation(values[group.number])
        cell = cells[group.number]
        seconds = [100 * each.second_value for each in cell if each.second_value is not None]
        scores.append(
            Score(
                group=group,
                values=values[group.number],
                mean=mean,
                deviation=deviation if len(cell) > 1 else None,
                second=mean_and_deviation(seconds)[0] if seconds else None,
                gain=gain_over(group, base, values),
                paper=paper_beside(group.runs[0].config, *cell[0].paper, cell[0].result),
            )
        )
    one = next(iter(cells.values()))[0]
    protocol = describe_protocol(one.result)
    return Evaluation(one.title, protocol, one.metric, one.second, scores, _floor(cells))


def gain_over(group: Group, base: int | None, known: Mapping[int, list[float]]) -> Gain:
    """Difference of means to the baseline's, with its standard error."""
    if base == group.number:
        return Gain(None, None, "baseline")
    if base is None or not known.get(base):
        return Gain(
            None,
            None,
            "no MoCo-v2 run with these settings"
            if base is None
            else "its MoCo-v2 run lacks this evaluation",
        )
    return difference(known[group.number], known[base])


def difference(ours: list[float], theirs: list[float]) -> Gain:
    """Of two means, with its standard error where both have two values or more."""
    (mean, deviation), (mean0, deviation0) = mean_and_deviation(ours), mean_and_deviation(theirs)
    if min(len(ours), len(theirs)) < 2:
        return Gain(mean - mean0, None, "one seed")
    error = math.sqrt(deviation**2 / len(ours) + deviation0**2 / len(theirs))
    return Gain(mean - mean0, error, "")


def _floor(cells: Mapping[int, list[Measure]]) -> list[tuple[str, float]]:
    words = {"pixels": "raw pixels", "untrained": "untrained encoder"}
    found: dict[str, list[float]] = {}
    for measure in (measure for cell in cells.values() for measure in cell):
        baselines = measure.result.get("baselines")
        for name, each in baselines.items() if isinstance(baselines, dict) else ():
            top1 = number(each.get("top1")) if isinstance(each, dict) else None
            if top1 is not None:
                found.setdefault(words.get(name, str(name)), []).append(100 * top1)
    return [(name, mean_and_deviation(values)[0]) for name, values in found.items()]


def _trial_mean(numbers: Any, key: str) -> float | None:
    trials = numbers.get(key) if isinstance(numbers, dict) else None
    return number(trials.get("mean")) if isinstance(trials, dict) else None


def _plain(value: Any) -> Any:
    """1 and 1.0 are one setting."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
