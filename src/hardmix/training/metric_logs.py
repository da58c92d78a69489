"""Where lines of metrics.jsonl go besides: TensorBoard, Weights & Biases, a function of yours."""

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
    """A further reader of the lines."""

    def open(self, run: Run, step: int) -> None:
        """Begin after `step`; what a stopped run wrote beyond it is dropped where that can be."""

    def write(self, line: dict[str, Any]) -> None:
        """One line."""

    def close(self) -> None:
        """The run ends, well or not."""


def open_logs(config: PretrainConfig, on_log: OnLog | None) -> list[MetricLog]:
    """Those that the settings ask for; a missing library is said before any work."""
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
        """Steps beyond `step` are written again."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.path / "tensorboard"), purge_step=step + 1)

    def write(self, line: dict[str, Any]) -> None:
        """Every number by its name."""
        for name, value in line.items():
            if name != "step":
                self._writer.add_scalar(name, value, line["step"])
        self._writer.flush()

    def close(self) -> None:
        """What was flushed is there."""


class WandbLog:
    """Weights & Biases: project "hardmix", or WANDB_PROJECT; WANDB_MODE=offline sends nothing.

    A resumed run goes on with the same curve: its number there follows from its folder.
    """

    def __init__(self, config: PretrainConfig) -> None:
        self._config = config

    def open(self, run: Run, step: int) -> None:  # noqa: ARG002
        """Its files are in RUN/wandb."""
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
                f"train.wandb: Weights & Biases cannot be reached ({error}): log in with wandb"
                " login, set WANDB_MODE=offline, or leave it out; then --resume."
            ) from error

    def write(self, line: dict[str, Any]) -> None:
        """Every number by its name."""
        self._run.log({name: each for name, each in line.items() if name != "step"}, line["step"])

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


class Callback:
    """A function of the program that trains. What it raises ends the run, which can be resumed."""

    def __init__(self, function: OnLog) -> None:
        self._function = function

    def open(self, run: Run, step: int) -> None:
        """Nothing to open."""

    def write(self, line: dict[str, Any]) -> None:
        """A copy, so that it may be changed."""
        self._function(dict(line))

    def close(self) -> None:
        """Nothing to close."""
