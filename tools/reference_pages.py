"""The pages of the site's reference, made from the source while the site is built.

Functions and classes are rendered by mkdocstrings from their docstrings; this module only names
them. Settings and commands are read from the dataclasses that the command line is made of: there is
no second list of options.
"""

import ast
import importlib
import inspect
import re
import sys
import textwrap
from contextlib import suppress
from dataclasses import MISSING, Field, fields, is_dataclass
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints
from unittest.mock import patch

import tyro

import hardmix
from hardmix.commands import main as cli
from hardmix.settings.config import PretrainConfig
from hardmix.settings.evaluations import EVALUATIONS, DetectionConfig, LinearConfig
from hardmix.settings.methods import METHOD_FACTS

OF_A_RUN: dict[str, Any] = {
    name: hint for name, hint in get_type_hints(PretrainConfig).items() if is_dataclass(hint)
}
"""The groups of a run's settings: `data`, `model`, `mix`, `optimizer`, `train`."""

SETTINGS: dict[Any, str] = {
    PretrainConfig: "",
    **{kind: f"--{name}." for name, kind in OF_A_RUN.items()},
    **{facts.options: f"--{name}." for name, facts in METHOD_FACTS.items() if facts.options},
    **dict.fromkeys((evaluation.options for evaluation in EVALUATIONS.values()), "--"),
    LinearConfig: "",
    DetectionConfig: "",
}
"""The configs, each with what its settings begin with on the command line, if they are there."""


def link(text: str, title: str) -> str:
    """Return a link to a heading of the page of settings, by GitHub's rule."""
    anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
    return f"[{text}](settings.md#{anchor})"


def table(titles: list[str], rows: list[list[str]]) -> str:
    """Return a table; a bar inside a cell is escaped, and every cell is one line."""
    lines = [titles, ["---"] * len(titles), *rows]
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def notes(body: list[ast.stmt]) -> dict[str, str]:
    """Return the docstring under each assignment, by the name assigned."""
    return {
        name: inspect.cleandoc(after.value.value)
        for statement, after in pairwise(body)
        if (name := assigned(statement))
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }


def assigned(statement: ast.stmt) -> str | None:
    """Return the name that a statement gives a value or a type, if it does."""
    target = statement.target if isinstance(statement, ast.AnnAssign) else None
    if isinstance(statement, ast.Assign):
        target = statement.targets[0]
    return target.id if isinstance(target, ast.Name) else None


def settings_table(kind: Any, prefix: str) -> str:
    """Return the settings of a dataclass."""
    return table(["setting", "values", "default", "meaning"], settings(kind, prefix))


def settings(kind: Any, prefix: str, defaults: object = MISSING) -> list[list[str]]:
    """Return a line for each setting of a dataclass, with the defaults of an instance, if given."""
    hints = get_type_hints(kind, include_extras=True)
    meaning = meanings(kind)
    lines = []
    for field in fields(kind):
        hint, positional, help_ = taken_apart(hints[field.name])
        value = default_of(field) if defaults is MISSING else getattr(defaults, field.name)
        name = field.name if help_.name is None else help_.name
        if is_group(hint):
            lines.append(group_of_settings(name, prefix, value, set(hints)))
        elif is_dataclass(hint):
            lines += settings(hint, f"{prefix}{name}." if name else prefix, value)
        else:
            option = help_.metavar if positional else option_of(prefix, name, hint)
            text = help_.help or meaning.get(field.name, "")
            flag = prefix and hint is bool
            lines.append([f"`{option}`", "" if flag else values(hint), shown(value), text])
    return lines


def meanings(kind: Any) -> dict[str, str]:
    """Return the docstrings under a class's fields; none for a class made by a command."""
    try:
        source = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    except OSError:
        return {}
    return notes(source.body) if isinstance(source, ast.ClassDef) else {}


def is_group(hint: Any) -> bool:
    """Return whether it is a group of a run's settings, or what `commands.options` made of one."""
    return hint in OF_A_RUN.values() or (is_dataclass(hint) and hint.__name__ in OF_A_RUN)


def taken_apart(hint: Any) -> tuple[Any, bool, Any]:
    """Return a type without annotations, whether it is positional, and `tyro.conf.arg`'s facts."""
    kind, *marks = get_args(hint) if hasattr(hint, "__metadata__") else [hint]
    positional = get_args(tyro.conf.Positional[int])[1] in marks
    said = [mark for mark in marks if hasattr(mark, "metavar")]
    return kind, positional, said[0] if said else tyro.conf.arg()


def option_of(prefix: str, name: str, hint: Any) -> str:
    """Return a setting's name on the command line; without a prefix, in Python."""
    if not prefix:
        return name
    option = name.replace("_", "-")
    return f"{prefix}{option}`, `{prefix}no-{option}" if hint is bool else prefix + option


