"""A command line, scanned once before tyro parses it: the few words that decide the defaults.

tyro's own recipes (a subcommand for each set of defaults) do not serve here: defaults depend on
the recipe, on --method, on a saved config and on the run to resume.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hardmix.errors import InputError
from hardmix.runtime.own_code import is_own
from hardmix.settings.config import DataConfig, PretrainConfig
from hardmix.settings.facts import nearest_first
from hardmix.settings.methods import METHOD_FACTS
from hardmix.settings.recipes import RECIPES, for_backbone
from hardmix.settings.saved import CODE, absolute_root, is_command

ALLOW = "--allow-code"
CODE_OPTIONS = (*CODE, "backbone")
"""Options by which a command line names code, besides --allow-code."""

ResumeWord = Literal["no", "yes", "auto"]


@dataclass(frozen=True)
class CommandLine:
    """The words after the command's name, and the values of each option."""

    words: list[str]
    """The words that tyro parses: all but --allow-code and its values."""
    options: dict[str, list[str]]
    """Values of each option by its dotted name ("data.root"), in the order given."""

    @property
    def first(self) -> str | None:
        """The recipe or run, which is the first word; None if an option comes first."""
        return next((word for word in self.words[:1] if not word.startswith("-")), None)

    @property
    def wants_help(self) -> bool:
        """Whether the command line asks for help."""
        return "-h" in self.words or bool({"help", "help_all"} & self.options.keys())

    def value(self, option: str) -> str | None:
        """Return an option's first value; None if it is not given."""
        return next(iter(self.options.get(option, ())), None)


def scan(words: Sequence[str], **optional: Sequence[str]) -> CommandLine:
    """Scan a command line.

    An option in `optional` may stand alone: `--NAME` then means the first of its values, and
    `--no-NAME` the second.
    """
    kept: list[str] = []
    options: dict[str, list[str]] = {}
    for before, word, after in zip(["", *words], words, [*words[1:], ""], strict=False):
        option, equals, value = word.partition("=")
        name = option.removeprefix("--").replace(".no-", ".").replace("-", "_")
        choices = optional.get(name.removeprefix("no_"), ())
        added = [word]
        if choices and name.startswith("no_"):
            name, value = name.removeprefix("no_"), choices[1]
            added = [f"--{name}", value]
        elif choices and not equals and after not in choices:
            value = choices[0]
            added = [word, value]
        elif not equals:
            value = after
        if option.startswith("--"):
            options.setdefault(name, []).append(value)
        if ALLOW not in (before, option):
            kept += added
    return CommandLine(kept, options)


def run_config(line: CommandLine) -> tuple[PretrainConfig, CommandLine]:
    """Return the config that holds the defaults (a recipe's, file's or run's) and the options."""
    named = line.first
    rest = line if named is None else replace(line, words=line.words[1:])
    if named is not None and named not in RECIPES:
        raise InputError(f"there is no recipe {named!r}: choose one of {_known(named, RECIPES)}.")
    if "recipe" in line.options:
        raise InputError(
            "--recipe is not an option: the recipe is the first argument, as in hardmix pretrain"
            f" {named or 'demo'} --out RUN."
        )
    saved = _saved_config(line)
    if saved is not None:
        return _of_recipe(named, saved), rest
    if named is None:
        if line.wants_help:
            return PretrainConfig(method=_method(line)), rest
        raise InputError(f"pretrain needs a recipe: choose one of {_known('', RECIPES)}.")
    config = RECIPES[named].build(_method(line), "oracle" in line.options)
    backbone = line.value("model.backbone")
    if backbone is not None:
        config = for_backbone(config, backbone)
    if config.data.name == "shapes" and "data.root" in line.options:
        config = replace(config, data=replace(config.data, name=None))  # recognised from its root
    return config, rest


def data_of_run(line: CommandLine) -> DataConfig:
    """Return the run's data config as defaults; the kind of another root is recognised."""
    if line.first is None:
        return DataConfig()
    from hardmix.data.sources import data_name
    from hardmix.runs.folder import Run

    data = Run.open(line.first).config().data
    root = line.value("data.root")
    if root is None:
        return data
    # ImageNet in another place: still only the run's 100 classes.
    same = data.name == "imagenet100" and data_name(DataConfig(root=root)) == "imagenet"
    given: dict[str, Any] = {"name": data.name if same else None, "num_images": None}
    return replace(data, **given)


def named_code(line: CommandLine) -> list[str]:
    """Return the code and commands that a command line names.

    A folder of images whose name looks like that of a function allows no function.
    """
    names = list(line.options.get("allow_code", ()))
    if "" in names:
        raise InputError(f"{ALLOW} needs a name, as in {ALLOW} mypackage:make_net.")
    for option in CODE_OPTIONS:
        names += [name for name in line.options.get(option, ()) if is_own(name)]
    for root in line.options.get("data.root", ()):
        if is_command(root) and not is_own(root):
            names += [root, absolute_root(root) or root]
    return names


def _saved_config(line: CommandLine) -> PretrainConfig | None:
    """Return the config to start from: --config's file, or that of the run to resume."""
    saved, out = line.value("config"), line.value("out")
    resume = line.value("resume") or "no"
    if saved is not None:
        from hardmix.runs.folder import read_config

        return read_config(Path(saved))
    if resume == "no" or out is None or line.wants_help:
        return None
    from hardmix.runs.folder import Run

    run = Run(out)
    if not run.resumes("auto" if resume == "auto" else True):
        return None
    config, given = run.config(), line.options
    if "train.epochs" in given and "train.stop_epoch" not in given:  # what stopped it is lifted
        config = replace(config, train=replace(config.train, stop_epoch=None))
    return config


def _of_recipe(named: str | None, saved: PretrainConfig) -> PretrainConfig:
    """Return the saved config; a recipe named with it must be the one it started from."""
    if named is not None and named != saved.recipe:
        raise InputError(
            f"the saved run started from the recipe {saved.recipe!r}, not {named!r}: omit the"
            " recipe, or start another run."
        )
    return saved


def _method(line: CommandLine) -> str:
    method = line.value("method") or "mochi"
    if method not in METHOD_FACTS:
        known = _known(method, METHOD_FACTS)
        raise InputError(f"there is no method {method!r}: choose one of {known}.")
    return method


def _known(name: str, known: Any) -> str:
    return ", ".join(nearest_first(name, known))
