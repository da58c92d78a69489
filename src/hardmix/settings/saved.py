"""Settings saved to a file: read with checks, and compared when a run is resumed."""

import dataclasses
import json
import types
import typing
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, TypeVar

from hardmix.errors import InputError
from hardmix.settings.bounded_files import MOST_JSON, read_file
from hardmix.settings.config import PretrainConfig
from hardmix.settings.facts import SettingFacts, facts_of
from hardmix.settings.methods import METHOD_FACTS

Config = TypeVar("Config")

FACTS: dict[str, SettingFacts] = {
    name: facts for name, facts in facts_of(PretrainConfig).items() if name != "options"
}
"""Facts about every shared setting, by dotted name; `own_facts` has those of a method."""

MAY_CHANGE = frozenset(name for name, facts in FACTS.items() if facts.resume)
"""Settings that may differ when a run is resumed. A folder may move: the images are compared."""

MUST_MATCH = FACTS.keys() - MAY_CHANGE
"""Settings that may not differ when a run is resumed: it would be another run."""

MAY_DIFFER = frozenset(name for name, facts in FACTS.items() if not facts.identity)
"""Settings that do not affect what is trained: runs that differ only in these are comparable."""

LABELS = {name: facts.label for name, facts in FACTS.items() if facts.label}
"""How tables and figures label runs by a setting, in this order."""


def own_facts(method: object) -> dict[str, SettingFacts]:
    """Return the facts about a method's own settings, by dotted name ("NAME.setting")."""
    known = METHOD_FACTS.get(method) if isinstance(method, str) else None
    if known is None or known.options is None:
        return {}
    return {f"{method}.{name}": facts for name, facts in facts_of(known.options).items()}


def to_json(config: Any) -> bytes:
    """Return a config as indented JSON."""
    return (json.dumps(dataclasses.asdict(config), indent=2) + "\n").encode()


def read_config(file: Path) -> PretrainConfig:
    """Read a saved config and check it like one from the command line."""
    try:
        values = read_json(file)
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise InputError(f"{file} is not JSON: {error}.") from error
    return build_config(values, str(file))


def read_json(file: Path) -> Any:
    """Read a JSON file in UTF-8; raises OSError or ValueError, also if it is nested too deeply."""
    try:
        return json.loads(read_file(file, MOST_JSON).decode("utf-8"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def build_config(values: Any, where: str) -> PretrainConfig:
    """Build a config from the contents of its file; errors refer to it as `where`."""
    return _build(PretrainConfig, values, where)


def _options(values: Any, method: Any, where: str) -> Any:
    """Build a method's own settings; None if it has none or none are saved."""
    facts = METHOD_FACTS.get(method) if isinstance(method, str) else None
    if values is None or facts is None or facts.options is None:
        return values
    return _build(facts.options, values, where)


def _build(kind: type[Config], values: Any, where: str) -> Config:
    """Build a dataclass from plain values; unknown names and wrong types raise InputError."""
    if not isinstance(values, dict):
        raise InputError(f"{where} is {values!r}, but must be an object of settings by name.")
    hints = typing.get_type_hints(kind)
    unknown = sorted(set(values) - set(hints))
    if unknown:
        raise InputError(
            f"{where} has an unknown setting {unknown[0]!r}: the known ones are {sorted(hints)}."
        )
    built = {}
    for name, value in values.items():
        hint, place = hints[name], f"{where}: {name}"
        if kind is PretrainConfig and name == "options":
            built[name] = _options(value, values.get("method"), place)
        elif dataclasses.is_dataclass(hint):
            built[name] = _build(typing.cast("type[Any]", hint), value, place)
        else:
            built[name] = tuple(value) if isinstance(value, list) else value
            if not _fits(built[name], hint):
                raise InputError(f"{place}={value!r} must be of type {hint}.")
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
    """Return every setting of a config by its dotted name, such as "train.epochs"."""
    return flatten(dataclasses.asdict(config))


def with_settings(config: PretrainConfig, changes: Mapping[str, Any]) -> PretrainConfig:
    """Return the config with settings changed, by dotted name; a method's own by its name."""
    groups: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        group, _, setting = name.partition(".")
        group = "options" if group == config.method else group
        groups.setdefault(group, {})[setting] = value
    return dataclasses.replace(
        config,
        **{
            group: dataclasses.replace(getattr(config, group), **new)
            for group, new in groups.items()
        },
    )


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved config's settings by dotted name; a method's own are "NAME.setting"."""
    found: dict[str, Any] = {}
    for group, value in config.items():
        if group == "options":
            group, value = str(config.get("method")), value or {}
        if isinstance(value, dict):
            found |= {f"{group}.{name}": each for name, each in value.items()}
        else:
            found[group] = value
    return found


def recorded(config: Mapping[str, Any]) -> dict[str, Any]:
    """Like `flatten`, with defaults for settings that are newer than the file."""
    found = flatten(config)
    return found | {name: LATER[name] for name in LATER.keys() - found.keys()} if found else {}


LATER: dict[str, Any] = {
    name: list(value) if isinstance(value, tuple) else value  # as JSON has it
    for name, value in settings(PretrainConfig()).items()
    if name in FACTS and FACTS[name].later
}
"""Settings that runs of older versions do not record, with the values those runs used."""


def check_same_run(old: PretrainConfig, new: PretrainConfig, fixed: Set[str] | None = None) -> None:
    """Raise InputError if a resumed run is given settings that must not change.

    `fixed` names those that must not; None means all except `MAY_CHANGE`.
    """
    before, after = settings(old), settings(new)
    facts = FACTS | own_facts(old.method)
    for name, value in before.items():
        free = facts[name].resume if fixed is None else name not in fixed
        if value != after[name] and not free:
            raise InputError(
                f"{name} cannot change from {value} to {after[name]} when a run is resumed: omit"
                " it, or start a new run in another folder."
            )
