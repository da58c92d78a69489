"""Settings as they are saved: read with checks, compared on resume, with paths made absolute."""

import dataclasses
import json
import os
import re
import types
import typing
from collections.abc import Mapping, Set
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from hardmix.errors import InputError
from hardmix.settings.config import PretrainConfig
from hardmix.settings.facts import SettingFacts, check_choice, facts_of, names_of
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

CODE = tuple(name for name, facts in FACTS.items() if facts.code)
"""Settings that may name the user's own code."""

LABELS = {name: facts.label for name, facts in FACTS.items() if facts.label}
"""The labels of runs by setting, in the order in which tables and figures show them."""


def own_facts(method: object) -> dict[str, SettingFacts]:
    """Return the facts about a method's own settings, by dotted name ("NAME.setting")."""
    facts = METHOD_FACTS.get(method) if isinstance(method, str) else None
    own = {} if facts is None or facts.options is None else facts_of(facts.options)
    return {f"{method}.{name}": setting for name, setting in own.items()}


def to_json(config: Any) -> bytes:
    """Return a config as indented JSON."""
    return (json.dumps(dataclasses.asdict(config), indent=2) + "\n").encode()


def build_config(values: Any, where: str) -> PretrainConfig:
    """Build a config from the contents of its file; errors refer to it as `where`."""
    return _build(PretrainConfig, values, where)


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
            facts = METHOD_FACTS.get(str(values.get("method")))
            own = None if facts is None else facts.options
            built[name] = value if value is None or own is None else _build(own, value, place)
        elif dataclasses.is_dataclass(hint):
            built[name] = _build(typing.cast("type[Any]", hint), value, place)
        else:
            built[name] = tuple(value) if isinstance(value, list) else value
            if not _fits(built[name], hint):
                if names_of(hint):
                    check_choice(place, value, names_of(hint))
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
    flat: dict[str, Any] = {}
    for group, value in config.items():
        if group == "options":
            group, value = str(config.get("method")), value or {}
        if isinstance(value, dict):
            flat |= {f"{group}.{name}": part for name, part in value.items()}
        else:
            flat[group] = value
    return flat


def recorded(config: Mapping[str, Any]) -> dict[str, Any]:
    """Like `flatten`, with defaults for settings that are newer than the file."""
    flat = flatten(config)
    return flat | {k: value for k, value in LATER.items() if k not in flat} if flat else {}


LATER: dict[str, Any] = {
    name: list(value) if isinstance(value, tuple) else value  # as JSON has it
    for name, value in settings(PretrainConfig()).items()
    if name in FACTS and FACTS[name].later
}
"""Settings that older versions do not record, with the values that their runs used."""


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


_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
"""Start of a URL or of a command ("pipe:")."""
_HUB = "hf:"


def absolute_root(root: str | None) -> str | None:
    """Return `data.root` as an absolute path: of a folder, a file, or a pattern of shards.

    URLs, commands, names on a hub and patterns that begin with a choice are left unchanged.
    """
    if root is None or "::" in root:
        return root and "::".join(absolute_root(part) or part for part in root.split("::"))
    if root.startswith(_HUB):
        folder = os.path.expanduser(root.removeprefix(_HUB))
        return f"{_HUB}{_absolute(folder)}" if os.path.isdir(folder) else root
    if root.startswith(("{", "$")) or (_ADDRESS.match(root) and not os.path.exists(root)):
        return root
    return _absolute(os.path.expanduser(root))


def is_command(root: str) -> bool:
    """Return whether reading these images may start a command: that of a pipe, or curl for a URL.

    Braces and variables can hide how either begins, so every colon and every dollar sign counts.
    """
    return any(sign in part for part in root.split("::") for sign in ":$")


def root_near(root: str | None, run: Path) -> str | None:
    """Return an older run's relative `data.root`, looked for from here and above the run."""
    whole = absolute_root(root)
    if root is None or whole is None or whole == root or _exists(whole):
        return whole
    above = run.resolve().parents[:-1]  # without "/": "data" is unlikely to mean /data
    near = (str(folder / root) for folder in above)
    return next(filter(_exists, near), root)


def _absolute(path: str) -> str:
    with suppress(OSError):  # the current folder may have been deleted
        return str(Path(path).absolute())
    return path


def _exists(path: str) -> bool:
    """Return whether a path exists; for a pattern, whether the folder of its files does."""
    fixed, brace, _ = path.partition("{")
    return os.path.isdir(os.path.dirname(fixed)) if brace else os.path.exists(path)
