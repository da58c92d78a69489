"""Commands for training: pretrain, demo, recipes, imagenet100."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from hardmix.commands import argv, processes
from hardmix.commands.argv import CommandLine
from hardmix.commands.options import Help, make_options, parse, run_settings
from hardmix.errors import InputError
from hardmix.runtime.own_code import asked_by
from hardmix.settings.config import DataConfig
from hardmix.settings.methods import METHOD_FACTS, MethodName
from hardmix.settings.recipes import RECIPES

SHAPES = DataConfig(name="shapes", image_size=32, blur=False)

RESUME: dict[str, Sequence[str]] = {"resume": ("yes", "no", "auto")}
"""`--resume` alone means yes."""


def pretrain(line: CommandLine) -> None:
    """Train an encoder on images, without labels."""
    base, rest = argv.run_config(line)
    check_mixing(base.method, line)
    fields, back = run_settings(base, line)
    run_options: list[Any] = [
        (
            "resume",
            Annotated[
                argv.ResumeWord,
                Help(help="Resume the run in --out. auto: resume it if it exists, else start it."),
            ],
            field(default="no"),
        ),
        (
            "config",
            Annotated[Path | None, Help(help="Saved config.json to start from.")],
            field(default=None),
        ),
    ]
    if not line.wants_help or "help_all" in line.options:
        about_images = Help(help="Resume even if the images have changed.")
        run_options.append(
            ("allow_changed_data", Annotated[bool, about_images], field(default=False))
        )
    about = """Train an encoder: hardmix pretrain RECIPE --out RUN [settings].

    For the recipes, see `hardmix recipes`. The defaults below are those of the recipe and method
    you name.
    """
    if "help_all" not in line.options:
        about += """
    These are the settings that people change most; --help-all shows all of them.
    """
    if base.choose:
        about += """
    This recipe chooses many of them when the run starts, to fit the images and --minutes, and
    prints what and why. Settings that you give are not changed.
    """
    out = ("out", Annotated[Path, Help(help="Folder of the run.")])
    made = make_options("Pretrain", about, [out, *fields, *run_options])
    options = parse(made, "pretrain RECIPE", rest)
    config = back(options)
    where = options.config or options.out / "config.json"
    with processes.all_processes(config.train.device, config.train.timeout), asked_by(where):
        from hardmix.training.pretrain import pretrain as run

        run(
            config,
            options.out,
            resume="auto" if options.resume == "auto" else options.resume == "yes",
            allow_changed_data=options.allow_changed_data,
        )


def check_mixing(method: MethodName, line: CommandLine) -> None:
    """Raise InputError if points are asked of a method that has no negatives."""
    reason = METHOD_FACTS[method].no_mixing
    asked = [name for name in line.options if name.startswith("mix.")]
    if reason and asked:
        raise InputError(
            f"--{asked[0].replace('_', '-')} with --method {method}: {reason}. Omit --mix.*, or"
            " choose another method."
        )


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Train MoCo-v2 and MoCHi on small images and compare them with untrained baselines."""

    out: Annotated[
        Path | None, Help(help="Folder of both runs. Unset: runs/demo, runs/demo-2, ...")
    ] = None
    epochs: Annotated[int | None, Help(help="Override the number of epochs.")] = None
    seed: int = 0
    """Seed of both runs."""
    data: DataConfig = SHAPES


def demo(line: CommandLine) -> None:
    """Train MoCo-v2 and MoCHi on built-in images and evaluate them, in minutes."""
    options = parse(Demo, "demo", line)
    from hardmix.commands.demonstration import show

    show(options.out, options.data, epochs=options.epochs, seed=options.seed)


@dataclass(frozen=True)
class Recipes:
    """List the recipes: what each is, its place in the paper, expected results and cost."""


def recipes(line: CommandLine) -> None:
    """List the recipes, with expected results and cost."""
    parse(Recipes, "recipes", line)
    from hardmix.runtime.console import say

    for name, entry in RECIPES.items():
        first_line = (entry.build.__doc__ or "").splitlines()[0]
        say(f"{name}: {first_line}")
        say(f"  {entry.place}; {entry.expected}; {entry.cost}")


@dataclass(frozen=True, kw_only=True)
class ImageNet100:
    """Make a folder of links to the paper's 100 classes in an ImageNet folder."""

    imagenet: Annotated[Path, Help(help="ImageNet folder with train/ and val/.")]
    out: Annotated[Path, Help(help="Folder to create.")]


def imagenet100(line: CommandLine) -> None:
    """Link the paper's 100 classes from an ImageNet folder."""
    options = parse(ImageNet100, "imagenet100", line)
    from hardmix.data.imagenet100 import link_imagenet100
    from hardmix.runtime.console import say

    for split, number in link_imagenet100(options.imagenet, options.out).items():
        say(f"{options.out / split}: {number} classes linked")
