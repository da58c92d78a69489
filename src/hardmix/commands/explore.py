"""`hardmix explore` and `hardmix watch`: pages about images, and about a run in progress."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from hardmix.commands.argv import CommandLine, data_of_run
from hardmix.commands.options import Help, RunFolder, data_field, data_of, make_options, parse

ABOUT = """Find duplicates, clusters, outliers and neighbours: hardmix explore RUN [options].

Writes an HTML page, and CSV files to a folder of the same name next to it.
"""


def explore(line: CommandLine) -> None:
    """Find duplicates, clusters, outliers and neighbours among images."""
    own = data_of_run(line)
    fields = [
        ("run", RunFolder),
        (
            "out",
            Annotated[Path, Help(help="HTML file to write; overwritten if it exists.")],
            field(default=Path("explore.html")),
        ),
        (
            "clusters",
            Annotated[
                int | None, Help(help="Number of clusters. Unset: from the number of images.")
            ],
            field(default=None),
        ),
        (
            "similarity",
            Annotated[float, Help(help="Smallest cosine similarity of near-duplicates.")],
            field(default=0.8),
        ),
        (
            "edges",
            Annotated[float, Help(help="Smallest similarity of the edges in their thumbnails.")],
            field(default=0.9),
        ),
        (
            "query",
            Annotated[tuple[Path, ...], Help(help="Images to find similar ones of.")],
            field(default=()),
        ),
        ("seed", Annotated[int, Help(help="Seed of the clustering.")], field(default=0)),
        data_field(own, line),
    ]
    options = parse(make_options("Explore", ABOUT, fields), "explore", line)
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
    """Serve the report of a run that is still training: hardmix watch RUN.

    The page is available on this machine only, at an address with a random token, and follows the
    run's files. After each checkpoint,
    its galleries are drawn at low priority. Ctrl-C stops the server; the run continues.
    """

    run: RunFolder
    port: Annotated[int, Help(help="Port of the server; 0: any free port.")] = 8717
    look: Annotated[bool, Help(help="Draw similar images and hardest negatives.")] = True


def watch(line: CommandLine) -> None:
    """Show the report of a run that is still training in a browser."""
    options = parse(Watch, "watch", line)
    from hardmix.report.watch import watch_run

    watch_run(options.run, options.port, look=options.look)
