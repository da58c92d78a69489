"""Facts about each setting, stated once: every list of settings is derived from them.

    queue_size: int = setting(16384, label="K = {}", name="queue")

They tell whether a setting may change on resume, whether another value makes another run, what
tables, figures and sentences call it, and whether it was added after the first version.
"""

import ast
import dataclasses
import inspect
import typing
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple


class SettingFacts(NamedTuple):
    """Facts about a setting in addition to its type, default and docstring."""

    resume: bool = False
    """Whether it may differ when a run is resumed."""
    identity: bool = True
    """Whether another value makes another run; if not, it only affects how the run is executed."""
    label: str = ""
    """How tables and figures label a run by it, e.g. "K = {}"; empty: not at all."""
    name: str = ""
    """What a sentence calls it; empty: the setting's name with spaces."""
    later: bool = False
    """Whether it was added after the first version; runs that lack it used its default."""


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
    found: dict[str, SettingFacts] = {}
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            inside = facts_of(typing.cast("type", hint))
            found |= {f"{field.name}.{name}": facts for name, facts in inside.items()}
            continue
        facts = field.metadata.get("facts", SettingFacts())
        found[field.name] = facts._replace(name=facts.name or field.name.replace("_", " "))
    return found
