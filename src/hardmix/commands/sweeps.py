"""The command that trains a table of the paper, or the user's own grid."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from hardmix.commands.argv import CommandLine
from hardmix.commands.options import Help, parse
from hardmix.errors import InputError
from hardmix.runtime.own_code import check_allowed, is_own
from hardmix.settings.named_choices import Precision
from hardmix.settings.saved import CODE, settings
from hardmix.sweep.grid_rows import Grid, ScaleName
from hardmix.sweep.grids import GRIDS, grid_named


@dataclass(frozen=True, kw_only=True)
class SweepData:
    """The images."""

    root: Annotated[str | None, Help(help="Folder of ImageNet or CIFAR-10; shapes need none.")] = (
        None
    )
    workers: Annotated[int | None, Help(help="Processes that decode images.")] = None


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Train a table of the paper and compare, or your own grid: hardmix sweep NAME --out DIR.

    Run the same command again to resume. Exit status: 0 done, also if some runs are being run by
    another process; 1 a run failed because of a bug in hardmix; 2 a run failed because of bad
    input; 74 results could not be written; 75 stopped.
    """

    grid: Annotated[
        tyro.conf.Positional[str],
        Help(metavar="NAME", help=f"One of {', '.join(GRIDS)}, or your own file, GRID.toml."),
    ]
    out: Annotated[
        Path, Help(help="Folder of all runs and tables; grids of the same scale can share it.")
    ]
    scale: Annotated[ScaleName, Help(help="The paper's settings, or small ones for CPUs.")] = (
        "paper"
    )
    seeds: Annotated[int | None, Help(help="Runs of every row. Unset: the grid's own, 3 or 1.")] = (
        None
    )
    first_seed: Annotated[
        int | None, Help(help="First seed; change it for fresh seeds. Unset: the file's, or 0.")
    ] = None
    only: Annotated[
        tuple[str, ...], Help(help="Only rows whose label equals or contains one of these.")
    ] = ()
    index: Annotated[
        str | None, Help(metavar="I/N", help="Run only part I of N, counted from 1.")
    ] = None
    dry_run: Annotated[bool, Help(help="Show the plan and change nothing.")] = False
    collect: Annotated[
        bool, Help(help="Train nothing; only make tables and figures of the finished runs.")
    ] = False
    pairs: Annotated[bool, Help(help="Show and draw differences by seed, with 95 % intervals.")] = (
        False
    )
    records: Annotated[
        Path | None, Help(help="Folder of the finished runs' records. Unset: DIR/records.")
    ] = None
    job_only: Annotated[bool, Help(help="Write DIR/job.sh for SLURM and train nothing.")] = False
    epochs: Annotated[
        int | None, Help(help="Epochs in place of the paper's 200; small scales only.")
    ] = None
    num_images: Annotated[
        int | None, Help(help="Number of training images; small scales only.")
    ] = None
    temperature: Annotated[
        float | None,
        Help(help="tau of MoCo-v2 and MoCHi, 0.2 in the paper; small scales only."),
    ] = None
    device: Annotated[str, Help(help="auto, cpu, cuda or cuda:N.")] = "auto"
    gpus_per_run: Annotated[
        int, Help(help="GPUs for each run; with several, torchrun trains and evaluates it.")
    ] = 1
    precision: Annotated[
        Precision | None,
        Help(help="Number format of training. Unset: fp32 at the paper's scale."),
    ] = None
    transfer_root: Annotated[
        str | None, Help(help="Images of another data set, for the evaluation transfer.")
    ] = None
    voc_root: Annotated[
        Path | None, Help(help="Folder of VOC, for table2; at a small scale it may be left out.")
    ] = None
    coco_root: Annotated[Path | None, Help(help="Folder of COCO, for table3.")] = None
    detector_iterations: Annotated[
        int | None, Help(help="Steps of a detector, 600 if unset; small scales only.")
    ] = None
    coco_schedule: Annotated[
        Literal["1x", "2x"], Help(help="Schedule on COCO; 1x is the paper's.")
    ] = "1x"
    data: SweepData = field(default_factory=SweepData)


@dataclass(frozen=True, kw_only=True)
class CheckedData:
    """The images."""

    root: Annotated[Path, Help(help="Folder of ImageNet, VOC2007 and VOC2012, or COCO.")]


@dataclass(frozen=True, kw_only=True)
class CheckData:
    """Count the images of a data set of the paper: hardmix check-data NAME --data.root DIR.

    Exit status: 0 the layout is right and all images are there; 2 otherwise.
    """

    name: Annotated[
        tyro.conf.Positional[Literal["imagenet", "imagenet100", "voc", "coco"]],
        Help(metavar="NAME", help="imagenet, imagenet100, voc or coco."),
    ]
    data: CheckedData
    any_counts: Annotated[bool, Help(help="Accept other numbers of images and classes.")] = False


def check_data(line: CommandLine) -> None:
    """Check that a data set of the paper is complete."""
    options = parse(CheckData, "check-data", line)
    from hardmix.sweep.data_roots import check_data as check

    check(options.name, options.data.root, any_counts=options.any_counts)


def check_code(file: str, grid: Grid) -> None:
    """Raise UnnamedCodeError if a row needs code that is not named on the command line."""
    for config in (row.own for row in grid.rows if row.own is not None):
        values = settings(config)
        for setting in CODE:
            if is_own(values[setting] or ""):
                check_allowed(values[setting], setting, file)


def sweep(line: CommandLine) -> None:
    """Train and evaluate a table of the paper and compare, or your own grid."""
    options = parse(Sweep, "sweep", line)
    from hardmix.runtime.console import complain
    from hardmix.sweep.planning import SweepOptions
    from hardmix.sweep.sweeping import sweep as run

    how = ("dry_run", "job_only", "collect", "pairs", "data")
    chosen = {k: v for k, v in vars(options).items() if k not in how}
    grid = grid_named(options.grid)
    chosen["seeds"] = grid.seeds if options.seeds is None else options.seeds
    chosen["first_seed"] = grid.first_seed if options.first_seed is None else options.first_seed
    if not (options.dry_run or options.job_only or options.collect):
        check_code(options.grid, grid)
    outcome = run(
        SweepOptions(**chosen, data_root=options.data.root, workers=options.data.workers),
        dry_run=options.dry_run,
        job_only=options.job_only,
        collect_only=options.collect,
        pairs=options.pairs,
    )
    if not outcome.failures:
        return
    files = ", ".join(str(failure.file) for failure in outcome.failures)
    number = len(outcome.failures)
    message = f"{number} run{'s' * (number != 1)} failed, all others are done: see {files}."
    if any(failure.ours for failure in outcome.failures):
        complain(f"{message} At least one is a bug in hardmix; please report it with that file.")
        sys.exit(1)
    raise InputError(message)
