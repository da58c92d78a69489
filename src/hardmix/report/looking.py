"""Completes what a report shows first: neighbours, map and gallery of runs that lack them.

They need a run's encoder and images. Pictures that are up to date are not made again; those that
cannot be made are reported.
"""

from collections.abc import Callable, Sequence

from hardmix.analysis.picture import Found, check_installed, save
from hardmix.errors import InputError, UnnamedCodeError
from hardmix.report.grouping import group_runs
from hardmix.report.run_figures import first_seeds_first
from hardmix.report.sentences import NOT_MADE
from hardmix.runs.folder import Run
from hardmix.runs.reading import RunRecord
from hardmix.runtime.console import say

MOST_RUNS = 4
"""Most runs that are completed, one of each row before a second of any."""


def look_at_runs(records: Sequence[RunRecord]) -> list[str]:
    """Make the missing pictures; returns sentences about those that cannot be made."""
    runs = [run for _, run in first_seeds_first(group_runs(records)) if run.config is not None]
    missing: list[str] = []
    for record in runs[:MOST_RUNS]:
        missing += look_at(record.run)
    return missing


def look_at(run: Run, *, live: bool = False) -> list[str]:
    """Do so for one run; while it trains (`live`), from fewer images and without a map."""
    # Imported here: torchvision takes seconds to import, and a report of files needs no images.
    from hardmix.analysis.embedding import look_at_features
    from hardmix.analysis.gallery import look_at_queue
    from hardmix.explore.neighbour_sheets import write_feature_gallery

    if not (run.encoder_file.exists() or run.checkpoints.is_dir()):
        return []
    say(f"Looking at the images of {run.path} ...")
    missing = _tried("neighbours", run, lambda: write_feature_gallery(run, live=live))
    missing += [] if live else _tried("map", run, lambda: _drawn(run, look_at_features))
    return missing + _tried("gallery", run, lambda: _drawn(run, look_at_queue))


def _drawn(run: Run, draw: Callable[[Run], Found]) -> None:
    check_installed()
    pictures, _ = draw(run)
    for picture in pictures:
        if picture.figure is not None:
            save(picture, run.figures)


def _tried(pictures: str, run: Run, make: Callable[[], object]) -> list[str]:
    try:
        make()
    except UnnamedCodeError:
        raise
    except (InputError, OSError) as error:
        return [NOT_MADE.format(pictures=pictures, path=run.path, reason=error)]
    return []
