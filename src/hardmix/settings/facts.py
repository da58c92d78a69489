"""Facts about each setting, stated once, and checks against its limits.

    queue_size: int = setting(16384, label="K = {}", name="queue")

Facts tell whether a setting may change on resume, whether another value makes another run, what
tables, figures and sentences call it, and whether it was added after the first version. Every list
of settings is derived from them. Errors name a setting by its dotted name.
"""

import ast
import dataclasses
import difflib
import inspect
import math
import typing
from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

from hardmix.errors import InputError


class SettingFacts(NamedTuple):
    """Facts about a setting in addition to its type, default and docstring."""

    resume: bool = False
    """Whether it may differ when a run is resumed."""
    identity: bool = True
    """Whether another value makes another run, or only affects how the run is executed."""
    label: str = ""
    """How tables and figures label a run by it, e.g. "K = {}"; empty: not at all."""
    name: str = ""
    """The name that sentences use; empty: the setting's name with spaces."""
    later: bool = False
    """Whether it was added after the first version; runs that lack it used its default."""
    code: bool = False
    """Whether it may name the user's own code, "mypackage:function"."""


def setting(default: Any, **facts: Any) -> Any:
    """Return a dataclass field with facts; a setting without facts can be a plain default."""
    return dataclasses.field(default=default, metadata={"facts": SettingFacts(**facts)})


@cache
def docs_of(kind: type) -> dict[str, str]:
    """Return the docstring under each setting of a config, read from its source."""
    (body,) = (node.body for node in ast.parse(inspect.getsource(kind)).body if _is_class(node))
    inherited = [docs_of(base) for base in kind.__bases__ if dataclasses.is_dataclass(base)]
    return {name: text for docs in inherited for name, text in docs.items()} | {
        statement.target.id: inspect.cleandoc(after.value.value)
        for statement, after in pairwise(body)
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(after.value.value, str)
    }


def _is_class(node: ast.stmt) -> typing.TypeGuard[ast.ClassDef]:
    return isinstance(node, ast.ClassDef)


def facts_of(kind: type) -> dict[str, SettingFacts]:
    """Return the facts of every setting of a config, by dotted name ("train.epochs")."""
    hints = typing.get_type_hints(kind)
    by_name: dict[str, SettingFacts] = {}
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            inside = facts_of(typing.cast("type", hint))
            by_name |= {f"{field.name}.{name}": facts for name, facts in inside.items()}
            continue
        facts = field.metadata.get("facts", SettingFacts())
        by_name[field.name] = facts._replace(name=facts.name or field.name.replace("_", " "))
    return by_name


LARGEST, LARGEST_FLOAT = 2**63 - 1, 1e30
"""Largest integer setting (int64) and largest float, with which float32 arithmetic still works."""


def check_above(config: object, prefix: str, **limits: float) -> None:
    """Raise InputError if a setting is not above its limit; None passes."""
    for name, limit in limits.items():
        value = getattr(config, name)
        if value is not None and not (_is_usable(value) and value > limit):
            raise InputError(
                f"{prefix}.{name}={shown(value)} must be a finite number above {limit}"
                f"{_upper_limit(value)}."
            )


def check_at_least(config: object, prefix: str, **limits: int) -> None:
    """Raise InputError if a setting is below its limit; None passes."""
    for name, limit in limits.items():
        value = getattr(config, name)
        if value is None or (_is_usable(value) and value >= limit):
            continue
        finite = "" if isinstance(value, int) or math.isfinite(value) else "finite and "
        raise InputError(
            f"{prefix}.{name}={shown(value)} must be {finite}at least {limit}{_upper_limit(value)}."
        )


def check_between(config: object, prefix: str, low: float, high: float, *names: str) -> None:
    """Raise InputError if a setting is outside [low, high]; None passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not low <= value <= high:
            raise InputError(f"{prefix}.{name}={shown(value)} must be between {low} and {high}.")


def check_choices(config: Any, prefix: str) -> None:
    """Raise InputError if a setting has none of the names that its type lists; None passes.

    A setting whose type also admits `str` may name the user's own code, "mypackage:function".
    """
    for name, (known, own) in choices_of(config.__class__).items():
        value = getattr(config, name)
        more = ", or your own function, 'mypackage:function'" if own else ""
        for each in value if isinstance(value, tuple) else (value,):
            if each is not None and not (own and ":" in str(each)):
                check_choice(f"{prefix}.{name}", each, known, more)


@cache
def choices_of(kind: type) -> dict[str, tuple[tuple[str, ...], bool]]:
    """Return the names that each setting may have, and whether it may also name code."""
    hints = typing.get_type_hints(kind).items()
    return {
        name: (names, str in typing.get_args(hint))
        for name, hint in hints
        if (names := names_of(hint))
    }


def names_of(hint: Any) -> tuple[str, ...]:
    """Return the names that a type lists, as Literal["a", "b"] does; none if it lists none."""
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    return tuple(name for part in typing.get_args(hint) for name in names_of(part))


def check_choice(name: str, value: Any, choices: Iterable[str], more: str = "") -> None:
    """Refuse a name that is not among the choices; the error lists the closest ones first."""
    known = list(choices)
    if value not in known:
        nearest = ", ".join(nearest_first(str(value), known))
        raise InputError(f"{name}={value!r} is unknown: choose one of {nearest}{more}.")


def shown(value: Any) -> str:
    """Return a value as messages print it: an integer of many digits as a power of ten."""
    if isinstance(value, int) and abs(value) > 10**30:
        return f"{'-' * (value < 0)}1e{int(math.log10(abs(value)))}"
    return str(value)


def nearest_first(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names, those most similar to `name` first."""
    names = list(known)
    return difflib.get_close_matches(name, names, n=len(names), cutoff=0.0)


def _is_usable(value: float) -> bool:
    return value <= (LARGEST if isinstance(value, int) else LARGEST_FLOAT)  # False for NaN


def _upper_limit(value: float) -> str:
    """Return the upper limit in words if a number exceeds it."""
    if isinstance(value, int):
        return " and below 2^63" if value > LARGEST else ""
    return " and at most 1e30" if LARGEST_FLOAT < value < math.inf else ""
