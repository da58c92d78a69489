"""A run in words and numbers: its data, the results of its evaluations, and its verdict.

`hardmix pretrain` writes results/verdict.json: `text` is the sentence, `next` what to do, `mixing`
what to expect of mixing, and `scores` (or `measured`) the numbers behind it, by encoder.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from hardmix.runs.folder import Run
from hardmix.runs.reading import RunRecord, number, read_run, read_settings
from hardmix.runtime.files import read_json
from hardmix.settings.evaluations import evaluation_kind, evaluation_title
from hardmix.settings.methods import method_title
from hardmix.settings.saved import flatten
from hardmix.settings.small_html import curve_html, facts_html

# -- the data


def data_of(run: RunRecord) -> str:
    """Return the data set's name, or its folder's."""
    name, root = run.settings.get("data.name"), run.settings.get("data.root")
    if isinstance(name, str) and name not in ("folder", "list", "shards"):
        return name
    return folder_name(root) if isinstance(root, str) else ""


def folder_name(root: str) -> str:
    """Return a folder's name, with the one above it if the name alone says nothing."""
    parts = Path(root).parts
    words = parts[-2:] if Path(root).name in ("train", "images", "photos") else parts[-1:]
    return "/".join(words).replace("//", "/") or root


def num_images_of(run: RunRecord) -> int | None:
    """Return the number of training images; None if unknown."""
    counts = [run.settings.get("data.num_images"), run.results.get("knn", {}).get("train")]
    return next((count for count in counts if isinstance(count, int)), None)


# -- the results

PAPER_AP = {
    "VOC07 11-point": ("voc_detection", "AP"),
    "COCO box": ("coco_detection", "APbb"),
    "COCO mask": ("coco_segmentation", "APmk"),
}
"""Definitions of AP in `hardmix detect`, with their names in the paper's tables."""
PROTOCOL = ("schedule", "iterations", "epochs", "batch_size", "lr", "trials")
"""Settings of an evaluation that its heading shows."""


@dataclass(frozen=True)
class ResultNumber:
    """One number of a result file, and a second shown with it, from 0 to 1."""

    id: str
    """The file's name, and for detectors the definition of AP."""
    title: str
    metric: str
    value: float
    second: str
    second_value: float | None
    paper: tuple[str, str]
    """Task and metric in the table of the paper's numbers."""
    result: dict[str, Any]


def numbers_of(name: str, result: dict[str, Any]) -> list[ResultNumber]:
    """Return the accuracy of a classifier, or a detector's AP by each definition."""
    top1 = number(result.get("top1"))
    if top1 is not None:
        task = "linear" if evaluation_kind(name) in ("linear", "linear-cached") else "none"
        second, title = number(result.get("top5")), evaluation_title(name)
        return [ResultNumber(name, title, "Top-1", top1, "Top-5", second, (task, "top1"), result)]
    values = []
    metrics = result.get("metrics")
    for metric, numbers in metrics.items() if isinstance(metrics, dict) else ():
        ap, ap50 = (_trial_mean(numbers, key) for key in ("ap", "ap50"))
        if ap is not None:
            title = f"{evaluation_title('detection')}, {metric}"
            paper = PAPER_AP.get(metric, ("none", "AP"))
            if result.get("start") in ("random", "supervised"):  # not the run's own encoder
                title, paper = f"{title}, from {result['start']} weights", ("none", "AP")
            id_ = f"{name}/{metric}"
            values.append(ResultNumber(id_, title, "AP", ap, "AP50", ap50, paper, result))
    return values


def describe_protocol(result: Mapping[str, Any]) -> str:
    """Return a short description of the protocol."""
    words = [str(result["protocol"])] if "protocol" in result else []
    words += [f"{name} {result[name]}" for name in ("k", "temperature", "start") if name in result]
    settings = result.get("settings")
    if isinstance(settings, dict) and "protocol" not in result:
        told = [name for name in PROTOCOL if name in settings]
        words += [f"{name.replace('_', ' ')} {settings[name]}" for name in told]
    if "data" in result:
        words.append(f"on {result['data']}")
    return ", ".join(words)


def _trial_mean(numbers: Any, key: str) -> float | None:
    trials = numbers.get(key) if isinstance(numbers, dict) else None
    return number(trials.get("mean")) if isinstance(trials, dict) else None


class StaleResult(NamedTuple):
    """A result written before the run was resumed with another setting."""

    name: str
    setting: str
    then: object
    now: object


def stale_results(run: RunRecord) -> list[StaleResult]:
    """Return the results written before the run was resumed with other epochs."""
    stale = []
    for name, result in run.results.items():
        measured = result.get("run")
        if not isinstance(measured, dict) or not run.settings:
            continue
        then, now = flatten(measured), run.settings
        for setting in ("train.epochs", "train.stop_epoch"):
            if setting in then and then[setting] != now.get(setting):
                stale.append(StaleResult(name, setting, then[setting], now.get(setting)))
    return stale


# -- the verdict

MEASURES = {
    "knn": "Share of {images} whose class most of their {neighbours} have.",
    "nearest and vote": (
        "The mean of two shares of {images}: those whose nearest neighbour has the right class, and"
        " those for which the vote of the {neighbours} gives it."
    ),
    "views": (
        "Share of the {neighbours} on which two views of an image agree, the mean over {images}."
    ),
}
GUESSING = "Guessing gives {:.1f} %."

ENCODERS = {
    "encoder": "this encoder",
    "start": "the weights it started from",
    "untrained": "untrained encoder",
    "pixels": "raw pixels",
    "colours": "colour histogram",
}
"""Names of the encoders that are compared, in the order of the page."""
ALSO = {"trained": "encoder", "started from": "start", "colour histogram": "colours"}
"""Other names of the same encoders."""


