"""The command line: one function per subcommand. The only file that knows it.

Nothing heavy is imported before a command runs, so that `--help` answers at once.
"""

import difflib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args

import tyro

from hardmix import __version__
from hardmix.commands import benchmarks, draw, evaluate, page, sweeps
from hardmix.errors import InputError, UnfinishedError
from hardmix.runtime.launch import launched
from hardmix.settings.config import DataConfig, PretrainConfig
from hardmix.settings.methods import METHOD_FACTS
from hardmix.settings.recipes import RECIPES

DESCRIPTION = f"hardmix {__version__}: contrastive pre-training with hard negative mixing (MoCHi)."
SHAPES = DataConfig(name="shapes", image_size=32, blur=False)

Help = tyro.conf.arg
Resume = Literal["no", "yes", "auto"]


def pretrain(arguments: list[str]) -> None:
    """Train an encoder on images without labels."""
    base, rest = _base_config(arguments)

    @dataclass(frozen=True, kw_only=True)
    class Pretrain:
        """Train an encoder: hardmix pretrain RECIPE --out RUN [settings].

        RECIPE is imagenet100, imagenet1k, cifar10 or demo (see `hardmix recipes`). Defaults below
        are those of the recipe and method you name.
        """

        out: Annotated[Path, Help(help="the run's folder")]
        resume: Annotated[Resume, Help(help="go on with the run; auto: start or go on")] = "no"
        allow_changed_data: Annotated[bool, Help(help="resume though images changed")] = False
        config: Annotated[Path | None, Help(help="run a saved config.json again")] = None
        settings: Annotated[PretrainConfig, Help(name="")] = base

    options = tyro.cli(Pretrain, prog="hardmix pretrain RECIPE", args=rest, **_quiet())
    train = options.settings.train
    with _all_processes(train.device, train.timeout):
        from hardmix.training.pretrain import pretrain as run

        run(
            options.settings,
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
    options = tyro.cli(Demo, prog="hardmix demo", args=arguments)
    from hardmix.commands.demonstration import show

    show(options.out, options.data, epochs=options.epochs, seed=options.seed)


def recipes(arguments: list[str]) -> None:
    """Every recipe: what, the paper's place, expected number, cost."""
    tyro.cli(_nothing, prog="hardmix recipes", description=recipes.__doc__, args=arguments)
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
    options = tyro.cli(ImageNet100, prog="hardmix imagenet100", args=arguments)
    from hardmix.data.imagenet100 import link_imagenet100
    from hardmix.runtime.console import say

    for split, number in link_imagenet100(options.imagenet, options.out).items():
        say(f"{options.out / split}: {number} classes linked")


@dataclass(frozen=True, kw_only=True)
class Import:
    """Make a run of weights from elsewhere: MoCo, torchvision, timm, lightly. Runs no code."""

    file: Annotated[tyro.conf.Positional[Path], Help(metavar="FILE", help="the weights")]
    out: Annotated[Path, Help(help="the run's folder, to be made")]
    backbone: Annotated[str | None, Help(help="where it is not recognised, e.g. timm:NAME")] = None
    image_size: Annotated[int | None, Help(help="pixels; unset: the file's own, 32 or 224")] = None


def import_(arguments: list[str]) -> None:
    """Make a run of weights from elsewhere."""
    options = tyro.cli(Import, prog="hardmix import", args=arguments)
    from hardmix.weights.foreign import import_weights

    import_weights(
        options.file, options.out, backbone=options.backbone, image_size=options.image_size
    )


def version(arguments: list[str]) -> None:
    """The version of hardmix."""
    tyro.cli(_nothing, prog="hardmix version", description=version.__doc__, args=arguments)
    from hardmix.runtime.console import say

    say(__version__)


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "demo": demo,
    "recipes": recipes,
    "pretrain": pretrain,
    "knn": evaluate.knn,
    "linear": evaluate.linear,
    "finetune": evaluate.finetune,
    "detect": evaluate.detect,
    "features": evaluate.features,
    "neighbours": evaluate.neighbours,
    "analyze": draw.analyze,
    "toy": draw.toy,
    "sweep": sweeps.sweep,
    "report": page.report,
    "bench": benchmarks.bench,
    "export": evaluate.export,
    "import": import_,
    "imagenet100": imagenet100,
    "version": version,
}


SHARED = ("pretrain", "knn", "linear", "detect", "features")
"""Commands that many processes do together; `pretrain` joins them by itself."""


