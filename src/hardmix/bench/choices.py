"""Options of `hardmix bench`. Imports no torch."""

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from hardmix.errors import InputError

PartName = Literal["loss", "step", "methods", "loader", "end-to-end", "start", "memory", "growth"]
PARTS: tuple[PartName, ...] = get_args(PartName)
Device = Literal["auto", "cpu", "cuda"]
QUICK_ROUNDS = 2


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of a benchmark, checked before anything is measured."""

    parts: tuple[str, ...] = PARTS
    """Parts to run; all by default."""
    out: Path = Path("bench.json")
    rounds: int = 15
    """Number of rounds, in each of which every variant takes a turn."""
    quick: bool = False
    """Tiny sizes and two rounds, to check that it works; the numbers mean nothing."""
    device: Device = "auto"
    cifar: Path | None = None
    """Folder of CIFAR-10. Unset: generated shapes of the same size."""
    jpeg: Path | None = None
    """Folder of photographs. Unset: generated ones."""

    def __post_init__(self) -> None:
        for name in self.parts:
            if name not in PARTS:
                known = difflib.get_close_matches(name, PARTS, n=len(PARTS), cutoff=0.0)
                raise InputError(f"there is no part {name!r}: choose from {', '.join(known)}.")
        if self.rounds < 2:
            raise InputError(f"--rounds {self.rounds} must be at least 2, for quartiles.")
        if self.out.suffix == ".md":
            raise InputError(f"--out {self.out} must not end in .md, as the tables do: use .json.")
        if self.out.is_dir() or not self.out.absolute().parent.is_dir():
            raise InputError(f"--out {self.out} must be a file in an existing folder.")
        for option, folder in [("cifar", self.cifar), ("jpeg", self.jpeg)]:
            if folder is not None and not folder.is_dir():
                raise InputError(
                    f"--data.{option} {folder} is not a folder: choose one, or omit the option to"
                    " use generated images."
                )
