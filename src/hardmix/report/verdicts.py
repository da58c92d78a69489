"""What pre-training was worth, in words: a run's results/verdict.json, at the top of the page.

`hardmix pretrain` writes the file: `text` is the sentence, `next` what to do, `mixing` what to
expect of mixing, and `measured` the numbers behind it, by encoder.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hardmix.report.grouping import SeedGroup
from hardmix.report.run_figures import first_seeds_first
from hardmix.runs.reading import RunRecord, number

ENCODERS = {
    "trained": "this encoder",
    "started from": "the weights it started from",
    "untrained": "untrained encoder",
    "pixels": "raw pixels",
    "colour histogram": "colour histogram",
}
"""Names of what is compared, in the order of the page."""


@dataclass(frozen=True)
class Measured:
    """A number of one encoder."""

    name: str
    text: str
    share: float | None
    """The number itself if it is a fraction, for a bar."""
    own: bool
    """Whether it is that of the trained encoder."""


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
    """What was measured."""
    numbers: list[Measured]


def verdicts(groups: Sequence[SeedGroup], missing: list[str]) -> list[Verdict]:
    """Return the verdicts of the runs that have one; older runs have none."""
    found = []
    for group, run in first_seeds_first(groups):
        facts = run.results.get("verdict")
        if facts is None:
            continue
        if not isinstance(facts.get("text"), str) or not facts["text"].strip():
            missing.append(f"{run.name}: results/verdict.json has no sentence.")
            continue
        found.append(_verdict(group, run, facts))
    return found


def _verdict(group: SeedGroup, run: RunRecord, facts: Mapping[str, Any]) -> Verdict:
    measured, better = facts.get("measured"), facts.get("better")
    leaves = list(_leaves(measured if isinstance(measured, dict) else {}))
    numbers = [_measured(name, value) for name, value in leaves if isinstance(value, float)]
    order = list(ENCODERS.values())
    numbers.sort(key=lambda each: order.index(each.name) if each.name in order else len(order))
    return Verdict(
        run=run.name,
        label=run.label,
        group=group.number,
        text=facts["text"],
        advice=[*_texts(facts.get("next")), *_texts(facts.get("mixing"))],
        better=better if isinstance(better, bool) else None,
        about=" ".join(value for _, value in leaves if isinstance(value, str)),
        numbers=numbers,
    )


def _leaves(values: Mapping[str, Any]) -> Iterator[tuple[str, float | str]]:
    """Yield texts and numbers with their names, also those one level down."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from ((k, v) for k, v in _leaves(value) if isinstance(v, float))
        elif isinstance(value, str) and value.strip():
            yield name, value
        elif (known := number(value)) is not None:
            yield name, known


def _measured(name: str, value: float) -> Measured:
    words = name.replace("_", " ").replace("-", " ").lower()
    fraction = 0 <= value <= 1
    text = f"{100 * value:.1f} %" if fraction else f"{value:.4g}"
    return Measured(ENCODERS.get(words, words), text, value if fraction else None, words == "trained")


def _texts(value: Any) -> list[str]:
    """Return a text, or the texts of a list."""
    values = value if isinstance(value, list) else [value]
    return [each for each in values if isinstance(each, str) and each.strip()]
