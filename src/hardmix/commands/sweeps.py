"""The command that trains a grid of the paper, or one of the user's."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from hardmix.commands.options import Help, parse
from hardmix.errors import InputError
from hardmix.sweep.grids import GRIDS, grid_named
from hardmix.sweep.scales import ScaleName


@dataclass(frozen=True, kw_only=True)
class SweepData:
    """Where the images are."""

    root: Annotated[str | None, Help(help="folder of ImageNet or CIFAR-10; shapes need none")] = (
        None
    )
    workers: Annotated[int | None, Help(help="processes that decode images")] = None


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A grid of the paper, beside its numbers, or of your own: hardmix sweep NAME --out DIR.

    The same command again goes on where it stopped. Exit status: 0 done, also where runs are with
    another process; 2 a run failed by bad input; 1 a run failed by a bug in hardmix; 74 results
    could not be written; 75 stopped.
    """

    grid: Annotated[
        tyro.conf.Positional[str],
        Help(metavar="NAME", help=f"one of {', '.join(GRIDS)}, or a file of yours, GRID.toml"),
    ]
    out: Annotated[Path, Help(help="folder of all runs and tables; grids of one scale share it")]
    scale: Annotated[ScaleName, Help(help="the paper's settings, or small ones for CPUs")] = "paper"
    seeds: Annotated[int | None, Help(help="runs of every row; unset: the file's, or 3")] = None
    first_seed: Annotated[
        int | None, Help(help="another one for fresh seeds; unset: the file's, or 0")
    ] = None
    only: Annotated[
        tuple[str, ...], Help(help="rows whose label is or else holds one of these")
    ] = ()
    index: Annotated[str | None, Help(metavar="I/N", help="do part I of N, I from 1")] = None
    dry_run: Annotated[bool, Help(help="show the plan and touch nothing")] = False
    collect: Annotated[
        bool, Help(help="train nothing: tables and figures of what is finished or recorded")
    ] = False
    pairs: Annotated[bool, Help(help="show and draw differences by seed, with 95 % intervals")] = (
        False
    )
    records: Annotated[
        Path | None, Help(help="folder of the finished runs' records; unset: DIR/records")
    ] = None
    job_only: Annotated[bool, Help(help="write DIR/job.sh for SLURM and train nothing")] = False
    epochs: Annotated[int | None, Help(help="for the paper's 200; small scales only")] = None
    num_images: Annotated[int | None, Help(help="training images; small scales only")] = None
    temperature: Annotated[
        float | None, Help(help="of MoCo-v2 and MoCHi, the paper's 0.2; small scales only")
    ] = None
    device: Annotated[str, Help(help="auto, cpu, cuda or cuda:N")] = "auto"
    voc_root: Annotated[Path | None, Help(help="folder of VOC, for table2")] = None
    coco_root: Annotated[Path | None, Help(help="folder of COCO, for table3")] = None
    coco_schedule: Annotated[Literal["1x", "2x"], Help(help="1x is the paper's")] = "1x"
    data: SweepData = field(default_factory=SweepData)


def sweep(arguments: list[str]) -> None:
    """A grid: every row trained and evaluated, the paper's beside the paper's numbers."""
    options = parse(Sweep, "sweep", arguments)
    from hardmix.runtime.console import complain
    from hardmix.sweep.planning import SweepOptions
    from hardmix.sweep.sweeping import sweep as run

    how = ("dry_run", "job_only", "collect", "pairs", "data")
    chosen = {k: v for k, v in vars(options).items() if k not in how}
    grid = grid_named(options.grid)
    chosen["seeds"] = grid.seeds if options.seeds is None else options.seeds
    chosen["first_seed"] = grid.first_seed if options.first_seed is None else options.first_seed
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
    message = f"{len(outcome.failures)} failed, all else was done: see {files}."
    if any(failure.ours for failure in outcome.failures):
        complain(f"{message} Among them is a bug in hardmix; please report it with that file.")
        sys.exit(1)
    raise InputError(message)
