"""The command line: dispatches to a command and sets the exit status.

Each command is in the file of its group. Nothing heavy is imported before a command runs, so that
`--help` is fast.
"""

import ctypes
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from hardmix import __version__
from hardmix.commands import (
    argv,
    draw,
    encoder_files,
    evaluate,
    explore,
    processes,
    sweeps,
    train,
)
from hardmix.commands.argv import CommandLine
from hardmix.commands.exits import Ending, ending_of
from hardmix.commands.options import parse
from hardmix.errors import InputError, UnnamedCodeError
from hardmix.runtime.launch import Launch
from hardmix.runtime.own_code import allowing, is_own
from hardmix.settings.evaluations import EVALUATIONS
from hardmix.settings.facts import nearest_first

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1
"""Numbers of glibc's parameters M_MMAP_THRESHOLD and M_TRIM_THRESHOLD."""
KEPT_BYTES = 1 << 30
"""Bytes of freed memory that the process keeps, and the smallest block that it always returns."""

DESCRIPTION = f"hardmix {__version__}: contrastive pre-training with hard negative mixing (MoCHi)."


@dataclass(frozen=True)
class Version:
    """Print the version of hardmix."""


def version(line: CommandLine) -> None:
    """Print the version of hardmix."""
    parse(Version, "version", line)
    sys.stdout.write(f"{__version__}\n")


Command = Callable[[CommandLine], None]
GROUPS: dict[str, dict[str, Command]] = {
    "Train": {"demo": train.demo, "recipes": train.recipes, "pretrain": train.pretrain},
    "Evaluate": {**evaluate.EVALUATION_COMMANDS, "detect": evaluate.detect},
    "Look": {
        "report": draw.report,
        "watch": explore.watch,
        "explore": explore.explore,
        "neighbours": encoder_files.neighbours,
    },
    "Share": {
        "features": encoder_files.features,
        "export": encoder_files.export,
        "import": encoder_files.import_,
    },
    "Reproduce the paper": {
        "check-data": sweeps.check_data,
        "imagenet100": train.imagenet100,
        "sweep": sweeps.sweep,
        "analyze": draw.analyze,
        "toy": draw.toy,
    },
}
"""The commands, grouped by what their reader wants to do."""

COMMANDS: dict[str, Command] = {
    **{name: command for group in GROUPS.values() for name, command in group.items()},
    "version": version,
}


SHARED = (
    "pretrain",
    *(name for name, evaluation in EVALUATIONS.items() if evaluation.shared),
    "detect",
    "features",
)
"""Commands that several processes can share; `pretrain` joins the processes itself."""

FLAGS = {"pretrain": train.RESUME, **{name: evaluate.flags_of(name) for name in EVALUATIONS}}
"""Options that may stand alone, by command; tyro knows the other ones."""


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run a command and exit with its status.

    0 done; 1 a bug in hardmix, with a traceback; 2 bad input, with one message; 74 results could
    not be written, as on a full disk; 75 stopped early by a signal or because another process was
    lost, resume with --resume; 130 ended by a second Ctrl-C.

    Every command takes `--allow-code NAME`, once or several times: code ("mypackage:make_net") or a
    command ("pipe:COMMAND") that a run, config or encoder may name. No other is run.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["--"]:  # torchrun -m hardmix -- pretrain ...
        arguments = arguments[1:]
    # Before torch is imported: waiting threads should sleep soon. On a busy machine, threads that
    # spin for long bring training to a halt (docs/performance.md).
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    # torch prints pages about a broken connection; hardmix reports which rank is lost.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    keep_freed_memory()
    try:
        _dispatch(arguments)
    except SystemExit as end:  # a rank whose message rank 0 prints
        processes.leave(end.code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has closed it, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as error:
        from hardmix.runtime.console import complain, complain_at_length

        ending = ending_of(error)
        if isinstance(error, UnnamedCodeError):
            ending = Ending(_how_to_allow(error, arguments), error.status)
        if ending is None:
            complain_at_length(traceback.format_exc())
            ending = Ending("this is a bug in hardmix; please report it with the lines above.", 1)
        complain(ending.message)
        processes.leave(ending.status)
    sys.exit(0)


def _how_to_allow(error: UnnamedCodeError, arguments: list[str]) -> str:
    """Return what a file asks for, and the command that allows it."""
    allowed = shlex.join(["hardmix", *arguments, "--allow-code", error.name])
    without = " --no-look does without it." if arguments[0] in ("report", "watch") else ""
    return f"{error.asks}: if you trust it, run {allowed}.{without}"


def _dispatch(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        _print_help()
        return
    name = "version" if arguments[0] == "--version" else arguments[0]
    if name not in COMMANDS and not is_own(name):
        known = ", ".join(nearest_first(name, COMMANDS))
        raise InputError(f"there is no command {name!r}: choose one of {known}.")
    launch = processes.ask()
    line = scan_after(name, arguments[1:])
    with allowing(*argv.named_code(line), name):
        _run(name, line, launch)


def keep_freed_memory() -> None:
    """Let glibc keep up to 1 GB of freed memory, instead of returning large blocks at once.

    Otherwise the system clears the memory of every large layer again for every batch: at 224
    pixels that took 40 % of the time of `hardmix features` on a CPU.
    """
    with suppress(AttributeError, OSError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        for parameter in (MMAP_THRESHOLD, TRIM_THRESHOLD):
            mallopt(parameter, KEPT_BYTES)


def scan_after(name: str, words: Sequence[str]) -> CommandLine:
    """Return the words after a command's name, scanned for this command."""
    return argv.scan(words, **FLAGS.get(name, {}))


def _run(name: str, line: CommandLine, launch: Launch | None) -> None:
    """Run a command, in one process or in several."""
    own = name not in COMMANDS
    command = evaluate.evaluation_command(name) if own else COMMANDS[name]
    if launch is None or name == "pretrain":
        command(line)
        return
    if not own and name not in SHARED and launch.rank:
        sys.exit(2)  # rank 0 prints the reason
    if not own and name not in SHARED:
        raise InputError(
            f"hardmix {name} runs in one process: start it without torchrun or srun. Only"
            f" {', '.join(SHARED)} run in several."
        )
    with processes.all_processes():
        command(line)


def _print_help() -> None:
    lines = [DESCRIPTION, "", "usage: hardmix COMMAND [options]"]
    for title, commands in GROUPS.items():
        lines += ["", f"{title}:"]
        lines += [f"  {name:<12} {command.__doc__ or ''}" for name, command in commands.items()]
    lines += [
        "",
        "A run or config of others may name code. It is only run if you name it too, by",
        "--allow-code NAME, which every command takes: --allow-code mypackage:make_net.",
        "hardmix mypackage:function RUN evaluates a run by your own function.",
        "",
        "hardmix COMMAND --help shows a command's options; hardmix --version shows the version.",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
