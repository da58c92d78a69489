"""Configs as options of a command.

A command's options are a dataclass made on the fly, from which tyro makes the parser. The help of
`hardmix pretrain` shows the settings that people change most; `--help-all` shows all. Settings
without effect are omitted from the help but accepted.
"""

import dataclasses
import re
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from hardmix.commands import processes
from hardmix.commands.argv import CommandLine
from hardmix.settings.config import DataConfig, PretrainConfig
from hardmix.settings.facts import docs_of
from hardmix.settings.methods import METHOD_FACTS

Help = tyro.conf.arg
RunFolder = Annotated[tyro.conf.Positional[Path], Help(metavar="RUN", help="Folder of the run.")]
Checkpoint = Annotated[
    str | None,
    Help(help="A checkpoint instead of the encoder: its step (step-00000012) or epoch."),
]
Parsed = TypeVar("Parsed")
Shown = Callable[[str], bool]
"""Tells whether the help shows a setting, given by its dotted name."""

FIRST = (
    "method",
    "minutes",
    "data.root",
    "data.image_size",
    "data.augmentation",
    "data.workers",
    "model.backbone",
    "model.init",
    "train.epochs",
    "train.batch_size",
    "train.queue_size",
    "train.temperature",
    "train.seed",
    "train.precision",
    "train.device",
    "optimizer.lr",
    "optimizer.weight_decay",
    "mix.num_hardest",
    "mix.num_pairs",
    "mix.num_with_query",
    "oracle",
)
"""The settings that people change most; only a recipe that chooses settings has `minutes`."""

NOT_EVALUATED = (
    "data.channels",
    "data.augmentation",
    "data.colour_strength",
    "data.blur",
    "data.min_scale",
    "data.small_crops",
    "data.views",
)
"""Data settings that have no effect after pre-training; the channels are the encoder's."""


def parse(kind: type[Parsed], name: str, line: CommandLine) -> Parsed:
    """Parse a command's options; of several processes, only rank 0 prints what is wrong."""
    from hardmix.runtime.console import shielded

    with shielded(line.words):
        return tyro.cli(
            kind,
            prog=f"hardmix {name}",
            args=["--help" if word == "--help-all" else word for word in line.words],
            console_outputs=processes.speaks(),
        )


def run_settings(
    base: PretrainConfig, line: CommandLine
) -> tuple[list[Any], Callable[[Any], PretrainConfig]]:
    """Return the options of a run with their defaults, and a function back to its config."""
    facts, everything = METHOD_FACTS[base.method], "help_all" in line.options
    own = f"{base.method}."

    def shown(name: str) -> bool:
        if name == "minutes":
            return bool(base.choose)
        of_interest = everything or name in FIRST or name.startswith(own)
        return not line.wants_help or (of_interest and facts.uses(name))

    hints: dict[str, Any] = typing.get_type_hints(PretrainConfig)
    groups: dict[str, Any] = {
        name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)
    }
    if base.options is not None:
        groups["options"] = type(base.options)
    first = [name for name in FIRST if shown(name)]
    fields = [_first(base, name, brief=line.wants_help and not everything) for name in first]
    for group, kind in groups.items():
        title = base.method if group == "options" else group
        fields.append(group_field(title, kind, getattr(base, group), shown, without=FIRST))

    def back(parsed: Any) -> PretrainConfig:
        values: dict[str, Any] = {n: getattr(parsed, n) for n in first if "." not in n}
        if base.choose:
            values["choose"] = tuple(name for name in base.choose if name not in line.options)
        for group, kind in groups.items():
            title = base.method if group == "options" else group
            inside = vars(getattr(parsed, title.replace("-", "_")))
            flat = {n.partition(".")[2]: getattr(parsed, _plain(n)) for n in first if _of(n, group)}
            values[group] = kind(**{**vars(getattr(base, group)), **inside, **flat})
        return dataclasses.replace(base, **values)

    return fields, back


def group_field(
    title: str, kind: type, default: Any, shown: Shown, without: Sequence[str] = ()
) -> tuple[str, Any, Any]:
    """Return a config as a group of options: a dataclass field with help for each option."""
    hints, docs = typing.get_type_hints(kind), docs_of(kind)
    fields = [
        option_field(name, hint, getattr(default, name), docs.get(name, ""))
        for name, hint in hints.items()
        if shown(f"{title}.{name}") and f"{title}.{name}" not in without
    ]
    made = dataclasses.make_dataclass(title, fields, frozen=True, kw_only=True)
    made.__doc__ = (kind.__doc__ or "").split("\n")[0]
    return title.replace("-", "_"), made, dataclasses.field(default_factory=made)


def data_field(default: DataConfig, line: CommandLine) -> tuple[str, Any, Any]:
    """Return --data.* of a command that evaluates; its help omits settings without effect."""

    def shown(name: str) -> bool:
        return name not in NOT_EVALUATED or not line.wants_help

    return group_field("data", DataConfig, default, shown)


def data_of(parsed: Any, default: DataConfig) -> DataConfig:
    """Return the data config parsed from `data_field`."""
    return DataConfig(**{**vars(default), **vars(parsed)})


def make_options(name: str, about: str, fields: Sequence[Any]) -> type[Any]:
    """Return a dataclass of a command's options."""
    made = dataclasses.make_dataclass(name, fields, frozen=True, kw_only=True)
    made.__doc__ = about
    return made


def _first(base: PretrainConfig, name: str, brief: bool) -> tuple[str, Any, Any]:
    """Return one of the settings in `FIRST` as an option; brief: with its first sentence."""
    group, _, setting = name.rpartition(".")
    config = getattr(base, group) if group else base
    kind: type = type(config)
    hint, doc = typing.get_type_hints(kind)[setting], docs_of(kind)[setting]
    if name == "method":
        hint = Literal[tuple(METHOD_FACTS)]
    doc = re.split(r"(?<=\.)\s+(?=[A-Za-z])", doc)[0] if brief else doc
    return option_field(_plain(name), hint, getattr(config, setting), doc, name.replace("_", "-"))


def option_field(
    name: str, hint: Any, default: Any, doc: str, option: str | None = None
) -> tuple[str, Any, Any]:
    """Return a setting as an option; `option` is its name on the command line, if different."""
    annotated = Annotated[hint, Help(help=" ".join(doc.split()), name=option)]
    return name, annotated, dataclasses.field(default=default)


def _plain(name: str) -> str:
    return name.replace(".", "_")


def _of(name: str, group: str) -> bool:
    return name.startswith(f"{group}.")
