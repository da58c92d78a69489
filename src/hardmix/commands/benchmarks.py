"""The command that measures hardmix's performance claims."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from hardmix.bench.choices import PARTS, BenchOptions, Device
from hardmix.commands.options import Help, parse


@dataclass(frozen=True, kw_only=True)
class BenchData:
    """Real images; without them, generated ones are used."""

    cifar: Annotated[Path | None, Help(help="Folder of CIFAR-10.")] = None
    jpeg: Annotated[
        Path | None, Help(help="Folder of photographs, with or without subfolders.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure hardmix's performance on this machine: hardmix bench [PART ...].

    Variants take turns in every round; ratios are medians over the rounds. Close other programs
    first. lightly is compared if it is installed: pip install 'hardmix[peers]'.
    """

    parts: Annotated[
        tyro.conf.Positional[tuple[str, ...]],
        Help(metavar="PART...", help=f"Any of {', '.join(PARTS)}. Default: all."),
    ] = ()
    out: Annotated[
        Path,
        Help(help="JSON file of all results; tables go to a .md of the same name. Overwrites."),
    ] = Path("bench.json")
    rounds: Annotated[int, Help(help="Number of rounds.")] = 15
    quick: Annotated[
        bool, Help(help="Use tiny sizes, to check that it works; the numbers mean nothing.")
    ] = False
    device: Annotated[Device, Help(help="auto: cuda when available, otherwise cpu.")] = "auto"
    data: BenchData = field(default_factory=BenchData)


def bench(arguments: list[str]) -> None:
    """Measure hardmix's performance on this machine."""
    asked = parse(Bench, "bench", arguments)
    options = BenchOptions(
        parts=asked.parts or PARTS,
        out=asked.out,
        rounds=asked.rounds,
        quick=asked.quick,
        device=asked.device,
        cifar=asked.data.cifar,
        jpeg=asked.data.jpeg,
    )
    from hardmix.bench.suite import bench as run

    run(options)
