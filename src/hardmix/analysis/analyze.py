"""`hardmix analyze RUN...`: the paper's figures and more, for any runs.

Figures of one run are written to RUN/figures, those that compare runs to a separate folder. A
figure that cannot be drawn is reported.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hardmix.analysis.accuracy_grids import embedding_space, grid_pictures
from hardmix.analysis.hardness import matching_probabilities, similarities
from hardmix.analysis.over_training import false_negatives, proxy_task
from hardmix.analysis.picture import Found, Picture, check_installed, save
from hardmix.errors import InputError, UnnamedCodeError
from hardmix.runs.folder import Run
from hardmix.runs.reading import RunRecord, read_runs, several, with_new_results
from hardmix.runtime.console import say, warn


@dataclass(frozen=True)
class Analysis:
    """The pictures that `analyze` drew, and what it could not draw."""

    pictures: list[tuple[Path, Picture]] = field(default_factory=list)
    """Pictures, each with the folder it was written to."""
    missing: list[str] = field(default_factory=list)
    """Sentences about what is missing."""


def analyze(runs: Path | str | Sequence[Path | str], out: Path | str | None = None) -> Analysis:
    """Draw and write every figure of one or more runs.

    `out` is the folder of figures that compare runs; None means RUN/figures for a single run,
    otherwise figures/.
    """
    check_installed()
    opened = [Run.open(path) for path in dict.fromkeys(Path(path) for path in several(runs))]
    if not opened:
        raise InputError("name at least one run: hardmix analyze RUN [RUN ...].")
    folder = Path(out) if out else (opened[0].figures if len(opened) == 1 else Path("figures"))
    try:
        folder.mkdir(parents=True, exist_ok=True)  # fail before the work, not after
    except OSError as error:
        raise InputError(f"out={folder} cannot be created: {error.strerror}.") from error
    analysis = Analysis()
    records = read_runs([run.path for run in opened])
    for record in records:
        pictures, missing = portray(record)
        _write(analysis, record.run.figures, pictures)
        analysis.missing.extend(missing)
    # The records are read again, because alignment and uniformity were measured just now.
    pictures, missing = compare([with_new_results(record) for record in records])
    _write(analysis, folder, pictures)
    analysis.missing.extend(sentence for sentence in missing if sentence not in analysis.missing)
    for sentence in analysis.missing:
        warn(sentence)
    return analysis


def compare(records: Sequence[RunRecord]) -> Found:
    """Draw the figures that compare runs, from their metrics and results; never raises.

    `hardmix.runs.reading.read_runs` makes records of folders.
    """
    try:
        check_installed()
    except InputError as error:
        return [], [str(error)]
    missing = [sentence for record in records for sentence in record.missing]
    pictures: list[Picture] = []
    for name, draw in _COMPARISONS.items():
        try:
            drawn, sentences = draw(records)
        except Exception as error:  # a faulty number in one run must not prevent the page
            drawn, sentences = [], [f"{name} cannot be drawn: {type(error).__name__}: {error}."]
        pictures.extend(drawn)
        missing.extend(sentences)
    return pictures, missing


def portray(record: RunRecord) -> Found:
    """Draw the figures of one run; those of its encoder and images are drawn only once."""
    # Imported here: torchvision takes seconds to import, and a report needs no images.
    from hardmix.analysis.embedding import look_at_features
    from hardmix.analysis.gallery import look_at_queue

    run = record.run
    pictures, missing = sketch(record)
    for name, look in {"map and spectrum": look_at_features, "gallery": look_at_queue}.items():
        try:
            drawn, sentences = look(run)
        except UnnamedCodeError:
            raise
        except (InputError, OSError) as error:
            drawn, sentences = [], [f"No {name} of {run.path}: {error}"]
        pictures.extend(drawn)
        missing.extend(sentences)
    return pictures, missing


def sketch(record: RunRecord) -> Found:
    """Draw the figures of one run that need no encoder: Fig. 2a and the similarities."""
    first, second = matching_probabilities([record]), similarities(record)
    return first[0] + second[0], first[1] + second[1]


def toy(out: Path, **settings: int) -> Picture:
    """Draw and write Fig. 1, as `hardmix toy` does."""
    from hardmix.analysis.toy_sphere import toy_sphere  # late, as above

    check_installed()
    picture = toy_sphere(**settings)
    _write(Analysis(), out, [picture])
    return picture


def _write(analysis: Analysis, folder: Path, pictures: Sequence[Picture]) -> None:
    written = {(where, picture.name) for where, picture in analysis.pictures}
    for picture in pictures:
        if (folder, picture.name) in written:
            continue
        if picture.figure is None:
            say(f"{folder / picture.name}: up to date")
        else:
            say(f"Wrote {', '.join(str(file) for file in save(picture, folder))}")
        analysis.pictures.append((folder, picture))


_COMPARISONS: dict[str, Callable[[Sequence[RunRecord]], Found]] = {
    "Fig. 2a": matching_probabilities,
    "Fig. 2b": proxy_task,
    "Fig. 2c": false_negatives,
    "Fig. 3a and 3b": grid_pictures,
    "Fig. 3c": embedding_space,
}
