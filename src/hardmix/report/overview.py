"""The overview of runs and data: a paragraph, verdicts, tables, commands, missing results."""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hardmix.report import sentences
from hardmix.report.evaluation_tables import NO_EVALUATIONS
from hardmix.report.grouping import SeedGroup
from hardmix.report.run_figures import first_seeds_first
from hardmix.report.sentences import counted, listed
from hardmix.runs.reading import RunRecord, method_uses, number
from hardmix.runs.summary import Verdict, data_of, num_images_of, stale_results, verdict_of
from hardmix.runtime.console import duration

FEW = 3
"""Most methods named in a title; beyond this they are only counted."""

MOST_EPOCHS = 10**9
"""A larger number in a file is damage."""


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


def is_for_owner(runs: Sequence[RunRecord]) -> bool:
    """Return whether the page is for the owner of the images, not for a reader of the paper."""
    return all(run.settings.get("recipe") == "photos" for run in runs)


def title_of(groups: Sequence[SeedGroup]) -> str:
    """Return a title of methods and data; of the folder alone for its owner."""
    runs = [run for group in groups for run in group.runs]
    if is_for_owner(runs) and (names := _data_names(runs)):
        return sentences.OWN_IMAGES.format(data=listed(names))
    labels = [group.label for group in groups]
    methods = listed(labels)
    if len(labels) > FEW:
        names = [label.partition(" (")[0].partition(",")[0] for label in labels]
        methods = f"{listed(list(dict.fromkeys(names)))} in {len(groups)} settings"
    data = _data_names(run for group in groups for run in group.runs)
    return f"{methods} on {listed(data)}" if data else methods


def paragraph_of(groups: Sequence[SeedGroup]) -> str:
    """Return a paragraph: how many runs, what was trained, on what data, for how long."""
    runs = [run for group in groups for run in group.runs]
    methods = [f"{group.label} ({counted(len(group.runs), 'seed')})" for group in groups]
    paragraph = [sentences.RUNS.format(runs=counted(len(runs), "run"), methods=listed(methods))]
    if data := _data_names(runs):
        paragraph.append(sentences.TRAINED_ON.format(data=listed(data), sizes=_sizes(runs)))
    backbones = [f"\u201c{name}\u201d" for name in _settings(runs, "model.backbone")]
    epochs = list(dict.fromkeys(filter(None, (planned_epochs(run) for run in runs))))
    if backbones and epochs:
        batches, queues = (_settings(runs, f"train.{name}_size") for name in ("batch", "queue"))
        template = sentences.NETWORK_AND_QUEUE if queues else sentences.NETWORK
        paragraph.append(
            template.format(
                backbones=listed(backbones, "or"),
                epochs=listed(epochs, "or"),
                batches=listed(batches, "or") or "unknown",
                queues=listed(queues, "or"),
            )
        )
    if any(method_uses(run.settings, "mix.num_pairs", unknown=False) for run in runs):
        paragraph.append(sentences.MOCHI)
    return " ".join(paragraph)


class RunVerdict(NamedTuple):
    """The value of a run's pre-training in words, under the run's name and colour."""

    run: str
    label: str
    group: int
    said: Verdict


def verdicts_of(groups: Sequence[SeedGroup], missing: list[str]) -> list[RunVerdict]:
    """Return the verdicts of the runs that have one; older runs have none."""
    verdicts = []
    for group, run in first_seeds_first(groups):
        if "verdict" not in run.results:
            continue
        said = verdict_of(run.results["verdict"])
        if said is None:
            missing.append(sentences.NO_VERDICT.format(run=run.name))
        else:
            verdicts.append(RunVerdict(run.name, run.label, group.number, said))
    return verdicts


def run_rows(groups: Sequence[SeedGroup]) -> list[RunRow]:
    """Return a row for every run."""
    return [_row(group, run) for group in groups for run in group.runs]


def images_of(run: RunRecord) -> str:
    """Return the number of training images in words; empty if unknown."""
    known = num_images_of(run)
    return "" if known is None else counted(known, "image")


def planned_epochs(run: RunRecord) -> str:
    """Return the number of epochs to train, as text."""
    planned = [run.settings.get(f"train.{name}") for name in ("epochs", "stop_epoch")]
    known = [count for count in planned if type(count) is int and 0 <= count < MOST_EPOCHS]
    return str(min(known)) if known else ""


def reached_epochs(run: RunRecord) -> int:
    """Return the number of epochs that the log has reached."""
    epochs = [number(line.get("epoch")) for line in run.metrics]
    return max((int(epoch) + 1 for epoch in epochs if epoch is not None), default=0)


