"""What run folders hold, read once and leniently: what cannot be read is said, not raised."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

from hardmix.analysis.figures import Picture
from hardmix.errors import InputError
from hardmix.runs.folder import Run
from hardmix.runs.labels import method_name, tell_apart
from hardmix.settings.config import PretrainConfig
from hardmix.settings.saved import settings

Found = tuple[list[Picture], list[str]]
"""Pictures, and sentences that say what is missing."""

MOST_POINTS = 400
"""Of a curve; longer ones become the means of as many parts."""
EPOCHS_TO_AVERAGE = 8
"""A shorter run is drawn line by line."""


class Record(NamedTuple):
    """A run as figures see it."""

    run: Run
    label: str
    """The method's name; where another run has the same, with the settings in which they differ."""
    hue: int
    """Its number among the runs: its colour in every figure."""
    config: PretrainConfig | None
    """None where config.json is of another version, or damaged."""
    metrics: list[dict[str, Any]]
    hardness: list[dict[str, Any]]
    results: dict[str, dict[str, Any]]
    """By the name of the file."""


def read_records(runs: Sequence[Run]) -> tuple[list[Record], list[str]]:
    """All runs that have anything to show, and what is missing, in sentences."""
    missing: list[str] = []
    configs = [_config(run, missing) for run in runs]
    labels = _labels(runs, configs)
    records = [
        Record(
            run,
            label,
            hue,
            config,
            _lines(run, "metrics", missing),
            _lines(run, "hardness", missing),
            _results(run, missing),
        )
        for hue, (run, label, config) in enumerate(zip(runs, labels, configs, strict=True))
    ]
    for record in records:
        if not record.metrics:
            missing.append(f"{record.run.path} has no metrics: it is left out of the curves.")
    return records, missing


def curve(record: Record, key: str) -> tuple[list[float], list[float]]:
    """A measure over training: epochs, with fractions, and values; what is no number is left out.

    A line of metrics.jsonl is one batch. From `EPOCHS_TO_AVERAGE` epochs on, a point is the mean of
    an epoch's lines, in its middle. The last step of every epoch is logged: steps per epoch follow
    from the lines.
    """
    lines = [line for line in record.metrics if _is_number(line.get("step"))]
    lines = [line for line in lines if _is_number(line.get("epoch")) and line["epoch"] >= 0]
    if len({line["epoch"] for line in lines}) >= EPOCHS_TO_AVERAGE:
        points = [(epoch + 0.5, fmean(values)) for epoch, values in _by_epoch(lines, key)]
    else:
        steps = max((line["step"] / (line["epoch"] + 1) for line in lines), default=0) or 1
        points = [(line["step"] / steps, line[key]) for line in lines if _is_number(line.get(key))]
    return thin([x for x, _ in points]), thin([y for _, y in points])


def epoch_means(lines: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """Mean of a measure over each epoch that has it, in order."""
    return [fmean(values) for _, values in _by_epoch(lines, key)]


def thin(values: list[float]) -> list[float]:
    """At most `MOST_POINTS` of them: means of consecutive parts."""
    number = len(values)
    if number <= MOST_POINTS:
        return [float(f"{value:.6g}") for value in values]
    ends = [round(i * number / MOST_POINTS) for i in range(MOST_POINTS + 1)]
    parts = [values[start:end] for start, end in pairwise(ends)]
    return [float(f"{sum(part) / len(part):.6g}") for part in parts]


def _by_epoch(lines: Sequence[Mapping[str, Any]], key: str) -> list[tuple[int, list[float]]]:
    epochs: dict[int, list[float]] = {}
    for line in lines:
        if _is_number(line.get(key)) and isinstance(line.get("epoch"), int):
            epochs.setdefault(line["epoch"], []).append(line[key])
    return sorted(epochs.items())


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _config(run: Run, missing: list[str]) -> PretrainConfig | None:
    try:
        return run.config()
    except (InputError, TypeError, ValueError) as error:
        missing.append(f"{run.path} is named by its folder alone: {error}")
        return None


def _labels(runs: Sequence[Run], configs: Sequence[PretrainConfig | None]) -> list[str]:
    """The method, then the settings that tell it from its like; if that fails, the folder."""
    labels = [
        run.path.name or str(run.path) if config is None else method_name(config)
        for run, config in zip(runs, configs, strict=True)
    ]
    labels = tell_apart(labels, [settings(config) if config else {} for config in configs])
    for name in (lambda run: run.path.name, lambda run: str(run.path)):
        twice = Counter(labels)
        labels = [
            f"{label}, {name(run)}" if twice[label] > 1 else label
            for run, label in zip(runs, labels, strict=True)
        ]
    return labels


def _lines(run: Run, what: str, missing: list[str]) -> list[dict[str, Any]]:
    try:
        lines = run.metrics() if what == "metrics" else run.hardness()
    except (OSError, ValueError) as error:
        missing.append(f"{run.path / what}.jsonl cannot be read: {error}.")
        return []
    return [line for line in lines if isinstance(line, dict)]


def _results(run: Run, missing: list[str]) -> dict[str, dict[str, Any]]:
    found = {}
    for file in sorted(run.results.glob("*.json")):
        try:
            result = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            missing.append(f"{file} cannot be read: {error}.")
            continue
        if isinstance(result, dict):
            found[file.stem] = result
    return found
