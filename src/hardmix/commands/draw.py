"""Commands that draw: the paper's figures for runs, its toy sphere, and the report."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated

import tyro

from hardmix.commands.argv import CommandLine
from hardmix.commands.options import Help, parse
from hardmix.errors import InputError
from hardmix.settings.facts import check_at_least, check_between


@dataclass(frozen=True, kw_only=True)
class Analyze:
    """Draw the paper's figures for one or more runs: hardmix analyze RUN [RUN ...].

    Figures of a single run are written to RUN/figures, as SVG, PNG and JSON.
    """

    runs: Annotated[
        tyro.conf.Positional[tuple[Path, ...]], Help(metavar="RUN...", help="Folders of the runs.")
    ] = ()
    out: Annotated[
        Path | None,
        Help(help="Folder for figures that compare runs. Unset: RUN/figures, or figures/."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Toy:
    """Draw Fig. 1: random embeddings, the hardest negatives, and the points mixed from them."""

    out: Annotated[Path, Help(help="Folder for fig1.svg, fig1.png and fig1.json.")] = Path(
        "figures"
    )
    seed: int = 0
    """Seed of the embeddings and of the mixing."""
    dim: Annotated[int, Help(help="Dimensions of the embeddings.")] = 32
    num_memory: Annotated[int, Help(help="K: number of negatives.")] = 512
    num_hardest: Annotated[int, Help(help="N: hardest negatives, which are mixed.")] = 64
    num_pairs: Annotated[int, Help(help="s: points that mix two hard negatives.")] = 64
    num_with_query: Annotated[
        int, Help(help="s': points that mix a hard negative with the query.")
    ] = 32


def analyze(line: CommandLine) -> None:
    """Draw the paper's figures for one or more runs."""
    options = parse(Analyze, "analyze", line)
    from hardmix.analysis.analyze import analyze as draw

    draw(options.runs, options.out)


def toy(line: CommandLine) -> None:
    """Draw Fig. 1: synthetic points on a toy sphere."""
    options = parse(Toy, "toy", line)
    counts = [each.name for each in fields(options) if each.name not in ("out", "seed")]
    check_between(
        options, "toy", 0, 10**6, *counts
    )  # one by one they are judged where they are used
    check_at_least(options, "toy", seed=0)
    from hardmix.analysis.analyze import toy as draw

    draw(**asdict(options))


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write a self-contained HTML report of runs: hardmix report RUN [RUN ...] --out FILE.

    It shows the results that exist: run `hardmix knn` and `linear` first. Similar images, map and
    gallery are made if they are missing, which needs the runs' encoders and images.
    """

    runs: Annotated[
        tyro.conf.Positional[tuple[Path, ...]], Help(metavar="RUN...", help="Folders of the runs.")
    ] = ()
    out: Annotated[Path, Help(help="HTML file to write; overwritten if it exists.")] = Path(
        "report.html"
    )
    look: Annotated[
        bool, Help(help="Make similar images, map and gallery of up to 4 runs if missing.")
    ] = True


def report(line: CommandLine) -> None:
    """Write an HTML report of one or more runs."""
    options = parse(Report, "report", line)
    if not options.runs:
        raise InputError("name at least one run: hardmix report RUN [RUN ...] --out report.html.")
    from hardmix.report.page import write_report

    write_report(options.runs, options.out, look=options.look)
