"""The command that puts runs on one page. See cli.py."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from hardmix.errors import InputError

Help = tyro.conf.arg


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
    options = tyro.cli(Report, prog="hardmix report", args=arguments)
    if not options.runs:
        raise InputError("no run is named: hardmix report RUN [RUN ...] --out report.html.")
    from hardmix.report.page import write_report

    write_report(options.runs, options.out)
