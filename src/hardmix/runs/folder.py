"""A run is a folder: config.json, metrics.jsonl, hardness.jsonl, checkpoints/, results/, figures/.

The trained encoder is encoder.safetensors. status.json records the state of the run, and .lock
which process writes to it. With several processes, only the main one writes.
"""

import dataclasses
import errno
import json
import os
import platform
import shlex
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from hardmix.errors import InputError, OutputError
from hardmix.runs.checkpoints import Checkpoint, load_to_resume, pack, write_checkpoint
from hardmix.runs.weight_files import pack_safetensors
from hardmix.runtime.distributed import is_main
from hardmix.runtime.files import (
    MOST_LOG,
    append_line,
    errors_naming,
    read_file,
    read_json,
    room,
    write_atomically,
)
from hardmix.settings.config import PretrainConfig
from hardmix.settings.saved import build_config, check_same_run, root_near, to_json

ENCODER_FORMAT = "hardmix-encoder-1"
OWN_TRUNK = "own"
"""The backbone's name in the file of an encoder with a user's own network."""

OF_THE_WEIGHTS = frozenset({"model.backbone", "data.channels"})
"""Settings of imported weights that must not change when training starts."""

Resume = bool | Literal["auto"]
"""Whether to resume a run; "auto" resumes it if it exists, and otherwise starts it."""


