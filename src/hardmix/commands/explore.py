"""`hardmix explore` and `hardmix watch`: pages about images, and about a run in progress."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from hardmix.commands.argv import CommandLine, data_of_run
from hardmix.commands.options import (
    Help,
    RunFolder,
    data_field,
    data_of,
    make_options,
    option_field,
    parse,
)
from hardmix.errors import InputError
from hardmix.settings.config import DataConfig

ABOUT = """Find duplicates, flaws, clusters and outliers: hardmix explore FOLDER or RUN [options].

FOLDER is any folder of images: no training is needed. RUN is compared by its own encoder. Writes an
HTML page, and CSV files to a folder of the same name next to it.
"""


def explore(line: CommandLine) -> None:
    """Find duplicates, flaws, clusters and outliers in a folder of images."""
    bare = line.first is not None and not _is_run(Path(line.first))
    own = DataConfig() if bare else data_of_run(line)
    options = parse(make_options("Explore", ABOUT, _fields(own, line)), "explore", line)
    _check(options, bare)
    from hardmix.explore import exploring
    from hardmix.report.explore_page import write_explore_page

    wanted = exploring.ExploreOptions(
        num_clusters=options.clusters,
        agreement=options.agreement,
        groups=options.groups,
        queries=options.query,
        seed=options.seed,
    )
    data = data_of(options.data, own)
    if bare:
        found = partial(exploring.folder, options.folder, options.weights, wanted, data=data)
    else:
        found = partial(exploring.explore_run, options.folder, data, wanted)
    write_explore_page(found, options.out)


def _fields(own: DataConfig, line: CommandLine) -> list[Any]:
    """Return the options with their defaults; `own` are those of the images."""
    metavar = Help(metavar="FOLDER|RUN", help="Folder of images, or of a run.")
    return [
        ("folder", Annotated[tyro.conf.Positional[Path], metavar]),
        option_field(
            "weights",
            str | None,
            None,
            "With FOLDER: a run, a file of weights, hf:owner/name, timm, timm:NAME or torchvision."
            " Unset: plain features of colours and edges.",
        ),
        option_field(
            "out", Path, Path("explore.html"), "HTML file to write; overwritten if it exists."
        ),
        option_field(
            "clusters", int | None, None, "Number of clusters. Unset: from the number of images."
        ),
        option_field("agreement", float, 0.85, "Smallest agreement of near-duplicates, 0 to 1."),
        option_field(
            "groups",
            str | None,
            None,
            "Report copies between groups: a level of folders (1), or a regular expression on"
            " paths. Unset: between train and test, if there are such folders.",
        ),
        option_field("query", tuple[Path, ...], (), "Images to find similar ones of."),
        option_field("seed", int, 0, "Seed of the clustering."),
        data_field(own, line),
    ]


def _is_run(path: Path) -> bool:
    from hardmix.runs.folder import Run

    return Run(path).exists


def _check(options: Any, bare: bool) -> None:
    """Raise InputError if the folder is missing, or options do not belong to it."""
    if not options.folder.exists():
        raise InputError(f"{options.folder} does not exist: name a folder of images, or a run.")
    if bare and options.out.with_suffix("").resolve() == options.folder.resolve():
        raise InputError(
            f"--out={options.out} would write tables into {options.folder}, the folder of the"
            " images: choose another name."
        )
    if bare and options.data.root is not None:
        raise InputError(
            f"{options.folder} is not a run, so --data.root={options.data.root} has no meaning:"
            " name one folder of images, and the encoder by --weights RUN."
        )
    if not bare and options.weights is not None:
        raise InputError(
            f"{options.folder} is a run, which has its own encoder: remove --weights, or name a"
            " folder of images instead of the run."
        )


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