def group_of_settings(name: str, prefix: str, value: Any, others: set[str]) -> list[str]:
    """One line for a group that has a table of its own: other defaults, and what is not there.

    `others` are the names around the group: it may be there that one of its settings stands.
    """
    kind = OF_A_RUN[name]
    there = {field.name for field in fields(value)}
    other = [
        f"{each} {shown(own)}"
        for each in sorted(there)
        if (own := getattr(value, each)) != getattr(kind(), each)
    ]
    without = [
        f"`{prefix}{name}.{field.name.replace('_', '-')}`"
        for field in fields(kind)
        if field.name not in there and f"{name}_{field.name}" not in others
    ]
    text = inspect.getdoc(kind) or ""
    text += f" Without {', '.join(without)}." if without else ""
    return [link(f"`{prefix}{name}.*`", title_of(kind)), "", ", ".join(other), text]


def title_of(kind: type) -> str:
    """Return a config's heading: by the name that users import, if they do."""
    public = kind.__name__ in hardmix.config.__all__
    return f"class `{'hardmix.config' if public else kind.__module__}.{kind.__name__}`"


def default_of(field: Field[Any]) -> object:
    """Return a field's default, or MISSING."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def shown(value: object) -> str:
    """Return a default as one would type it."""
    words = {MISSING: "required", None: "unset", (): "none"}
    if isinstance(value, tuple) and value:
        return f"`{' '.join(str(part) for part in value)}`"
    return words.get(value) or f"`{value.as_posix() if isinstance(value, Path) else value}`"


def values(hint: Any) -> str:
    """Return the values that a setting may have, in words."""
    parts = [part for part in get_args(hint) if part not in (type(None), ...)]
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(values(part) for part in parts)
    if get_origin(hint) is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if get_origin(hint) is tuple:
        return f"{values(parts[0])}; any number"
    return {bool: "`True`, `False`", str: "text", Path: "path"}.get(hint, hint.__name__)


def config(kind: Any, prefix: str) -> str:
    """Return a config: docstring and settings."""
    text = inspect.getdoc(kind) or ""
    return f"## {title_of(kind)}\n\n{text}\n\n{settings_table(kind, prefix)}"


def options_of(command: str) -> Any:
    """Return the dataclass that a command gives to tyro to be filled."""
    seen: list[Any] = []

    def look(kind: Any, **_: object) -> None:
        seen.append(kind)
        sys.exit()

    with patch.object(tyro, "cli", look), suppress(SystemExit):
        cli.COMMANDS[command](cli.scan_after(command, ["--help-all"]))
    return seen[0]


def command(name: str) -> str:
    """Return a command: what it does and its options."""
    kind = options_of(name)
    if not is_dataclass(kind):
        return f"## hardmix {name}\n\n{cli.COMMANDS[name].__doc__} It has no options."
    return f"## hardmix {name}\n\n{inspect.getdoc(kind)}\n\n{settings_table(kind, '--')}"


MODULES = {
    "hardmix": "The loss, the memory, encoders and runs.",
    "hardmix.losses": "Weights, denominators and filters of negatives, and the logits they read.",
    "hardmix.strategies": "Who is mixed with whom: the paper's strategies, and what came after.",
    "hardmix.explore": "Duplicates, clusters, outliers and neighbours of a set of images.",
    "hardmix.integrations": "The loss as other libraries expect it.",
}
"""The modules that users import from, each with a page; `hardmix.config` is on that of settings."""

FIRST = ("MochiLoss", "MemoryQueue", "pretrain", "Run", "load_encoder", "export", "open_images")
"""Names that a page begins with: what readers look for first."""

ABOUT_SETTINGS = """\
# Settings

Frozen dataclasses, with keywords only. `--data.num-images` on the command line is
`PretrainConfig(data=DataConfig(num_images=...))` in Python. The defaults here are those of the
classes; a [recipe](../recipes.md) changes some, and `hardmix pretrain RECIPE --help-all` shows its
own, with `--method` those of another method, without the settings that it does not use."""

ABOUT_COMMANDS = """\
# Commands

`hardmix COMMAND --help` shows the same in a terminal (`pretrain --help-all`). Commands that take a
RUN look at the run's own images unless `--data.*` names others."""


def pages() -> dict[str, str]:
    """Return the text of every page of the reference, by its path inside docs/."""
    settings = [config(kind, prefix) for kind, prefix in SETTINGS.items()]
    commands = [command(name) for name in cli.COMMANDS]
    return {
        **{f"reference/{name}.md": module_page(name) for name in MODULES},
        "reference/settings.md": "\n\n".join([ABOUT_SETTINGS, *settings]) + "\n",
        "reference/commands.md": "\n\n".join([ABOUT_COMMANDS, *commands]) + "\n",
    }


def module_page(module: str) -> str:
    """Return a page that names what a module exports; mkdocstrings fills it in."""
    names = importlib.import_module(module).__all__
    ordered = [name for name in FIRST if name in names]
    ordered += [name for name in names if name not in FIRST]
    entries = [entry(f"{module}.{name}") for name in ordered]
    return "\n\n".join([f"# {module}", MODULES[module], *filter(None, entries)]) + "\n"


def entry(name: str) -> str:
    """Return the place of one public name; a module of the package has a page of its own."""
    thing = attrgetter(name.removeprefix("hardmix."))(hardmix)
    if inspect.ismodule(thing) and not thing.__name__.endswith("recipes"):
        return ""
    return f"::: {name}"