class Run:
    """A run's folder and the files in it.

    `path` is the folder; `config_file`, `metrics_file`, `hardness_file`, `status_file`,
    `images_file` and `encoder_file` are in it, and `checkpoints`, `results` and `figures`.
    `start_file` has the weights that the trunk started from, if they were not random;
    `trained_file` has the trained encoder if `encoder_file` is not it, because training made the
    weights it started from worse. `fitting_file` says what the recipe photos chose, and why.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config_file = self.path / "config.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.hardness_file = self.path / "hardness.jsonl"
        self.status_file = self.path / "status.json"
        self.images_file = self.path / "images.txt.gz"
        self.checkpoints = self.path / "checkpoints"
        self.results = self.path / "results"
        self.figures = self.path / "figures"
        self.encoder_file = self.path / "encoder.safetensors"
        self.trained_file = self.path / "encoder-trained.safetensors"
        self.start_file = self.path / "start.safetensors"
        self.fitting_file = self.path / "fitting.json"
        self._unwritten: list[tuple[Path, str]] = []
        self._place: tuple[int, int] | None = None

    def __repr__(self) -> str:
        from hardmix.runs.summary import run_in_words  # which reads runs, and so imports this file

        return f"Run({str(self.path)!r}): {run_in_words(self)}"

    def _repr_html_(self) -> str:
        from hardmix.runs.summary import run_html

        return run_html(self)

    @classmethod
    def create(cls, path: Path | str, config: PretrainConfig) -> "Run":
        """Create a run; raises InputError if the folder already contains one."""
        run = cls(path)
        if not is_main():
            return run
        run.resumes(False)
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            run.write_config(config)
        except OSError as error:
            raise InputError(f"out={run.path} cannot be written: {error.strerror}.") from error
        return run

    @classmethod
    def open(cls, path: Path | str) -> "Run":
        """Open an existing run."""
        run = cls(path)
        if not run.exists:
            raise InputError(f"{run.path} is not a run: it has no config.json.")
        return run

    @property
    def exists(self) -> bool:
        """Whether the folder contains a run, finished or not."""
        return self.config_file.exists()

    def resumes(self, resume: Resume) -> bool:
        """Return whether to resume a run; raises InputError if `resume` does not allow it."""
        exists = self.exists
        if exists and not resume:
            raise InputError(
                f"out={self.path} already contains a run: resume it (--resume), or choose another"
                " folder."
            )
        if not exists and resume is True:
            raise InputError(
                f"out={self.path} contains no run to resume (no config.json): start it without"
                " --resume, or use --resume auto, which starts or resumes."
            )
        return exists

    def config(self) -> PretrainConfig:
        """Return the config that the run was started with.

        Older versions saved a relative `data.root`: it is looked for from the current folder, then
        from the folders above the run.
        """
        config = read_config(self.config_file)
        root = root_near(config.data.root, self.path)
        return dataclasses.replace(config, data=dataclasses.replace(config.data, root=root))

    def write_config(self, config: PretrainConfig) -> None:
        """Write config.json: at the start, and when a resumed run changes some of its settings."""
        if is_main():
            write_atomically(self.config_file, to_json(config))

    def set_status(self, state: str, **facts: Any) -> None:
        """Write status.json: running, done, stopped or failed, and why.

        torchrun hides exit statuses.
        """
        if not self.is_in_place():
            return  # it may be another run's
        status = {
            "state": state,
            **facts,
            "command": self.first_command(),
            "process": os.getpid(),
            "host": socket.gethostname(),
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        data = (json.dumps(status, indent=2) + "\n").encode()
        try:
            write_atomically(self.status_file, data)
        except OSError:  # a full disk, reported by checkpoints: overwriting needs no new block
            with suppress(OSError):
                _overwrite(self.status_file, data)

    def first_command(self) -> str:
        """Return the command that started the run, also after a resume; else this program's."""
        with suppress(OSError, ValueError):
            status = read_json(self.status_file)
            if isinstance(status, dict) and isinstance(status.get("command"), str):
                return str(status["command"])
        return this_command()

    def keep_place(self) -> None:
        """Remember which folder this is, to notice if it is moved or replaced."""
        if is_main():
            found = self.path.stat()
            self._place = found.st_dev, found.st_ino

    def is_in_place(self) -> bool:
        """Return whether the folder is still the one of `keep_place`."""
        if self._place is None:
            return True
        try:
            found = self.path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # a network disk that does not respond may do so later
            return True
        return self._place == (found.st_dev, found.st_ino)

    @property
    def unwritten(self) -> int:
        """Number of log lines not yet written because of a full disk."""
        return len(self._unwritten)

    def log(self, line: Mapping[str, Any]) -> None:
        """Append one object to metrics.jsonl."""
        self._append(self.metrics_file, line)

    def log_hardness(self, line: Mapping[str, Any]) -> None:
        """Append one object to hardness.jsonl, the data of Fig. 2a."""
        self._append(self.hardness_file, line)

    def metrics(self) -> list[dict[str, Any]]:
        """Return all lines of metrics.jsonl; a half-written last line is skipped."""
        return _lines(self.metrics_file)

    def hardness(self) -> list[dict[str, Any]]:
        """Return all lines of hardness.jsonl."""
        return _lines(self.hardness_file)

    def log_lengths(self) -> dict[str, int]:
        """Sync the logs to disk and return their lengths, for a checkpoint to record."""
        lengths = {}
        for file in (self.metrics_file, self.hardness_file):
            with errors_naming(file):
                if file.exists():
                    with file.open("ab") as out:
                        os.fsync(out.fileno())
                lengths[file.name] = file.stat().st_size if file.exists() else 0
        return lengths

    def forget_after(self, step: int, lengths: Mapping[str, int] | None = None) -> None:
        """Delete what was logged after a checkpoint: a resumed run will log it again."""
        if not is_main():
            return
        for file in (self.metrics_file, self.hardness_file):
            if not file.exists():
                continue
            if lengths is not None and file.name in lengths:
                write_atomically(file, read_file(file, MOST_LOG)[: lengths[file.name]])
            else:
                kept = [json.dumps(line) + "\n" for line in _lines(file) if line["step"] <= step]
                write_atomically(file, "".join(kept).encode())

    def write_encoder(
        self,
        trunk: nn.Module,
        config: PretrainConfig,
        backbone: str | None = None,
        file: Path | None = None,
    ) -> None:
        """Write the trunk to encoder.safetensors, under torchvision's names if it has them.

        `file` is another file to write it to.
        """
        file = file or self.encoder_file
        data = pack_encoder(trunk, config, backbone)
        try:
            write_atomically(file, data)
        except OSError as error:
            raise OutputError(
                f"the encoder could not be written ({error.strerror}):"
                f" {room(file, len(data))}; existing checkpoints are kept: free some"
                " space, then resume the run (--resume) to write it."
            ) from error

    def write_result(self, name: str, result: Mapping[str, Any]) -> Path:
        """Write results/NAME.json: numbers first, then what they depend on."""
        file = self.results / f"{name}.json"
        if not is_main():
            return file
        self.results.mkdir(exist_ok=True)
        facts = {
            "command": self.first_command() if name == "pretrain" else this_command(),
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": versions(),
            "run": dataclasses.asdict(self.config()),
        }
        write_atomically(file, json.dumps({**result, **facts}, indent=2).encode())
        return file

    def save_checkpoint(self, step: int, tensors: dict[str, Tensor], facts: dict[str, Any]) -> int:
        """Write a checkpoint, delete old ones (checkpoints.py), and return its size in bytes.

        A full disk raises OSError, whose `filename` says what was to be written and how much space
        there is; existing files stay intact.
        """
        data = pack(tensors)
        try:
            if not self.is_in_place():
                raise FileNotFoundError(errno.ENOENT, "the run's folder was moved or replaced")
            write_checkpoint(self.checkpoints, step, data, facts, versions())
        except OSError as error:
            error.filename = room(self.checkpoints / f"step-{step:08d}", len(data))
            raise
        return len(data)

    def load_checkpoint(self) -> Checkpoint | None:
        """Load the newest intact checkpoint to resume from; None if there are no checkpoints."""
        return load_to_resume(self.checkpoints)

    def _append(self, file: Path, line: Mapping[str, Any]) -> None:
        """Append a line; lines that a full disk rejects are kept and retried with the next."""
        self._unwritten.append((file, json.dumps(line)))
        while self._unwritten and self.is_in_place():
            try:
                append_line(*self._unwritten[0])
            except OSError:
                return
            self._unwritten.pop(0)


