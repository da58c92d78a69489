"""`hardmix explore` and `hardmix watch`: pages to look at images, and at a run that trains."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from hardmix.commands import argv
from hardmix.commands.options import Help, RunFolder, data_field, data_of, make_options, parse

ABOUT = """Duplicates, clusters, outliers and neighbours: hardmix explore RUN [--data.root DIR].

One page to look at, and CSV files in a folder of its name beside it.
"""


def explore(arguments: list[str]) -> None:
    """Duplicates, clusters, outliers, neighbours: a page and CSV files."""
    own = argv.data_of_run(arguments)
    fields = [
        ("run", RunFolder),
        (
            "out",
            Annotated[Path, Help(help="the page; an earlier one is replaced")],
            field(default=Path("explore.html")),
        ),
        (
            "clusters",
            Annotated[int | None, Help(help="how many; unset: by the number of images")],
            field(default=None),
        ),
        (
            "similarity",
            Annotated[float, Help(help="of near-duplicates' features, at least: a cosine")],
            field(default=0.8),
        ),
        (
            "edges",
            Annotated[float, Help(help="the same of the edges in their small pictures")],
            field(default=0.9),
        ),
        (
            "query",
            Annotated[tuple[Path, ...], Help(help="images from elsewhere to find the like of")],
            field(default=()),
        ),
        ("seed", Annotated[int, Help(help="of the clusters")], field(default=0)),
        data_field(own, arguments),
    ]
    options = parse(make_options("Explore", ABOUT, fields), "explore", arguments)
    from hardmix.explore.exploring import ExploreOptions
    from hardmix.report.explore_page import write_explore_page

    wanted = ExploreOptions(
        num_clusters=options.clusters,
        similarity=options.similarity,
        edges=options.edges,
        queries=options.query,
        seed=options.seed,
    )
    write_explore_page(options.run, data_of(options.data, own), options.out, wanted)


@dataclass(frozen=True, kw_only=True)
class Watch:
    """The report of a run that is still training, in your browser: hardmix watch RUN.

    Served to this machine alone, and refreshed from the run's files. Ctrl-C ends it; the run goes
    on.
    """

    run: RunFolder
    port: Annotated[int, Help(help="of the address; 0: any free one")] = 8717


def watch(arguments: list[str]) -> None:
    """The report of a run that is still training."""
    options = parse(Watch, "watch", arguments)
    from hardmix.report.watch import watch_run

    watch_run(options.run, options.port)
