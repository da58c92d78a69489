"""Commands that train, and what they train with: pretrain, demo, recipes, imagenet100."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from hardmix.commands import argv, processes
from hardmix.commands.options import Help, make_options, parse, run_settings
from hardmix.settings.config import DataConfig
from hardmix.settings.recipes import RECIPES

SHAPES = DataConfig(name="shapes", image_size=32, blur=False)


def pretrain(arguments: list[str]) -> None:
    """Train an encoder on images without labels."""
    base, rest = argv.run_config(arguments)
    fields, back = run_settings(base, rest)
    own = [
        ("out", Annotated[Path, Help(help="the run's folder")]),
        (
            "resume",
            Annotated[argv.ResumeWord, Help(help="go on with the run; auto: start or go on")],
            field(default="no"),
        ),
        (
            "allow_changed_data",
            Annotated[bool, Help(help="resume though images changed")],
            field(default=False),
        ),
        (
            "config",
            Annotated[Path | None, Help(help="run a saved config.json again")],
            field(default=None),
        ),
    ]
    about = """Train an encoder: hardmix pretrain RECIPE --out RUN [settings].

    RECIPE is one of those that `hardmix recipes` shows. Defaults below are those of the recipe and
    method you name.
    """
    options = parse(make_options("Pretrain", about, own + fields), "pretrain RECIPE", rest)
    config = back(options)
    with processes.all_processes(config.train.device, config.train.timeout):
        from hardmix.training.pretrain import pretrain as run

        run(
            config,
            options.out,
            resume="auto" if options.resume == "auto" else options.resume == "yes",
            allow_changed_data=options.allow_changed_data,
        )


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Train MoCo-v2 and MoCHi on small images, and compare them with what needs no training."""

    out: Annotated[Path | None, Help(help="folder for both; unset: runs/demo, demo-2, ...")] = None
    epochs: Annotated[int | None, Help(help="other than the demonstration's own")] = None
    seed: int = 0
    """of both runs"""
    data: DataConfig = SHAPES


def demo(arguments: list[str]) -> None:
    """MoCo-v2 and MoCHi on the embedded data, evaluated."""
    options = parse(Demo, "demo", arguments)
    from hardmix.commands.demonstration import show

    show(options.out, options.data, epochs=options.epochs, seed=options.seed)


@dataclass(frozen=True)
class Recipes:
    """Every recipe: what, the paper's place, expected number, cost."""


def recipes(arguments: list[str]) -> None:
    """Every recipe: what, the paper's place, expected number, cost."""
    parse(Recipes, "recipes", arguments)
    from hardmix.runtime.console import say

    for name, entry in RECIPES.items():
        first_line = (entry.build.__doc__ or "").splitlines()[0]
        say(f"{name}: {first_line}")
        say(f"  {entry.place}; {entry.expected}; {entry.cost}")


@dataclass(frozen=True, kw_only=True)
class ImageNet100:
    """Link the paper's 100 classes out of an ImageNet folder."""

    imagenet: Annotated[Path, Help(help="folder with train/ and val/")]
    out: Annotated[Path, Help(help="folder to make")]


def imagenet100(arguments: list[str]) -> None:
    """Link the paper's 100 classes out of an ImageNet folder."""
    options = parse(ImageNet100, "imagenet100", arguments)
    from hardmix.data.imagenet100 import link_imagenet100
    from hardmix.runtime.console import say

    for split, number in link_imagenet100(options.imagenet, options.out).items():
        say(f"{options.out / split}: {number} classes linked")
