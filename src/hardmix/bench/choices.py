"""What a user asks of `hardmix bench`. Imports no torch."""

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from hardmix.errors import InputError

PartName = Literal["loss", "step", "loader", "end-to-end", "start", "memory", "growth"]
PARTS: tuple[PartName, ...] = get_args(PartName)
Device = Literal["auto", "cpu", "cuda"]
QUICK_ROUNDS = 2


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Checked before anything is measured."""

    parts: tuple[str, ...] = PARTS
    """All of them where none is named."""
    out: Path = Path("bench.json")
    rounds: int = 15
    """How often variants take turns."""
    quick: bool = False
    """Tiny sizes and two rounds: shows that it works, judges nothing."""
    device: Device = "auto"
    cifar: Path | None = None
    """Folder of CIFAR-10; without it, drawn shapes of the same size."""
    jpeg: Path | None = None
    """Folder of photographs; without it, generated ones."""

    def __post_init__(self) -> None:
        for name in self.parts:
            if name not in PARTS:
                known = difflib.get_close_matches(name, PARTS, n=len(PARTS), cutoff=0.0)
                raise InputError(f"there is no part {name!r}: choose of {', '.join(known)}.")
        if self.rounds < 2:
            raise InputError(f"--rounds {self.rounds} is below 2: quartiles need two or more.")
        if self.out.suffix == ".md":
            raise InputError(f"--out {self.out}: the tables would replace it; name it .json.")
        if self.out.is_dir() or not self.out.absolute().parent.is_dir():
            raise InputError(f"--out {self.out} is no file in a folder that exists: name another.")
        for option, folder in [("cifar", self.cifar), ("jpeg", self.jpeg)]:
            if folder is not None and not folder.is_dir():
                raise InputError(
                    f"--data.{option} {folder} is no folder: name one, or leave the option out for"
                    " generated images."
                )