def _row(group: SeedGroup, run: RunRecord) -> RunRow:
    losses = [number(line.get("loss")) for line in run.metrics]
    loss = next((value for value in reversed(losses) if value is not None), None)
    seconds = number(run.results.get("pretrain", {}).get("seconds"))
    done, planned = str(reached_epochs(run)), planned_epochs(run)
    data = [data_of(run), images_of(run)]
    return RunRow(
        name=run.name,
        group=group.number,
        label=run.label,
        seed="" if run.seed is None else shown(run.seed),
        data=", ".join(filter(None, data)),
        backbone=shown(run.settings.get("model.backbone", "")),
        epochs=f"{done} of {planned}" if planned not in ("", done) else done,
        loss="" if loss is None else f"{loss:.3f}",
        time="" if seconds is None else duration(seconds),
        path=str(run.run.path),
    )


def _data_names(runs: Iterable[RunRecord]) -> list[str]:
    return list(dict.fromkeys(filter(None, map(data_of, runs))))


def _sizes(runs: Sequence[RunRecord]) -> str:
    """Return the numbers of images and of pixels, in brackets; empty if neither is known."""
    numbers = list(dict.fromkeys(filter(None, (images_of(run) for run in runs))))
    pixels = [f"{text} pixels" for text in _settings(runs, "data.image_size")]
    known = " of ".join(listed(texts, "or") for texts in (numbers, pixels) if texts)
    return f" ({known})" if known else ""


def _settings(runs: Sequence[RunRecord], setting: str) -> list[str]:
    """Return the distinct values of a setting among runs whose method uses it."""
    values = [
        run.settings[setting]
        for run in runs
        if setting in run.settings and method_uses(run.settings, setting)
    ]
    return list(dict.fromkeys(shown(value) for value in values))


# -- settings and commands


NOT_RECORDED = "not recorded"


@dataclass(frozen=True)
class Command:
    """A shell command, and what it does."""

    about: str
    line: str


def shown(value: Any) -> str:
    """Return a setting's value as text."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)


def differences(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Return the settings in which the runs differ, with every run's value."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    rows = []
    for name in names:
        values = [run.settings.get(name, NOT_RECORDED) for run in runs]
        if any(value != values[0] for value in values):
            texts = [v if v is NOT_RECORDED else shown(v) for v in values]
            rows.append((name, [str(text) for text in texts]))
    return rows


def versions_of(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Return every set of versions that results were written with, and its runs."""
    by_versions: dict[str, list[str]] = {}
    for run in runs:
        for result in run.results.values():
            versions = result.get("versions")
            if isinstance(versions, dict):
                text = ", ".join(f"{name} {value}" for name, value in versions.items())
                names = by_versions.setdefault(text, [])
                if run.name not in names:
                    names.append(run.name)
    return list(by_versions.items())


def commands_of(run: RunRecord) -> list[Command]:
    """Return the commands that reproduce a run and its evaluations, in order."""
    commands = []
    if run.settings:
        again = f"{run.run.path}-again"
        words = ["hardmix", "pretrain", "--config", str(run.run.config_file), "--out", again]
        commands.append(Command("Train it again", shlex.join(words)))
    ordered = sorted(run.results.items(), key=lambda item: str(item[1].get("written", "")))
    for name, result in ordered:
        line = result.get("command")
        if isinstance(line, str) and line.strip():
            about = "Original command" if name == "pretrain" else f"results/{name}.json"
            commands.append(Command(about, line))
    return commands


# -- what is missing


def incomplete(run: RunRecord) -> list[str]:
    """Return sentences on missing evaluations or labels, unfinished training, stale results."""
    missing = _stale_results(run)
    if not (run.results.keys() - set(NO_EVALUATIONS) or "verdict" in run.results):
        missing.append(sentences.NOT_EVALUATED.format(run=run.name))
    logged = {name for line in run.metrics for name in line}
    has_queue = run.metrics and method_uses(run.settings, "train.queue_size")
    if has_queue and not logged & {"false_negatives_top", "knn"}:
        missing.append(sentences.NO_LABELS.format(run=run.name))
    planned, done = planned_epochs(run), reached_epochs(run)
    if planned and done and "pretrain" not in run.results:
        missing.append(sentences.UNFINISHED.format(run=run.name, done=done, last=planned))
    return missing


def _stale_results(run: RunRecord) -> list[str]:
    """Return sentences on results written before the run was resumed with other epochs."""
    return [sentences.STALE.format(run=run.name, **stale._asdict()) for stale in stale_results(run)]