def this_command() -> str:
    """Return this program's command."""
    return shlex.join(["hardmix", *sys.argv[1:]])


def pack_encoder(trunk: nn.Module, config: PretrainConfig, backbone: str | None = None) -> bytes:
    """Return the content of an encoder.safetensors."""
    weights = {k: v.detach().cpu().contiguous() for k, v in trunk.state_dict().items()}
    facts = encoder_facts(config) | {"format": ENCODER_FORMAT}
    if backbone is not None:
        facts["backbone"] = backbone
    return pack_safetensors(weights, facts)


def encoder_facts(config: PretrainConfig) -> dict[str, str]:
    """Return what an encoder's file says of the network, and of the images it is for."""
    return {
        "backbone": config.model.backbone,
        "channels": str(config.data.channels),
        "image_size": str(config.data.image_size),
        "reduce": str(config.data.reduce),
        "method": config.method,
    }


def _overwrite(file: Path, data: bytes) -> None:
    """Overwrite a small file in place, which needs no further space."""
    with file.open("r+b", buffering=0) as out:
        out.write(data)
        out.truncate()


def _lines(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    return logged_objects(read_file(file, MOST_LOG).decode("utf-8", errors="replace"))


def versions() -> dict[str, str]:
    """Return the versions of the software that a result depends on."""
    names = ["hardmix", "torch", "torchvision", "numpy"]
    return {"python": platform.python_version()} | {name: version(name) for name in names}


def check_resumable(path: Path, config: PretrainConfig) -> None:
    """Raise InputError if settings that must not change differ."""
    run = Run.open(path)
    trained = run.config().recipe != "imported" or any(run.checkpoints.glob("step-*"))
    check_same_run(run.config(), config, None if trained else OF_THE_WEIGHTS)


def read_config(file: Path) -> PretrainConfig:
    """Read a saved config and check it like one from the command line."""
    try:
        values = read_json(file)
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise InputError(f"{file} is not JSON: {error}.") from error
    return build_config(values, str(file))


def logged_objects(text: str) -> list[dict[str, Any]]:
    """Return a log's objects; lines that are not objects with a step are skipped."""
    lines = []
    names: dict[str, str] = {}  # every line has the same ones: they take memory once
    for each in text.splitlines():
        try:
            line = json.loads(each, object_pairs_hook=partial(_sharing, names))
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines


def _sharing(names: dict[str, str], pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {names.setdefault(name, name): value for name, value in pairs}
