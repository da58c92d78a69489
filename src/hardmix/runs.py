"""A run is a folder: config.json, metrics.jsonl, hardness.jsonl, checkpoints/, results/, figures/.

The encoder that is kept is encoder.safetensors.

A checkpoint is a safetensors file and a JSON manifest with its sha256, written in that order, each
to a temporary file that is synced and renamed: it exists whole or not at all. The two newest are
kept; one that does not match its checksum is named and passed over.
"""

import dataclasses
import hashlib
import json
import os
import platform
import shlex
import sys
import types
import typing
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from hardmix.config import PretrainConfig
from hardmix.errors import InputError

FORMAT = 1
KEPT = 2
ENCODER_FORMAT = "hardmix-encoder-1"
OWN_TRUNK = "own"
"""The backbone's name in the file of an encoder around a user's network."""
Config = TypeVar("Config")


class Run:
    """A run's folder and the files in it."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config_file = self.path / "config.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.hardness_file = self.path / "hardness.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.results = self.path / "results"
        self.figures = self.path / "figures"
        self.encoder_file = self.path / "encoder.safetensors"

    @classmethod
    def create(cls, path: Path | str, config: PretrainConfig) -> "Run":
        """A new run; a folder that already holds one is refused, and nothing in it touched."""
        run = cls(path)
        if run.config_file.exists():
            raise InputError(
                f"--out {run.path} already holds a run: add --resume to go on with it, or choose"
                " another folder."
            )
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            write_atomically(run.config_file, to_json(config))
        except OSError as error:
            raise InputError(f"--out {run.path} cannot be written: {error.strerror}.") from error
        return run

    @classmethod
    def open(cls, path: Path | str) -> "Run":
        """A run that exists."""
        run = cls(path)
        if not run.config_file.exists():
            raise InputError(f"{run.path} is not a run: it has no config.json.")
        return run

    def config(self) -> PretrainConfig:
        """The config it was started with."""
        return read_config(self.config_file)

    def log(self, line: Mapping[str, Any]) -> None:
        """Append one object to metrics.jsonl."""
        _append(self.metrics_file, line)

    def log_hardness(self, line: Mapping[str, Any]) -> None:
        """Append one object to hardness.jsonl: what Fig. 2a shows, at a few epochs."""
        _append(self.hardness_file, line)

    def metrics(self) -> list[dict[str, Any]]:
        """All lines of metrics.jsonl; a half-written last one is left out."""
        return _lines(self.metrics_file)

    def hardness(self) -> list[dict[str, Any]]:
        """All lines of hardness.jsonl."""
        return _lines(self.hardness_file)

    def forget_after(self, step: int) -> None:
        """Drop what was logged of steps that a resumed run will take again."""
        for file in (self.metrics_file, self.hardness_file):
            kept = [json.dumps(line) + "\n" for line in _lines(file) if line["step"] <= step]
            if file.exists():
                write_atomically(file, "".join(kept).encode())

    def write_encoder(
        self, trunk: nn.Module, config: PretrainConfig, backbone: str | None = None
    ) -> None:
        """encoder.safetensors: the trunk, with torchvision's names where it is torchvision's."""
        weights = {k: v.detach().cpu().contiguous() for k, v in trunk.state_dict().items()}
        facts = {
            "backbone": backbone or config.model.backbone,
            "channels": str(config.data.channels),
            "image_size": str(config.data.image_size),
            "method": config.method,
            "format": ENCODER_FORMAT,
        }
        write_atomically(self.encoder_file, save(weights, metadata=facts))

    def write_result(self, name: str, result: Mapping[str, Any]) -> Path:
        """results/NAME.json: numbers first, then what they depend on."""
        self.results.mkdir(exist_ok=True)
        file = self.results / f"{name}.json"
        facts = {
            "command": shlex.join(["hardmix", *sys.argv[1:]]),
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": versions(),
            "run": dataclasses.asdict(self.config()),
        }
        write_atomically(file, json.dumps({**result, **facts}, indent=2).encode())
        return file

    def save_checkpoint(self, step: int, tensors: dict[str, Tensor], facts: dict[str, Any]) -> Path:
        """Write a checkpoint and drop all but the newest two."""
        self.checkpoints.mkdir(exist_ok=True)
        data = save({name: tensor.detach().contiguous() for name, tensor in tensors.items()})
        weights = self.checkpoints / f"step-{step:08d}.safetensors"
        manifest = {
            "format": FORMAT,
            "step": step,
            "file": weights.name,
            "sha256": hashlib.sha256(data).hexdigest(),
            "versions": versions(),
            **facts,
        }
        write_atomically(weights, data)
        write_atomically(weights.with_suffix(".json"), json.dumps(manifest, indent=2).encode())
        for old in sorted(self.checkpoints.glob("step-*.json"))[:-KEPT]:
            old.unlink()
            old.with_suffix(".safetensors").unlink(missing_ok=True)
        return weights

    def load_checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any], list[str]] | None:
        """The newest checkpoint that is whole: tensors, manifest, and the broken ones' names."""
        broken: list[str] = []
        for manifest_file in sorted(self.checkpoints.glob("step-*.json"), reverse=True):
            try:
                manifest = json.loads(manifest_file.read_text())
                weights = self.checkpoints / manifest["file"]
                if hashlib.sha256(weights.read_bytes()).hexdigest() == manifest["sha256"]:
                    return load_file(weights), manifest, broken
            except (OSError, ValueError, KeyError):
                pass
            broken.append(manifest_file.name)
        if broken:
            raise InputError(
                f"{self.checkpoints} holds no whole checkpoint: {', '.join(broken)} do not match"
                " their checksums; start again in another folder."
            )
        return None


