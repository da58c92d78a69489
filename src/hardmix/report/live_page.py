"""The page of a run that is still training, drawn by a process of its own for `hardmix watch`.

The server stays small and alive whatever the run's files hold.
"""

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from hardmix.analysis.over_training import steps_per_epoch
from hardmix.errors import InputError
from hardmix.report import sentences
from hardmix.report.overview import planned_epochs
from hardmix.report.page import environment, part, render
from hardmix.report.watch import state_of
from hardmix.runs.reading import RunRecord, number, read_runs
from hardmix.runtime.console import duration
from hardmix.runtime.files import unpacked

NO_PAGE = 3
"""Exit status of a process that wrote a sentence in place of a page."""


def draw_page(path: Path) -> bytes:
    """Return the page; raises InputError if there is nothing to show."""
    (record,) = read_runs([path])
    if record.is_empty:
        raise InputError(" ".join(record.missing))
    if state_of(path) == "running":  # the verdict of a resumed run is about its earlier encoder
        record.results.pop("verdict", None)
    script = part("watch.js")
    template = environment().get_template("live.html")
    live = template.render(live=live_status(record), script=Markup(script))
    missing = list(record.missing)
    page = render([record], missing, Path("report.html"), live=Markup(live), script=script)
    return page.encode(errors="backslashreplace")


def main(path: str) -> None:
    """Write the page to standard output, or a sentence about what is wrong; never a traceback."""
    if hasattr(os, "nice"):
        os.nice(10)  # the training comes first
    status = 0
    try:
        content = draw_page(Path(path))
    except Exception as error:  # the files of a stranger may lead to any
        ours = isinstance(error, InputError)
        sentence = str(error) if ours else f"{type(error).__name__}: {error}"
        content, status = sentence.encode(errors="backslashreplace"), NO_PAGE
    sys.stdout.buffer.write(content)
    sys.stdout.flush()
    sys.exit(status)


# -- the progress of training, according to the run's files


RECENT = 20
"""Lines of the log that the speed is averaged over."""
MOST_STEPS = 1e15
"""The length of a training with more steps is taken to be unknown."""


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
    speed = recent_speed(lines)
    batch = number(record.settings.get("train.batch_size"))
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


def recent_speed(lines: list[dict[str, Any]]) -> float | None:
    """Return images per second over the last lines; None if none was logged.

    The last line alone may be about a single step, at an epoch's end, that waited for something.
    """
    steps = seconds = before = 0.0
    for line in lines[-RECENT:]:
        step, speed = number(line.get("step")), number(line.get("images_per_second"))
        if step is None or speed is None or speed <= 0:
            continue
        number_of_steps = max(1.0, step - before) if before or len(lines) <= RECENT else 1.0
        steps, seconds, before = steps + number_of_steps, seconds + number_of_steps / speed, step
    return steps / seconds if seconds else None


def _sentence(state: str, done: int, total: int | None, epochs: str) -> str:
    if state == "running" and total:
        reached = min(int(done * int(epochs) / total) + 1, int(epochs))
        return sentences.IN_EPOCH.format(epoch=reached, epochs=epochs)
    unknown = sentences.SO_FAR if done else sentences.NOT_STARTED
    return sentences.STATES.get(state, unknown).format(done=done)


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
    with suppress(OSError):  # then the config's number counts
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