@dataclass(frozen=True)
class Measured:
    """A number of one encoder."""

    name: str
    text: str
    share: float | None
    """The number itself if it is a fraction, for a bar."""
    own: bool
    """Whether the encoder is the trained one."""


@dataclass(frozen=True)
class Verdict:
    """The value of pre-training: the encoder compared with untrained features."""

    text: str
    """The sentence."""
    better: bool | None
    """Whether it is better than everything it was compared with; None if nothing was measured."""
    advice: list[str]
    """Changes that may help, the likeliest first, and the effect to expect of mixing."""
    about: str
    """The measurement, in a sentence."""
    numbers: list[Measured]

    def __repr__(self) -> str:
        return f"Verdict: {self.text}"

    def _repr_html_(self) -> str:
        facts = {each.name: each.text for each in self.numbers}
        advice = "".join(f"<li>{escape(each)}</li>" for each in self.advice)
        return facts_html(
            f"Verdict: {self.text}", facts, f"<p>{escape(self.about)}</p><ul>{advice}</ul>"
        )


def read_verdict(run: Run | Path | str) -> Verdict | None:
    """Return the verdict at the end of a run; None if there is none yet, or no longer.

    Args:
        run: the run, or its folder.

    Returns:
        The verdict: its sentence, what to try next, and the numbers of the encoders compared.
    """
    folder = run if isinstance(run, Run) else Run.open(run)
    return verdict_of(_object(folder.results / "verdict.json"))


def verdict_of(facts: object) -> Verdict | None:
    """Return the verdict in the contents of results/verdict.json; None if it has no sentence."""
    if not isinstance(facts, Mapping):
        return None
    text, better, numbers = facts.get("text"), facts.get("better"), _numbers(facts)
    if not isinstance(text, str) or not text.strip():
        return None
    order = list(ENCODERS.values())
    numbers.sort(key=lambda each: order.index(each.name) if each.name in order else len(order))
    return Verdict(
        text=text,
        better=better if isinstance(better, bool) else None,
        advice=[
            *_texts(facts.get("next")),
            *(f"Mixing: {text}" for text in _texts(facts.get("mixing"))),
        ],
        about=_about(facts) if numbers else "",
        numbers=numbers,
    )


def _numbers(facts: Mapping[str, Any]) -> list[Measured]:
    """Return the numbers of all encoders, plain or with their errors."""
    measured = []
    for group in (facts.get("scores"), facts.get("measured")):
        for name, value in group.items() if isinstance(group, dict) else ():
            score = number(value.get("score") if isinstance(value, dict) else value)
            if score is not None:
                measured.append(_measured(name, score))
    return measured


def _about(facts: Mapping[str, Any]) -> str:
    """Return what the numbers measure."""
    measure = str(facts.get("measure"))
    if measure == "knn" and _has_vote(facts.get("scores")):
        measure = "nearest and vote"
    template = MEASURES.get(measure)
    if template is None:
        return " ".join(_texts(facts.get("measure")))
    images, near, chance = (number(facts.get(name)) for name in ("images", "k", "chance"))
    about = template.format(
        images="the images" if images is None else f"{images:,.0f} images",
        neighbours="nearest neighbours" if near is None else f"{near:.0f} nearest neighbours",
    )
    return about if chance is None else f"{about} {GUESSING.format(100 * chance)}"


def _has_vote(scores: object) -> bool:
    """Return whether the encoder's score is the mean of two, as in verdicts of this version."""
    encoder = scores.get("encoder") if isinstance(scores, Mapping) else None
    return isinstance(encoder, Mapping) and "vote" in encoder


def _measured(name: str, value: float) -> Measured:
    words = name.replace("_", " ").replace("-", " ").lower()
    key = ALSO.get(words, words)
    fraction = 0 <= value <= 1
    text = f"{100 * value:.1f} %" if fraction else f"{value:.4g}"
    share = value if fraction else None
    return Measured(ENCODERS.get(key, words), text, share, key == "encoder")


def _texts(value: Any) -> list[str]:
    """Return a text, or the texts of a list."""
    values = value if isinstance(value, list) else [value]
    return [each for each in values if isinstance(each, str) and each.strip()]


# -- a run in a notebook

CURVES = {"loss": "loss", "knn": "k-NN accuracy", "proxy_accuracy": "proxy accuracy"}
"""Curves of a run in a notebook, by their key in metrics.jsonl."""


def run_in_words(run: Run) -> str:
    """Return the method and the state of a run in a few words, from two small files."""
    settings = read_settings(run)
    if not settings:
        return "no run yet"
    state = _object(run.status_file).get("state")
    return f"{method_title(settings)}, {state if isinstance(state, str) else 'state unknown'}"


def run_html(run: Run) -> str:
    """Return a run for a notebook: what it is, its results, its verdict and its curves."""
    record = read_run(run.path)
    facts = {"method": run_in_words(run), "data": data_of(record)}
    facts["backbone"] = str(record.settings.get("model.backbone", ""))
    for name, result in record.results.items():
        for each in numbers_of(name, result):
            facts[each.title] = f"{100 * each.value:.1f} % {each.metric}"
    said = verdict_of(record.results.get("verdict"))
    if said is not None:
        facts["verdict"] = said.text
    curves = [curve_html(name, _points(record, key)) for key, name in CURVES.items()]
    return facts_html(f"Run {run.path}", facts, "".join(curves))


def _points(record: RunRecord, key: str) -> list[tuple[float, float]]:
    pairs = [(number(line.get("step")), number(line.get(key))) for line in record.metrics]
    return [(step, value) for step, value in pairs if step is not None and value is not None]


def _object(file: Path) -> dict[str, Any]:
    """Return a JSON object; an empty one if the file is missing or damaged."""
    try:
        value = read_json(file)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