def _append(file: Path, line: Mapping[str, Any]) -> None:
    with file.open("a") as out:
        out.write(json.dumps(line) + "\n")


def _lines(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    lines = []
    for text in file.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def versions() -> dict[str, str]:
    """What a result depends on."""
    names = ["hardmix", "torch", "torchvision", "numpy"]
    return {"python": platform.python_version()} | {name: version(name) for name in names}


def to_json(config: Any) -> bytes:
    """A config as readable JSON."""
    return (json.dumps(dataclasses.asdict(config), indent=2) + "\n").encode()


def read_config(file: Path) -> PretrainConfig:
    """A saved config, checked like one from the command line."""
    try:
        values = json.loads(file.read_text())
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise InputError(f"{file} is not JSON: {error}.") from error
    return _build(PretrainConfig, values, str(file))


def _build(kind: type[Config], values: Any, where: str) -> Config:
    """A dataclass from plain values: unknown names and wrong kinds are refused by name."""
    if not isinstance(values, dict):
        raise InputError(f"{where} holds {values!r}: settings by name are needed there.")
    hints = typing.get_type_hints(kind)
    unknown = sorted(set(values) - set(hints))
    if unknown:
        raise InputError(
            f"{where} has an unknown setting {unknown[0]!r}: known are {sorted(hints)}."
        )
    built = {}
    for name, value in values.items():
        hint, place = hints[name], f"{where}: {name}"
        if dataclasses.is_dataclass(hint):
            built[name] = _build(typing.cast("type[Any]", hint), value, place)
        else:
            built[name] = tuple(value) if isinstance(value, list) else value
            if not _fits(built[name], hint):
                raise InputError(f"{place}={value!r} is not of the kind {hint}.")
    return kind(**built)


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return value in arguments
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, arguments[0]) for item in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def write_atomically(file: Path, data: bytes) -> None:
    """Temporary file, fsync, rename, directory fsync: the old file or the new one, never half."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


MAY_CHANGE = {
    ("train", "epochs"),
    ("train", "stop_epoch"),
    ("train", "device"),
    ("train", "log_every"),
    ("train", "knn_every"),
    ("train", "save_every"),
    ("train", "tensorboard"),
    ("data", "workers"),
}
"""Settings that may differ when a run is resumed; any other change would be another run."""


def check_resumable(path: Path, config: PretrainConfig) -> None:
    """Refuse to resume with other settings than the run's, and save those that may change."""
    run = Run.open(path)
    old, new = dataclasses.asdict(run.config()), dataclasses.asdict(config)
    for group, value in old.items():
        names = value if isinstance(value, dict) else {"": value}
        for name in names:
            before = value[name] if name else value
            after = new[group][name] if name else new[group]
            if before != after and (group, name) not in MAY_CHANGE:
                setting = f"{group}.{name}" if name else group
                raise InputError(
                    f"{setting} cannot change from {before} to {after} on --resume: it would be"
                    " another run; leave it out, or start one in another folder."
                )
    write_atomically(run.config_file, to_json(config))


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """SGD's momentum buffers by the number of their parameter."""
    state = optimizer.state_dict()["state"]
    return {
        f"{number}": values["momentum_buffer"]
        for number, values in state.items()
        if values.get("momentum_buffer") is not None
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """The inverse of `optimizer_tensors`.

    Buffers get their parameter's memory format: fused SGD pairs them by place in memory.
    """
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    state = optimizer.state_dict()
    state["state"] = {
        int(number): {"momentum_buffer": torch.empty_like(parameters[int(number)]).copy_(value)}
        for number, value in tensors.items()
    }
    optimizer.load_state_dict(state)
