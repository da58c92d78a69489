"""Settings in a file: read with checks, and compared with those a resumed run is given."""

import dataclasses
import json
import types
import typing
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, TypeVar

from hardmix.errors import InputError
from hardmix.settings.config import PretrainConfig
from hardmix.settings.facts import SettingFacts, facts_of
from hardmix.settings.methods import METHOD_FACTS

Config = TypeVar("Config")

FACTS: dict[str, SettingFacts] = {
    name: facts for name, facts in facts_of(PretrainConfig).items() if name != "options"
}
"""Of every shared setting of a run, by its dotted name; `own_facts` has those of a method."""

MAY_CHANGE = frozenset(name for name, facts in FACTS.items() if facts.resume)
"""Settings that may differ when a run is resumed. A folder may move: its images are compared."""

MUST_MATCH = FACTS.keys() - MAY_CHANGE
"""Settings that may not: with others it would be another run."""

MAY_DIFFER = frozenset(name for name, facts in FACTS.items() if not facts.identity)
"""Settings that change nothing in what is trained: runs that differ in them alone are compared."""

LABELS = {name: facts.label for name, facts in FACTS.items() if facts.label}
"""How tables and figures tell two runs apart, in the order in which it is written."""


def own_facts(method: object) -> dict[str, SettingFacts]:
    """Of the settings that only this method has, by their dotted names ("NAME.setting")."""
    known = METHOD_FACTS.get(method) if isinstance(method, str) else None
    if known is None or known.options is None:
        return {}
    return {f"{method}.{name}": facts for name, facts in facts_of(known.options).items()}


def to_json(config: Any) -> bytes:
    """A config as readable JSON."""
    return (json.dumps(dataclasses.asdict(config), indent=2) + "\n").encode()


def read_config(file: Path) -> PretrainConfig:
    """A saved config, checked like one from the command line."""
    try:
        values = read_json(file)
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise InputError(f"{file} is not JSON: {error}.") from error
    return build_config(values, str(file))


def read_json(file: Path) -> Any:
    """Any JSON file; OSError or ValueError where it is none (nested too deeply counts as none)."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def build_config(values: Any, where: str) -> PretrainConfig:
    """A config from what its file holds; `where` is what an error calls the place."""
    return _build(PretrainConfig, values, where)


def _options(values: Any, method: Any, where: str) -> Any:
    """A method's own settings; None where it has none, or nothing was said of them."""
    facts = METHOD_FACTS.get(method) if isinstance(method, str) else None
    if values is None or facts is None or facts.options is None:
        return values
    return _build(facts.options, values, where)


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
        if kind is PretrainConfig and name == "options":
            built[name] = _options(value, values.get("method"), place)
        elif dataclasses.is_dataclass(hint):
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
    return flatten(dataclasses.asdict(config))


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """A saved config's settings by their dotted names; a method's own are "NAME.setting"."""
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
    """As `flatten`; settings that are younger than the file have their defaults."""
    found = flatten(config)
    return found | {name: LATER[name] for name in LATER.keys() - found.keys()} if found else {}


LATER: dict[str, Any] = {
    name: list(value) if isinstance(value, tuple) else value  # as JSON has it
    for name, value in settings(PretrainConfig()).items()
    if name in FACTS and FACTS[name].later
}
"""Settings that runs of older versions do not record, with what they did."""


def check_same_run(old: PretrainConfig, new: PretrainConfig, fixed: Set[str] | None = None) -> None:
    """Refuse to resume with other settings than the run's, but for those that may change.

    `fixed` are those that may not; unset: all but `MAY_CHANGE`.
    """
    before, after = settings(old), settings(new)
    facts = FACTS | own_facts(old.method)
    for name, value in before.items():
        free = facts[name].resume if fixed is None else name not in fixed
        if value != after[name] and not free:
            raise InputError(
                f"{name} cannot change from {value} to {after[name]} on --resume: it would be"
                " another run; leave it out, or start one in another folder."
            )
