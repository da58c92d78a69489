"""Readers of metrics.jsonl: TensorBoard, Weights & Biases, your own function, and a watch.

The watch warns of signs that a run goes wrong: a collapse, a loss at chance, too many points.
"""

import hashlib
import importlib.util
import math
import os
from collections.abc import Callable
from typing import Any

from hardmix.errors import InputError
from hardmix.runs.folder import Run
from hardmix.runtime.console import warn
from hardmix.runtime.distributed import is_main
from hardmix.settings.config import PretrainConfig
from hardmix.settings.saved import settings
from hardmix.training import messages

OnLog = Callable[[dict[str, Any]], None]
"""Called with every line of metrics.jsonl, on rank 0."""

COLLAPSED = 0.05
"""Spread of the keys (1 for a uniform sphere) below which all images look the same."""
TOO_MUCH_MASS = 0.8
"""Share of the softmax that points may hold without a warning."""
NEAR = 0.95
"""Share of the chance level above which a loss counts as being at chance."""
FALL = 0.02
"""Share of the chance level by which a loss must have fallen to count as falling."""
GUESSING = 0.02
"""Proxy accuracy below which it counts as guessing, or four times chance if that is more."""
PATIENCE = 300
"""Steps with a full queue before a judgement."""


class MetricLog:
    """A reader of the lines of metrics.jsonl."""

    def open(self, run: Run, step: int) -> None:
        """Start after `step`, dropping later lines of a stopped run if possible."""

    def write(self, line: dict[str, Any]) -> None:
        """Read one line."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the log at the end of a run, whether it succeeded or failed."""


def open_logs(config: PretrainConfig, on_log: OnLog | None) -> list[MetricLog]:
    """Return the readers of this run's metrics; raise InputError if a library is missing."""
    available: list[tuple[bool, str, MetricLog]] = [
        (config.train.tensorboard, "tensorboard", TensorBoardLog()),
        (config.train.wandb, "wandb", WandbLog(config)),
    ]
    logs: list[MetricLog] = []
    for wanted, name, log in available:
        if wanted and importlib.util.find_spec(name) is None:
            raise InputError(
                f"train.{name} needs {name}, which is not installed: pip install 'hardmix[{name}]'."
            )
        logs += [log] if wanted and is_main() else []
    return logs + ([Callback(on_log)] if on_log is not None and is_main() else [])


class TensorBoardLog(MetricLog):
    """RUN/tensorboard: a copy of metrics.jsonl."""

    def open(self, run: Run, step: int) -> None:
        """Start after `step`; later steps are purged."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.path / "tensorboard"), purge_step=step + 1)

    def write(self, line: dict[str, Any]) -> None:
        """Write every number under its name."""
        for name, value in line.items():
            if name != "step":
                self._writer.add_scalar(name, value, line["step"])
        self._writer.flush()


class WandbLog(MetricLog):
    """Weights & Biases: project "hardmix", or WANDB_PROJECT; WANDB_MODE=offline sends nothing.

    A resumed run continues the same curve: its ID is derived from the path of its folder.
    """

    def __init__(self, config: PretrainConfig) -> None:
        self._config = config

    def open(self, run: Run, step: int) -> None:  # noqa: ARG002
        """Open the run; its files are in RUN/wandb."""
        import wandb

        place = str(run.path.resolve())
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "hardmix"),
                name=run.path.name,
                id=hashlib.sha256(place.encode()).hexdigest()[:16],
                resume="allow",
                dir=place,
                config=settings(self._config),
                settings=wandb.Settings(silent=True),
            )
        except wandb.Error as error:
            raise InputError(
                f"train.wandb: Weights & Biases cannot be reached ({error}): run wandb"
                " login, set WANDB_MODE=offline, or turn train.wandb off, then resume the run."
            ) from error

    def write(self, line: dict[str, Any]) -> None:
        """Write every number under its name."""
        self._run.log({name: each for name, each in line.items() if name != "step"}, line["step"])

    def close(self) -> None:
        """Send the remaining lines."""
        self._run.finish()


class Callback(MetricLog):
    """Your own function. An exception it raises ends the run, which can be resumed."""

    def __init__(self, function: OnLog) -> None:
        self._function = function

    def write(self, line: dict[str, Any]) -> None:
        """Call the function with a copy of the line, which it may change."""
        self._function(dict(line))


class LearningWatch(MetricLog):
    """Warnings about a run that goes wrong; most of them are given only once."""

    def __init__(self, config: PretrainConfig) -> None:
        self._config = config
        self._losses: list[tuple[int, float]] = []
        self._warned: set[str] = set()

    def write(self, line: dict[str, Any]) -> None:
        """Look at a line; warn of a collapse each time, of everything else once."""
        if line.get("spread", 1.0) < COLLAPSED and line["epoch"] > 0:
            warn(messages.COLLAPSED.format(**line))
        if line.get("synthetic_mass", 0.0) > TOO_MUCH_MASS:
            self._warn_once("mass", messages.TOO_MUCH_MASS.format(**line))
        if "proxy_accuracy" not in line or line.get("queue_filled", 1.0) < 1:
            return  # random keys in the queue are easy to distinguish
        self._losses.append((line["step"], line["loss"]))
        if self._learns_nothing(line):
            chance = math.log(1 + self._config.train.queue_size)
            self._warn_once("chance", messages.NOTHING_LEARNT.format(chance=chance, **line))

    def _warn_once(self, subject: str, message: str) -> None:
        if subject not in self._warned:
            self._warned.add(subject)
            warn(message)

    def _learns_nothing(self, line: dict[str, Any]) -> bool:
        """Return whether the loss is at chance, has not fallen, and the task is not solved."""
        chance = math.log(1 + self._config.train.queue_size)
        guess = max(GUESSING, 4 / (1 + self._config.train.queue_size))
        first, steps = self._losses[0][0], len(self._losses)
        if line["step"] - first < PATIENCE or steps < 4 or line["proxy_accuracy"] > guess:
            return False
        half = [loss for _, loss in self._losses[: steps // 2]]
        late = [loss for _, loss in self._losses[steps // 2 :]]
        before, now = sum(half) / len(half), sum(late) / len(late)
        return now > NEAR * chance and now > before - FALL * chance
