"""What was run on which data, in one paragraph and one small table."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hardmix.report.grouping import SeedGroup
from hardmix.report.provenance import shown
from hardmix.runs.labels import method_uses
from hardmix.runs.reading import RunRecord, number

FEW = 3
"""Most methods named in a title; beyond this they are only counted."""

MOST_EPOCHS = 10**9
"""More cannot be meant."""


@dataclass(frozen=True)
class RunRow:
    """A row of the table of runs; unknown values are empty."""

    name: str
    group: int
    label: str
    seed: str
    data: str
    backbone: str
    epochs: str
    loss: str
    time: str
    path: str


def title_of(groups: Sequence[SeedGroup]) -> str:
    """Return a title of methods and data."""
    labels = [group.label for group in groups]
    methods = _and(labels)
    if len(labels) > FEW:
        names = [label.partition(" (")[0].partition(",")[0] for label in labels]
        methods = f"{_and(list(dict.fromkeys(names)))} in {len(groups)} settings"
    data = _data_names(run for group in groups for run in group.runs)
    return f"{methods} on {_and(data)}" if data else methods


def paragraph_of(groups: Sequence[SeedGroup]) -> str:
    """Return a paragraph: how many runs, what was trained, on what data, for how long."""
    runs = [run for group in groups for run in group.runs]
    named = [f"{group.label} ({_count(len(group.runs), 'seed')})" for group in groups]
    sentences = [f"{_count(len(runs), 'run')}: {_and(named)}."]
    data = _data_names(runs)
    if data:
        counts = list(dict.fromkeys(filter(None, (images_of(run) for run in runs))))
        sizes = [f"{text} pixels" for text in _texts(runs, "data.image_size")]
        inside = " of ".join(_or(words) for words in (counts, sizes) if words)
        sentences.append(f"Trained on {_and(data)}{f' ({inside})' if inside else ''}.")
    backbones = [f"\u201c{name}\u201d" for name in _texts(runs, "model.backbone")]
    epochs = list(dict.fromkeys(filter(None, (planned_epochs(run) for run in runs))))
    if backbones and epochs:
        batches, queues = (_texts(runs, f"train.{name}_size") for name in ("batch", "queue"))
        queue = f", a queue of {_or(queues)} keys" if queues else ""
        sentences.append(
            f"Backbone {_or(backbones)}, {_or(epochs)} epochs, batches of {_or(batches)}{queue}."
        )
    if any(method_uses(run.settings, "mix.num_pairs", unknown=False) for run in runs):
        sentences.append(
            "MoCHi (N, s, s') mixes the N hardest negatives of a query: s points from two of them,"
            " s' points from one and the query itself."
        )
    return " ".join(sentences)


def run_rows(groups: Sequence[SeedGroup]) -> list[RunRow]:
    """Return a row for every run."""
    return [_row(group, run) for group in groups for run in group.runs]


def data_of(run: RunRecord) -> str:
    """Return the data set's name, or its folder's."""
    name, root = run.settings.get("data.name"), run.settings.get("data.root")
    if isinstance(name, str) and name not in ("folder", "list", "shards"):
        return name
    return folder_name(root) if isinstance(root, str) else ""


def folder_name(root: str) -> str:
    """Return a folder's name, with the one above it if the name alone says nothing."""
    parts = Path(root).parts
    words = parts[-2:] if Path(root).name in ("train", "images", "photos") else parts[-1:]
    return "/".join(words).replace("//", "/") or root


def images_of(run: RunRecord) -> str:
    """Return the number of training images in words; empty if unknown."""
    counts = [run.settings.get("data.num_images"), run.results.get("knn", {}).get("train")]
    known = next((count for count in counts if isinstance(count, int)), None)
    return "" if known is None else f"{known:,} images"


def planned_epochs(run: RunRecord) -> str:
    """Return the number of epochs to train, as text."""
    planned = [run.settings.get(f"train.{name}") for name in ("epochs", "stop_epoch")]
    known = [count for count in planned if type(count) is int and 0 <= count < MOST_EPOCHS]
    return str(min(known)) if known else ""


def duration(seconds: float) -> str:
    """Return a duration such as 3 s, 4.5 min or 2.1 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _row(group: SeedGroup, run: RunRecord) -> RunRow:
    losses = [number(line.get("loss")) for line in run.metrics]
    loss = next((value for value in reversed(losses) if value is not None), None)
    seconds = number(run.results.get("pretrain", {}).get("seconds"))
    reached = [number(line.get("epoch")) for line in run.metrics]
    done = max((int(value) + 1 for value in reached if value is not None), default=0)
    planned = planned_epochs(run)
    data = [data_of(run), images_of(run)]
    return RunRow(
        name=run.name,
        group=group.number,
        label=run.label,
        seed="" if run.seed is None else shown(run.seed),
        data=", ".join(filter(None, data)),
        backbone=shown(run.settings.get("model.backbone", "")),
        epochs=f"{done} of {planned}" if planned and str(done) != planned else planned or str(done),
        loss="" if loss is None else f"{loss:.3f}",
        time="" if seconds is None else duration(seconds),
        path=str(run.run.path),
    )


def _data_names(runs: Iterable[RunRecord]) -> list[str]:
    return list(dict.fromkeys(filter(None, map(data_of, runs))))


def _texts(runs: Sequence[RunRecord], setting: str) -> list[str]:
    """Return the distinct values of a setting among runs whose method uses it."""
    values = [
        run.settings[setting]
        for run in runs
        if setting in run.settings and method_uses(run.settings, setting)
    ]
    return list(dict.fromkeys(shown(value) for value in values))


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _and(words: Sequence[str]) -> str:
    return _list(words, "and")


def _or(words: Sequence[str]) -> str:
    return _list(words, "or") or "unknown"


def _list(words: Sequence[str], last: str) -> str:
    return f" {last} ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
