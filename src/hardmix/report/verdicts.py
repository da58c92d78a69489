"""The value of pre-training in words: a run's results/verdict.json, at the top of the page.

`hardmix pretrain` writes the file: `text` is the sentence, `next` what to do, `mixing` what to
expect of mixing, and `scores` (or `measured`) the numbers behind it, by encoder.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hardmix.report import sentences
from hardmix.report.grouping import SeedGroup
from hardmix.report.run_figures import first_seeds_first
from hardmix.runs.reading import RunRecord, number

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
    """A run's verdict."""

    run: str
    label: str
    group: int
    text: str
    advice: list[str]
    better: bool | None
    about: str
    """The measurement, in a sentence."""
    numbers: list[Measured]


def verdicts(groups: Sequence[SeedGroup], missing: list[str]) -> list[Verdict]:
    """Return the verdicts of the runs that have one; older runs have none."""
    verdicts = []
    for group, run in first_seeds_first(groups):
        facts = run.results.get("verdict")
        if facts is None:
            continue
        if not isinstance(facts.get("text"), str) or not facts["text"].strip():
            missing.append(sentences.NO_VERDICT.format(run=run.name))
            continue
        verdicts.append(_verdict(group, run, facts))
    return verdicts


def _verdict(group: SeedGroup, run: RunRecord, facts: Mapping[str, Any]) -> Verdict:
    better, numbers = facts.get("better"), _numbers(facts)
    order = list(ENCODERS.values())
    numbers.sort(key=lambda each: order.index(each.name) if each.name in order else len(order))
    return Verdict(
        run=run.name,
        label=run.label,
        group=group.number,
        text=facts["text"],
        advice=[
            *_texts(facts.get("next")),
            *(f"Mixing: {text}" for text in _texts(facts.get("mixing"))),
        ],
        better=better if isinstance(better, bool) else None,
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
    template = sentences.MEASURES.get(str(facts.get("measure")))
    if template is None:
        return " ".join(_texts(facts.get("measure")))
    images, near, chance = (number(facts.get(name)) for name in ("images", "k", "chance"))
    about = template.format(
        images="the images" if images is None else f"{images:,.0f} images",
        neighbours="nearest neighbours" if near is None else f"{near:.0f} nearest neighbours",
    )
    return about if chance is None else f"{about} {sentences.GUESSING.format(100 * chance)}"


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
