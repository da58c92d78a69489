"""A setting says what it is, once: every list of settings is derived from these facts.

    queue_size: int = setting(16384, label="K = {}", name="queue")

Whether a setting may change on resume, whether it makes another run, how tables, figures and
sentences call it, and whether there were runs before it.
"""

import ast
import dataclasses
import inspect
import typing
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple


class SettingFacts(NamedTuple):
    """What is known of a setting beside its type, default and docstring."""

    resume: bool = False
    """Whether it may differ when a run is resumed."""
    identity: bool = True
    """Whether another value makes another run; else it only tells how the run is carried out."""
    label: str = ""
    """How a table or figure tells two runs apart by it, e.g. "K = {}"; empty: it does not."""
    name: str = ""
    """What a sentence calls it; empty: its own name with spaces."""
    later: bool = False
    """Whether it came after the first version: runs without it did what its default says."""


def setting(default: Any, **facts: Any) -> Any:
    """A field of a config with facts of its own; without them, a plain default will do."""
    return dataclasses.field(default=default, metadata={"facts": SettingFacts(**facts)})


@cache
def docs_of(kind: type) -> dict[str, str]:
    """The docstring under each setting of a config, as it stands in the source."""
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
    """The facts of every setting of a config, by its dotted name ("train.epochs")."""
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
