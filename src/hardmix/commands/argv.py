"""What must be known of a command line before it is parsed: which defaults it starts from."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

from hardmix.commands.options import wants_help
from hardmix.errors import InputError
from hardmix.settings.bounds import nearest_first
from hardmix.settings.config import DataConfig, PretrainConfig
from hardmix.settings.methods import METHOD_FACTS
from hardmix.settings.recipes import RECIPES

ResumeWord = Literal["no", "yes", "auto"]


def run_config(arguments: Sequence[str]) -> tuple[PretrainConfig, list[str]]:
    """The config whose settings are the defaults (a recipe's, a file's, a run's); and the rest."""
    rest = _with_resume(arguments)
    named = rest.pop(0) if rest and not rest[0].startswith("-") else None
    if named is not None and named not in RECIPES:
        raise InputError(f"there is no recipe {named!r}: choose one of {_known(named, RECIPES)}.")
    if value_of(rest, "--recipe") is not None:
        raise InputError(
            "--recipe is not an option: the recipe is the first word, as in hardmix pretrain"
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
        config = replace(config, data=replace(config.data, name=None))  # recognised by its root
    return config, rest


def data_of_run(arguments: Sequence[str]) -> DataConfig:
    """The run's own images are the default; a root of another kind is recognised by itself."""
    if not arguments or arguments[0].startswith("-"):
        return DataConfig()
    from hardmix.data.datasets import data_name
    from hardmix.runs.folder import Run

    data = Run.open(arguments[0]).config().data
    root = value_of(arguments, "--data.root")
    if root is None:
        return data
    # An ImageNet that has moved: the run's 100 classes of it, not all that are there.
    same = data.name == "imagenet100" and data_name(DataConfig(root=root)) == "imagenet"
    given: dict[str, Any] = {"name": data.name if same else None, "num_images": None}
    return replace(data, **given)


def value_of(arguments: Sequence[str], option: str) -> str | None:
    """An option's value, looked up before the rest is parsed."""
    for index, word in enumerate(arguments):
        if word == option and index + 1 < len(arguments):
            return arguments[index + 1]
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return None


def _saved_config(rest: Sequence[str]) -> PretrainConfig | None:
    """What to begin with: --config's file, or the run to be resumed."""
    saved, out = value_of(rest, "--config"), value_of(rest, "--out")
    resume = value_of(rest, "--resume") or "no"
    if saved is not None:
        from hardmix.settings.saved import read_config

        return read_config(Path(saved))
    if resume == "no" or out is None or wants_help(rest):
        return None
    from hardmix.runs.folder import Run

    run = Run(out)
    return run.config() if run.resumes("auto" if resume == "auto" else True) else None


def _of_recipe(named: str | None, saved: PretrainConfig) -> PretrainConfig:
    """A saved config; a recipe that is named beside it must be the one it began with."""
    if named is not None and named != saved.recipe:
        raise InputError(
            f"the saved run began with the recipe {saved.recipe!r}, not {named!r}: leave the recipe"
            " out, or start another run."
        )
    return saved


def _method(rest: Sequence[str]) -> str:
    method = value_of(rest, "--method") or "mochi"
    if method not in METHOD_FACTS:
        known = _known(method, METHOD_FACTS)
        raise InputError(f"there is no method {method!r}: choose one of {known}.")
    return method


def _with_resume(arguments: Sequence[str]) -> list[str]:
    """`--resume` alone means yes, `--no-resume` no."""
    words = []
    for index, word in enumerate(arguments):
        words += ["--resume", "no"] if word == "--no-resume" else [word]
        if word == "--resume" and arguments[index + 1 : index + 2] not in [
            [choice] for choice in get_args(ResumeWord)
        ]:
            words.append("yes")
    return words


def _known(name: str, known: Any) -> str:
    return ", ".join(nearest_first(name, known))
