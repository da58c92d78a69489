"""Copies of metrics.jsonl: TensorBoard, Weights & Biases, or your own function."""

import hashlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from hardmix.errors import InputError
from hardmix.runs.folder import Run
from hardmix.runtime.distributed import is_main
from hardmix.settings.config import PretrainConfig
from hardmix.settings.saved import settings

OnLog = Callable[[dict[str, Any]], None]
"""Called with every line of metrics.jsonl, on rank 0."""


@runtime_checkable
class MetricLog(Protocol):
    """A destination for the lines of metrics.jsonl."""

    def open(self, run: Run, step: int) -> None:
        """Start after `step`, dropping later lines of a stopped run if possible."""

    def write(self, line: dict[str, Any]) -> None:
        """Write one line."""

    def close(self) -> None:
        """Close the log at the end of a run, whether it succeeded or failed."""


def open_logs(config: PretrainConfig, on_log: OnLog | None) -> list[MetricLog]:
    """Return the logs that the settings ask for; raise InputError if a library is missing."""
    known: list[tuple[bool, str, MetricLog]] = [
        (config.train.tensorboard, "tensorboard", TensorBoardLog()),
        (config.train.wandb, "wandb", WandbLog(config)),
    ]
    logs: list[MetricLog] = []
    for wanted, name, log in known:
        if wanted and importlib.util.find_spec(name) is None:
            raise InputError(
                f"train.{name} needs {name}, which is not installed: pip install 'hardmix[{name}]'."
            )
        logs += [log] if wanted and is_main() else []
    return logs + ([Callback(on_log)] if on_log is not None and is_main() else [])


class TensorBoardLog:
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

    def close(self) -> None:
        """Do nothing: every line has been flushed."""


class WandbLog:
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


class Callback:
    """Your own function. An exception it raises ends the run, which can be resumed."""

    def __init__(self, function: OnLog) -> None:
        self._function = function

    def open(self, run: Run, step: int) -> None:
        """Do nothing."""

    def write(self, line: dict[str, Any]) -> None:
        """Call the function with a copy of the line, which it may change."""
        self._function(dict(line))

    def close(self) -> None:
        """Do nothing."""
