"""What must be read from a command line before it is parsed: which defaults to start from."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from hardmix.commands.options import given_settings, wants_help
from hardmix.errors import InputError
from hardmix.runtime.own_code import is_own
from hardmix.settings.config import DataConfig, PretrainConfig
from hardmix.settings.facts import nearest_first
from hardmix.settings.methods import METHOD_FACTS
from hardmix.settings.recipes import RECIPES
from hardmix.settings.saved import absolute_root, is_command

ALLOW = "--allow-code"
CODE_OPTIONS = ("--model.backbone", "--backbone", "--data.views")
"""Options by which a command line names code, besides --allow-code."""

ResumeWord = Literal["no", "yes", "auto"]


def run_config(arguments: Sequence[str]) -> tuple[PretrainConfig, list[str]]:
    """Return the config that holds the defaults (a recipe's, file's or run's) and the rest."""
    rest = with_value(arguments, "resume", ("yes", "no", "auto"))
    named = rest.pop(0) if rest and not rest[0].startswith("-") else None
    if named is not None and named not in RECIPES:
        raise InputError(f"there is no recipe {named!r}: choose one of {_known(named, RECIPES)}.")
    if value_of(rest, "--recipe") is not None:
        raise InputError(
            "--recipe is not an option: the recipe is the first argument, as in hardmix pretrain"
            f" {named or 'demo'} --out RUN."
        )
    saved = _saved_config(rest)
    if saved is not None:
        return _of_recipe(named, saved), rest
    if named is None:
        if wants_help(rest):
            return PretrainConfig(method=_method(rest)), rest
        raise InputError(f"pretrain needs a recipe: choose one of {_known('', RECIPES)}.")
    config = RECIPES[named].build(_method(rest), "--oracle" in rest)
    if config.data.name == "shapes" and value_of(rest, "--data.root") is not None:
        config = replace(config, data=replace(config.data, name=None))  # recognised from its root
    return config, rest


def data_of_run(arguments: Sequence[str]) -> DataConfig:
    """Return the run's data config as defaults; the kind of another root is recognised."""
    if not arguments or arguments[0].startswith("-"):
        return DataConfig()
    from hardmix.data.sources import data_name
    from hardmix.runs.folder import Run

    data = Run.open(arguments[0]).config().data
    root = value_of(arguments, "--data.root")
    if root is None:
        return data
    # ImageNet in another place: still only the run's 100 classes.
    same = data.name == "imagenet100" and data_name(DataConfig(root=root)) == "imagenet"
    given: dict[str, Any] = {"name": data.name if same else None, "num_images": None}
    return replace(data, **given)


def named_code(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments without --allow-code, and the code and commands that they name.

    A folder of images whose name looks like that of a function allows no function.
    """
    if list(arguments[-1:]) == [ALLOW]:
        raise InputError(f"{ALLOW} needs a name, as in {ALLOW} mypackage:make_net.")
    names = _values_of(arguments, ALLOW)
    names += [
        name for option in CODE_OPTIONS for name in _values_of(arguments, option) if is_own(name)
    ]
    for root in _values_of(arguments, "--data.root"):
        if is_command(root) and not is_own(root):
            names += [root, absolute_root(root) or root]
    pairs = zip(["", *arguments], arguments, strict=False)
    rest = [
        word
        for before, word in pairs
        if ALLOW not in (before, word) and not word.startswith(f"{ALLOW}=")
    ]
    return rest, names


def value_of(arguments: Sequence[str], option: str) -> str | None:
    """Return an option's value before the rest is parsed; None if it is not given."""
    return next(iter(_values_of(arguments, option)), None)


def _values_of(arguments: Sequence[str], option: str) -> list[str]:
    """Return the values of an option, as often as it is given."""
    following = pairwise(arguments)
    joined = [each.partition("=")[2] for each in arguments if each.startswith(f"{option}=")]
    return [value for word, value in following if word == option] + joined


def _saved_config(rest: Sequence[str]) -> PretrainConfig | None:
    """Return the config to start from: --config's file, or that of the run to resume."""
    saved, out = value_of(rest, "--config"), value_of(rest, "--out")
    resume = value_of(rest, "--resume") or "no"
    if saved is not None:
        from hardmix.runs.folder import read_config

        return read_config(Path(saved))
    if resume == "no" or out is None or wants_help(rest):
        return None
    from hardmix.runs.folder import Run

    run = Run(out)
    if not run.resumes("auto" if resume == "auto" else True):
        return None
    config, given = run.config(), given_settings(rest)
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


def _method(rest: Sequence[str]) -> str:
    method = value_of(rest, "--method") or "mochi"
    if method not in METHOD_FACTS:
        known = _known(method, METHOD_FACTS)
        raise InputError(f"there is no method {method!r}: choose one of {known}.")
    return method


def with_value(arguments: Sequence[str], name: str, choices: Sequence[str]) -> list[str]:
    """Return the arguments with `--NAME` alone as the first choice, `--no-NAME` as the second."""
    words = []
    for index, word in enumerate(arguments):
        words += [f"--{name}", choices[1]] if word == f"--no-{name}" else [word]
        following = arguments[index + 1 : index + 2]
        if word == f"--{name}" and not (following and following[0] in choices):
            words.append(choices[0])
    return words


def _known(name: str, known: Any) -> str:
    return ", ".join(nearest_first(name, known))
