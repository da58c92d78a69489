"""Commands that draw: the paper's figures for runs, its toy sphere, and one page of everything."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated

import tyro

from hardmix.commands.options import Help, parse
from hardmix.errors import InputError
from hardmix.settings.bounds import check_at_least, check_between


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
    options = parse(Analyze, "analyze", arguments)
    from hardmix.analysis.analyze import analyze as draw

    draw(options.runs, options.out)


def toy(arguments: list[str]) -> None:
    """Fig. 1: synthetic points on a toy sphere."""
    options = parse(Toy, "toy", arguments)
    counts = [each.name for each in fields(options) if each.name not in ("out", "seed")]
    check_between(
        options, "toy", 0, 10**6, *counts
    )  # one by one they are judged where they are used
    check_at_least(options, "toy", seed=0)
    from hardmix.analysis.analyze import toy as draw

    draw(**asdict(options))


@dataclass(frozen=True, kw_only=True)
class Report:
    """One self-contained HTML page of these runs: hardmix report RUN [RUN ...] --out FILE.

    Nothing is computed anew: `hardmix knn`, `linear` and `analyze` fill what the page shows.
    """

    runs: Annotated[
        tyro.conf.Positional[tuple[Path, ...]], Help(metavar="RUN...", help="the runs' folders")
    ] = ()
    out: Annotated[Path, Help(help="the page; an earlier page is replaced")] = Path("report.html")


def report(arguments: list[str]) -> None:
    """One HTML page of these runs."""
    options = parse(Report, "report", arguments)
    if not options.runs:
        raise InputError("no run is named: hardmix report RUN [RUN ...] --out report.html.")
    from hardmix.report.page import write_report

    write_report(options.runs, options.out)