def main(arguments: list[str] | None = None) -> NoReturn:
    """Exit status: 0 done; 2 bad input, with one message; 1 a defect of ours, with a traceback.

    75 stopped before the end, by a signal or because another process was lost: --resume goes on.
    130 ended by a second Ctrl-C.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["--"]:  # torchrun -m hardmix -- pretrain ...
        arguments = arguments[1:]
    # Before torch is imported: threads that wait should soon sleep. Where other processes are busy
    # too, threads that spin for long bring training to a halt (docs/performance.md). Others do not
    # set this: we compare with them as they are.
    if arguments[:1] != ["bench"]:
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    # Of a connection that breaks torch prints pages; we say which rank is lost.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        _dispatch(arguments)
    except (InputError, UnfinishedError) as error:
        from hardmix.runtime.console import complain

        complain(str(error))
        sys.exit(2 if isinstance(error, InputError) else 75)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # whoever read what we print has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception:
        from hardmix.runtime.console import complain

        traceback.print_exc()
        complain("this is a defect of ours; please report it with the lines above.")
        sys.exit(1)
    sys.exit(0)


def _dispatch(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        _print_help()
        return
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        raise InputError(f"there is no command {name!r}: {_nearest(name, list(COMMANDS))}.")
    launch = launched()
    if launch is None or name == "pretrain":
        COMMANDS[name](rest)
        return
    if name not in SHARED and launch.rank:
        sys.exit(2)  # rank 0 says why
    if name not in SHARED:
        raise InputError(
            f"hardmix {name} runs in one process: start it without torchrun or srun. Many can share"
            f" {', '.join(SHARED)}."
        )
    with _all_processes():
        COMMANDS[name](rest)


@contextmanager
def _all_processes(device: str = "auto", timeout: float = 300.0) -> Iterator[None]:
    """Join the processes that torchrun or srun has started; only rank 0 speaks."""
    launch = launched()
    from hardmix.runtime.console import speak_as
    from hardmix.runtime.rendezvous import joined

    speak_as(0 if launch is None else launch.rank)
    with joined(launch, device, timeout):
        yield


def _quiet() -> dict[str, Any]:
    """Only rank 0 prints what is wrong with the command line: it is the same for all."""
    launch = launched()
    return {"console_outputs": launch is None or launch.rank == 0}


def _print_help() -> None:
    lines = [DESCRIPTION, "", "usage: hardmix COMMAND [options]", ""]
    lines += [f"  {name:<12} {(command.__doc__ or '')}" for name, command in COMMANDS.items()]
    lines += ["", "hardmix COMMAND --help shows a command's options."]
    sys.stdout.write("\n".join(lines) + "\n")


def _nothing() -> None:
    pass


def _nearest(name: str, known: list[str]) -> str:
    ordered = difflib.get_close_matches(name, known, n=len(known), cutoff=0.0)
    return f"choose one of {', '.join(ordered)}"


def _base_config(arguments: list[str]) -> tuple[PretrainConfig, list[str]]:
    """The config whose settings are the defaults: of a recipe, a saved file, or a run."""
    rest = _with_resume(arguments)
    named = rest.pop(0) if rest and not rest[0].startswith("-") else _value(rest, "--recipe")
    if named is not None and named not in RECIPES:
        raise InputError(f"there is no recipe {named!r}: {_nearest(named, list(RECIPES))}.")
    saved = _value(rest, "--config")
    resume, out = _value(rest, "--resume") or "no", _value(rest, "--out")
    if saved is None and resume != "no" and out is not None:
        file = Path(out) / "config.json"
        if resume == "yes" or file.exists():
            saved = str(file)
        if resume == "yes" and not file.exists():
            raise InputError(
                f"--out {out} holds no run to resume (no config.json): start it without --resume,"
                " or with --resume auto, which starts or goes on."
            )
    if saved is not None:
        from hardmix.settings.saved import read_config

        return read_config(Path(saved)), rest
    if named is None:
        if {"-h", "--help"} & set(rest):
            return PretrainConfig(), rest
        raise InputError(f"pretrain needs a recipe: {_nearest('', list(RECIPES))}.")
    method = _value(rest, "--method") or "mochi"
    known = list(METHOD_FACTS)
    if method not in known:
        raise InputError(f"there is no method {method!r}: {_nearest(method, known)}.")
    config = RECIPES[named].build(method, "--oracle" in rest)
    if config.data.name == "shapes" and _value(rest, "--data.root") is not None:
        config = replace(config, data=replace(config.data, name=None))  # recognised by its root
    return config, rest


def _with_resume(arguments: list[str]) -> list[str]:
    """`--resume` alone means yes, `--no-resume` no."""
    words = []
    for index, word in enumerate(arguments):
        words += ["--resume", "no"] if word == "--no-resume" else [word]
        if word == "--resume" and arguments[index + 1 : index + 2] not in [
            [choice] for choice in get_args(Resume)
        ]:
            words.append("yes")
    return words


def _value(arguments: list[str], option: str) -> str | None:
    """An option's value, looked up before the rest is parsed."""
    for index, word in enumerate(arguments):
        if word == option and index + 1 < len(arguments):
            return arguments[index + 1]
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return None
