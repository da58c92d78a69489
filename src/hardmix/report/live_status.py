"""The progress of a run's training, according to its files."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hardmix.analysis.over_training import steps_per_epoch
from hardmix.report.overview import duration, planned_epochs
from hardmix.report.run_state import state_of
from hardmix.runs.reading import RunRecord, number
from hardmix.settings.bounded_files import unpacked

MOST_STEPS = 1e15
"""A longer training is one whose length is unknown."""


@dataclass(frozen=True)
class LiveStatus:
    """The progress of training."""

    state: str
    """running, done, stopped, failed, lost (its process is gone) or unknown."""
    sentence: str
    share: float | None
    """Fraction of training that is done; None if its length is unknown."""
    facts: list[tuple[str, str]]
    written: int
    """When the last line was logged, in seconds since 1970; 0 if none was."""


def live_status(record: RunRecord) -> LiveStatus:
    """Return the run's progress according to its files."""
    state, lines = state_of(record.run.path), record.metrics
    done = int(_last(lines, "step") or 0)
    total = _total_steps(record)
    speed, batch = (
        _last(lines, "images_per_second"),
        number(record.settings.get("train.batch_size")),
    )
    left = ""
    if state == "running" and total and speed and batch:
        left = duration(max(0, total - done) * batch / speed)
    shown = {
        "Step": f"{done:,}" + (f" of {total:,}" if total else ""),
        "Loss": _text(_last(lines, "loss"), "{:.3f}"),
        "Proxy accuracy": _text(_last(lines, "proxy_accuracy"), "{:.1%}"),
        "k-NN accuracy": _text(_last(lines, "knn"), "{:.1%}"),
        "Images per second": _text(speed, "{:,.0f}"),
        "Time left": left,
    }
    return LiveStatus(
        state=state,
        sentence=_sentence(state, done, total, planned_epochs(record)),
        share=min(1.0, done / total) if total else None,
        facts=[(name, value) for name, value in shown.items() if value],
        written=_written(record.run.metrics_file),
    )


def _sentence(state: str, done: int, total: int | None, epochs: str) -> str:
    if state == "running" and total:
        reached = min(int(done * int(epochs) / total) + 1, int(epochs))
        return f"Training, epoch {reached} of {epochs}."
    words = {
        "running": "Training.",
        "done": f"Done after {done:,} steps.",
        "stopped": f"Stopped after {done:,} steps; resume with hardmix pretrain --resume.",
        "failed": f"Failed after {done:,} steps.",
        "lost": f"Its process ended unexpectedly after {done:,} steps.",
    }
    return words.get(state, "Not started yet." if not done else f"{done:,} steps so far.")


def _total_steps(record: RunRecord) -> int | None:
    epochs, steps = planned_epochs(record), _steps(record)
    total = int(epochs) * steps if epochs and steps else 0.0
    return int(total) if 0 < total < MOST_STEPS else None


def _steps(record: RunRecord) -> float | None:
    """Return the steps per epoch, from the log or, in the first epoch, from the images."""
    if any((number(line.get("epoch")) or 0) >= 1 for line in record.metrics):
        return steps_per_epoch(record.metrics)
    batch = number(record.settings.get("train.batch_size"))
    images = number(record.settings.get("data.num_images"))
    with suppress(OSError):  # then as the config says
        images = 1.0 + sum(part.count(b"\n") for part in unpacked(record.run.images_file))
    return float(int(images / batch)) or None if images and batch else None


def _last(lines: list[dict[str, Any]], key: str) -> float | None:
    values = (number(line.get(key)) for line in reversed(lines))
    return next((value for value in values if value is not None), None)


def _text(value: float | None, shape: str) -> str:
    return "" if value is None else shape.format(value)


def _written(file: Path) -> int:
    try:
        return int(file.stat().st_mtime)
    except OSError:
        return 0
