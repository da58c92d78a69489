"""The command that measures our performance claims."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from hardmix.bench.choices import PARTS, BenchOptions, Device
from hardmix.commands.options import Help, parse


@dataclass(frozen=True, kw_only=True)
class BenchData:
    """Real images; without them generated ones are used."""

    cifar: Annotated[Path | None, Help(help="folder of CIFAR-10")] = None
    jpeg: Annotated[Path | None, Help(help="folder of photographs, with subfolders or without")] = (
        None
    )


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Our performance claims, measured here, beside others: hardmix bench [PART ...].

    Variants take turns round by round; ratios are medians over the rounds. Close other programs.
    lightly takes part where it is installed: pip install 'hardmix[peers]'.
    """

    parts: Annotated[
        tyro.conf.Positional[tuple[str, ...]],
        Help(metavar="PART...", help=f"of {', '.join(PARTS)}; none: all"),
    ] = ()
    out: Annotated[
        Path, Help(help="everything as JSON, its tables in a .md beside it; old ones are replaced")
    ] = Path("bench.json")
    rounds: Annotated[int, Help(help="how often variants take turns")] = 15
    quick: Annotated[bool, Help(help="tiny sizes, to see that it works; judges nothing")] = False
    device: Annotated[Device, Help(help="auto: cuda where there is one")] = "auto"
    data: BenchData = field(default_factory=BenchData)


def bench(arguments: list[str]) -> None:
    """Our performance claims, measured here."""
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
