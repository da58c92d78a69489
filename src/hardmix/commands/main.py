"""The command line: which command, and how it ends. Each command stands in a file of its group.

Nothing heavy is imported before a command runs, so that `--help` answers at once.
"""

import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from hardmix import __version__
from hardmix.commands import (
    benchmarks,
    draw,
    encoder_files,
    evaluate,
    explore,
    processes,
    sweeps,
    train,
)
from hardmix.commands.exits import Ending, ending_of
from hardmix.commands.options import parse
from hardmix.errors import InputError
from hardmix.settings.bounds import nearest_first

DESCRIPTION = f"hardmix {__version__}: contrastive pre-training with hard negative mixing (MoCHi)."


@dataclass(frozen=True)
class Version:
    """The version of hardmix."""


def version(arguments: list[str]) -> None:
    """The version of hardmix."""
    parse(Version, "version", arguments)
    sys.stdout.write(f"{__version__}\n")


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "demo": train.demo,
    "recipes": train.recipes,
    "pretrain": train.pretrain,
    **evaluate.EVALUATION_COMMANDS,
    "detect": evaluate.detect,
    "features": encoder_files.features,
    "neighbours": encoder_files.neighbours,
    "explore": explore.explore,
    "analyze": draw.analyze,
    "toy": draw.toy,
    "sweep": sweeps.sweep,
    "report": draw.report,
    "watch": explore.watch,
    "bench": benchmarks.bench,
    "export": encoder_files.export,
    "import": encoder_files.import_,
    "imagenet100": train.imagenet100,
    "version": version,
}


SHARED = ("pretrain", "knn", "linear", "detect", "features")
"""Commands that many processes do together; `pretrain` joins them by itself."""


def main(arguments: list[str] | None = None) -> NoReturn:
    """Exit status: 0 done; 2 bad input, with one message; 1 a bug in hardmix, with a traceback.

    74 results could not be written, as on a full disk. 75 stopped before the end, by a signal or
    because another process was lost: --resume continues. 130 ended by a second Ctrl-C.
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
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # whoever read what we print has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as error:
        from hardmix.runtime.console import complain, complain_at_length

        ending = ending_of(error)
        if ending is None:
            complain_at_length(traceback.format_exc())
            ending = Ending("this is a bug in hardmix; please report it with the lines above.", 1)
        complain(ending.message)
        sys.exit(ending.status)
    sys.exit(0)


def _dispatch(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        _print_help()
        return
    name, rest = arguments[0], arguments[1:]
    if name == "--version":
        name = "version"
    if name not in COMMANDS:
        known = ", ".join(nearest_first(name, COMMANDS))
        raise InputError(f"there is no command {name!r}: choose one of {known}.")
    launch = processes.ask()
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
    with processes.all_processes():
        COMMANDS[name](rest)


def _print_help() -> None:
    lines = [DESCRIPTION, "", "usage: hardmix COMMAND [options]", ""]
    lines += [f"  {name:<12} {(command.__doc__ or '')}" for name, command in COMMANDS.items()]
    lines += [
        "",
        "hardmix COMMAND --help shows a command's options; hardmix --version, the version.",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
