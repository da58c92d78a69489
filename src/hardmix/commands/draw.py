"""Commands that draw: the paper's figures for runs, and its toy sphere. See cli.py."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

Help = tyro.conf.arg


@dataclass(frozen=True, kw_only=True)
class Analyze:
    """The paper's figures for these runs: hardmix analyze RUN [RUN ...].

    Figures of one run are written to RUN/figures, as SVG, PNG and JSON.
    """

    runs: Annotated[
        tyro.conf.Positional[tuple[Path, ...]], Help(metavar="RUN...", help="the runs' folders")
    ] = ()
    out: Annotated[
        Path | None, Help(help="for figures that compare runs; unset: RUN/figures, or figures/")
    ] = None


@dataclass(frozen=True, kw_only=True)
class Toy:
    """Fig. 1: random embeddings, the hardest of them, and the points MoCHi mixes: hardmix toy."""

    out: Annotated[Path, Help(help="folder of fig1.svg, fig1.png and fig1.json")] = Path("figures")
    seed: int = 0
    """of the embeddings and of the mixing"""
    dim: Annotated[int, Help(help="dimensions of the sphere's space")] = 32
    num_memory: Annotated[int, Help(help="K: negatives")] = 512
    num_hardest: Annotated[int, Help(help="N: hardest ones, which are mixed")] = 64
    num_pairs: Annotated[int, Help(help="s: points that mix two of them")] = 64
    num_with_query: Annotated[int, Help(help="s': points that mix one with the query")] = 32


def analyze(arguments: list[str]) -> None:
    """The paper's figures for these runs."""
    options = tyro.cli(Analyze, prog="hardmix analyze", args=arguments)
    from hardmix.analysis.analyze import analyze as draw

    draw(options.runs, options.out)


def toy(arguments: list[str]) -> None:
    """Fig. 1: synthetic points on a toy sphere."""
    options = tyro.cli(Toy, prog="hardmix toy", args=arguments)
    from hardmix.analysis.analyze import toy as draw

    draw(**asdict(options))
