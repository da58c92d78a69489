"""Settings in a file: read with checks, and compared with those a resumed run is given."""

import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from hardmix.errors import InputError
from hardmix.settings.config import PretrainConfig

Config = TypeVar("Config")

MAY_CHANGE = {
    "train.epochs",
    "train.stop_epoch",
    "train.device",
    "train.log_every",
    "train.knn_every",
    "train.save_every",
    "train.save_minutes",
    "train.keep_every",
    "train.on_nan",
    "train.timeout",
    "train.tensorboard",
    "train.profile",
    "data.root",
    "data.workers",
    "data.max_unreadable",
}
"""Settings that may differ when a run is resumed. A folder may move: its images are compared."""

MUST_MATCH = {
    "recipe",
    "method",
    "oracle",
    "data.name",
    "data.num_images",
    "data.image_size",
    "data.channels",
    "data.augmentation",
    "data.blur",
    "data.min_scale",
    "data.max_pixels",
    "model.backbone",
    "model.head",
    "model.dim",
    "model.key_momentum",
    "model.key_bn_splits",
    "mix.num_hardest",
    "mix.num_pairs",
    "mix.num_with_query",
    "mix.warm_up_epochs",
    "mix.warm_up_steps",
    "mix.strategy",
    "mix.real_negatives",
    "mix.through_query",
    "mix.sampling_temperature",
    "mix.percentage",
    "mix.percentage_end",
    "optimizer.lr",
    "optimizer.momentum",
    "optimizer.weight_decay",
    "optimizer.schedule",
    "optimizer.milestones",
    "train.batch_size",
    "train.accumulate",
    "train.queue_size",
    "train.queue_start",
    "train.exclude_same_image",
    "train.temperature",
    "train.seed",
    "train.precision",
}
"""Settings that make a run what it is: with others it would be another one."""


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


def settings(config: PretrainConfig) -> dict[str, Any]:
    """Every setting by its name on the command line: "train.epochs" and so on."""
    found: dict[str, Any] = {}
    for group, value in dataclasses.asdict(config).items():
        names = value if isinstance(value, dict) else {"": value}
        found |= {f"{group}.{name}".rstrip("."): each for name, each in names.items()}
    return found


def check_same_run(old: PretrainConfig, new: PretrainConfig) -> None:
    """Refuse to resume with other settings than the run's, but for those that may change."""
    before, after = settings(old), settings(new)
    for name, value in before.items():
        if value != after[name] and name not in MAY_CHANGE:
            raise InputError(
                f"{name} cannot change from {value} to {after[name]} on --resume: it would be"
                " another run; leave it out, or start one in another folder."
            )
