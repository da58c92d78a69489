"""Curves from metrics.jsonl: the proxy task (Fig. 2b, App. B.1) and false negatives.

Sec. 3.2 asks how many queries find their key, Sec. 3.3 what a class oracle sees (Fig. 2c).
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from hardmix.analysis.figures.fig2 import (
    BOTH_PARENTS,
    FALSE,
    ONE_PARENT,
    QUERY_PARENT,
    REAL_ONLY,
    WITH_POINTS,
    Curve,
    fig2b,
    fig2c,
)
from hardmix.analysis.figures.picture import Found
from hardmix.runs.reading import RunRecord, number

MOST_POINTS = 400
"""Most points of a curve; longer ones become the means of as many parts."""
EPOCHS_TO_AVERAGE = 8
"""A shorter run is drawn line by line."""

FALSE_SHARES = {
    "false_negatives_top": FALSE,
    "synthetic_one_false": ONE_PARENT,
    "synthetic_both_false": BOTH_PARENTS,
    "synthetic_query_false": QUERY_PARENT,
}
"""Keys of metrics.jsonl in words. Oracle runs also count the negatives they discard."""


def proxy_task(records: Sequence[RunRecord]) -> Found:
    """Fig. 2b: proxy accuracy over training of every run that logged it."""
    lines = []
    for record in records:
        epochs, mixed = curve(record.metrics, "proxy_accuracy_mixed")
        real_epochs, real = curve(record.metrics, "proxy_accuracy")
        # Without synthetic points both lines are the same: only one is drawn, without markers.
        if not mixed or (epochs, mixed) == (real_epochs, real):
            epochs, mixed, real = real_epochs, real, []
        if mixed:
            lines.append(Curve(record.label, WITH_POINTS, record.hue, epochs, mixed))
        if real:
            lines.append(Curve(record.label, REAL_ONLY, record.hue, real_epochs, real))
    if not lines:
        return [], ["No Fig. 2b: no run logged the proxy task."]
    if not any(len(line.x) > 1 for line in lines):
        return [], ["No Fig. 2b: the runs logged the proxy task only once."]
    return [fig2b(lines, _temperatures(records))], []


def false_negatives(records: Sequence[RunRecord]) -> Found:
    """Fig. 2c: false negatives over training of every run whose images have labels."""
    lines = []
    for record in records:
        for key, kind in FALSE_SHARES.items():
            epochs, shares = curve(record.metrics, key)
            if shares:
                lines.append(Curve(record.label, kind, record.hue, epochs, shares))
    if not lines:
        return [], ["No Fig. 2c: no run logged false negatives, which need labels."]
    if not any(len(line.x) > 1 for line in lines):
        return [], ["No Fig. 2c: the runs logged false negatives only once."]
    oracle = any(record.settings.get("oracle") is True for record in records)
    note = " Oracle runs discard them in training; here they are counted." if oracle else ""
    return [fig2c(lines, note)], []


def curve(lines: Sequence[Mapping[str, Any]], key: str) -> tuple[list[float], list[float]]:
    """Return a metric over training: fractional epochs and values; non-numbers are skipped.

    A line of metrics.jsonl is one batch. In runs of `EPOCHS_TO_AVERAGE` epochs or more, a point is
    the mean of an epoch's lines, at its middle.
    """
    lines = [line for line in lines if (at := number(line.get("epoch"))) is not None and at >= 0]
    if len({line["epoch"] for line in lines}) >= EPOCHS_TO_AVERAGE:
        points = [(epoch + 0.5, fmean(values)) for epoch, values in _by_epoch(lines, key)]
    else:
        steps = steps_per_epoch(lines)
        found = [(number(line.get("step")), number(line.get(key))) for line in lines]
        points = [(step / steps, y) for step, y in found if step is not None and y is not None]
    return thin([x for x, _ in points]), thin([y for _, y in points])


def steps_per_epoch(lines: Sequence[Mapping[str, Any]]) -> float:
    """Return steps per epoch: at an epoch's last line, step / (epoch + 1) is largest."""
    largest = 0.0
    for line in lines:
        step, epoch = number(line.get("step")), number(line.get("epoch"))
        if step is not None and epoch is not None and epoch >= 0:
            largest = max(largest, step / (epoch + 1))
    return largest or 1.0


def epoch_means(lines: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """Return the mean of a metric over each epoch that has it, in order."""
    return [fmean(values) for _, values in _by_epoch(lines, key)]


def thin(values: list[float]) -> list[float]:
    """Return at most `MOST_POINTS` values: means of consecutive parts."""
    count = len(values)
    if count <= MOST_POINTS:
        return [float(f"{value:.6g}") for value in values]
    ends = [round(i * count / MOST_POINTS) for i in range(MOST_POINTS + 1)]
    parts = [values[start:end] for start, end in pairwise(ends)]
    return [float(f"{sum(part) / len(part):.6g}") for part in parts]


def _by_epoch(lines: Sequence[Mapping[str, Any]], key: str) -> list[tuple[int, list[float]]]:
    epochs: dict[int, list[float]] = {}
    for line in lines:
        value = number(line.get(key))
        if value is not None and isinstance(line.get("epoch"), int):
            epochs.setdefault(line["epoch"], []).append(value)
    return sorted(epochs.items())


def _temperatures(records: Sequence[RunRecord]) -> str:
    """Return a note if temperatures differ: App. B.1 compares at a single one."""
    temperatures = sorted(
        {
            record.config.train.temperature
            for record in records
            if record.config is not None and record.config.uses("train.temperature")
        }
    )
    if len(temperatures) < 2:
        return ""
    words = ", ".join(f"{temperature:g}" for temperature in temperatures)
    return f" These runs have different temperatures ({words}), which changes the task too."
