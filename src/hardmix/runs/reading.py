"""The only reader of run folders: figures, reports and sweeps see a run as a `RunRecord`.

Nothing here raises. Folders may be incomplete, of an older version, or made by another program:
what cannot be read is reported in a sentence, every value is checked before it is used, and no
missing setting is guessed. Each file is read once.
"""

import math
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from hardmix.errors import InputError
from hardmix.runs.folder import Run, logged_objects
from hardmix.runtime.files import read_json, read_lines
from hardmix.settings.config import PretrainConfig
from hardmix.settings.methods import METHOD_FACTS, method_title
from hardmix.settings.saved import FACTS, LABELS, MAY_DIFFER, build_config, own_facts, recorded


@dataclass(frozen=True)
class RunRecord:
    """The contents of a run's folder."""

    run: Run
    """The folder and the names of its files."""
    name: str
    """The folder's name, with as many parent folders as are needed to distinguish the runs."""
    label: str
    """The method and what distinguishes it from other runs; the same in all tables and figures."""
    hue: int
    """Index among the runs, which sets its colour in every figure."""
    config: PretrainConfig | None
    """None if config.json is damaged or of an incompatible version."""
    settings: dict[str, Any]
    """config.json by dotted names, as recorded by any version; empty if unreadable."""
    metrics: list[dict[str, Any]]
    hardness: list[dict[str, Any]]
    results: dict[str, dict[str, Any]]
    """Results by file name."""
    missing: list[str] = field(default_factory=list)
    """A sentence for each file that could not be read."""

    @property
    def seed(self) -> object:
        """The seed; None if it is not recorded."""
        return self.settings.get("train.seed")

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show."""
        return not (self.settings or self.metrics or self.results)


RARE = b'"knn"'
MOST_LINES, MOST_KEPT = 40_000, 32_000_000
"""Lines of a log that are kept, and their bytes; a longer log is thinned out while it is read."""


class ReadLog(NamedTuple):
    """The complete lines of a log, and the number of broken ones."""

    lines: list[dict[str, Any]]
    broken: int
    is_text: bool
    """Whether all of it is UTF-8."""
    thinned: int
    """All lines, if some of them were left out; otherwise 0."""


def several(paths: Path | str | Sequence[Path | str]) -> Sequence[Path | str]:
    """Return paths as they are, and a single one as a sequence: a string is one path."""
    return [paths] if isinstance(paths, Path | str) else paths


def read_runs(paths: Sequence[Path | str]) -> list[RunRecord]:
    """Read every run once, in the given order, with distinct names and labels."""
    unique = list({os.path.realpath(path): Path(path) for path in paths}.values())
    names = short_names(unique)
    return side_by_side([read_run(path, name) for path, name in zip(unique, names, strict=True)])


def side_by_side(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the same runs with labels and colours that distinguish them."""
    labels = label_runs([each.settings for each in records], [each.name for each in records])
    return [
        replace(record, label=label, hue=hue)
        for hue, (record, label) in enumerate(zip(records, labels, strict=True))
    ]


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return folder names, with as many parent folders as are needed to distinguish them."""
    parts = [Path(os.path.abspath(path)).parts for path in paths]
    for depth in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(each[-depth:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def read_run(path: Path, name: str | None = None) -> RunRecord:
    """Read the run in a folder as far as possible; its label is that of a single run."""
    run = Run(path)
    missing: list[str] = []
    name = short_names([path])[0] if name is None else name
    values = _read_object(run.config_file, name, missing) or {}
    settings = recorded(values)
    record = RunRecord(
        run=run,
        name=name,
        label=label_runs([settings], [name])[0],
        hue=0,
        config=_read_config(run, name, values, missing),
        settings=settings,
        metrics=read_metrics(run, name, missing),
        hardness=_read_hardness(run, name, missing),
        results=_read_results(run, name, missing),
        missing=missing,
    )
    if not record.is_empty or run.exists:
        return record
    why = "is not a run: it has no config.json" if path.is_dir() else "is not a folder"
    return replace(record, missing=[f"{path} {why}."])


def with_new_results(record: RunRecord) -> RunRecord:
    """Return the same run with its results read again."""
    return replace(record, results=_read_results(record.run, record.name, []))


def read_settings(run: Run) -> dict[str, Any]:
    """Read only the settings of config.json, as recorded; empty if it cannot be read."""
    return recorded(_read_object(run.config_file, run.path.name, []) or {})


def read_metrics(run: Run, name: str, missing: list[str]) -> list[dict[str, Any]]:
    """Read only the lines of metrics.jsonl; problems are added to `missing`."""
    try:
        log = _read_log(run.metrics_file)
    except (FileNotFoundError, NotADirectoryError):
        missing.append(f"{name}: metrics.jsonl is missing, so it has no curves.")
        return []
    except OSError as error:
        missing.append(
            f"{name}: metrics.jsonl cannot be read, so it has no curves: {error.strerror}."
        )
        return []
    if log.thinned:
        missing.append(
            f"{name}: metrics.jsonl has {log.thinned:,} lines; {len(log.lines):,} of them, at equal"
            " distances, are used."
        )
    if not log.lines:
        what = "is empty" if log.is_text else "cannot be read"
        missing.append(f"{name}: metrics.jsonl {what}, so it has no curves.")
    elif log.broken:
        lines = "line of metrics.jsonl was" if log.broken == 1 else "lines of metrics.jsonl were"
        missing.append(f"{name}: {log.broken} broken {lines} skipped.")
    return log.lines


def number(value: object) -> float | None:
    """Return a finite number, or None for anything else: NaN means no synthetic points."""
    if type(value) is float:  # nearly all of metrics.jsonl: a million of them on a large page
        return value if math.isfinite(value) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _read_log(file: Path) -> ReadLog:
    kept, total = _thinned(file)
    text = b"".join(kept).decode("utf-8", errors="replace")
    lines = [line for line in logged_objects(text) if number(line["step"]) is not None]
    written = sum(bool(line.strip()) for line in text.splitlines())
    is_text = "\N{REPLACEMENT CHARACTER}" not in text
    return ReadLog(lines, written - len(lines), is_text, total if total > len(kept) else 0)


def _thinned(file: Path) -> tuple[list[bytes], int]:
    """Return lines of a log at equal distances, as many as may be kept, and the number of all.

    The last line is kept, and so are those with k-NN accuracies, which are few and far between.
    """
    kept: list[bytes] = []
    size, distance, total, line = 0, 1, 0, b""
    for total, line in enumerate(read_lines(file), start=1):
        if (total - 1) % distance == 0 or RARE in line:
            kept.append(line)
            size += len(line)
        while len(kept) > MOST_LINES or size > MOST_KEPT:
            few = [each for place, each in enumerate(kept) if place % 2 == 0 or RARE in each]
            kept = few if len(few) < 0.9 * len(kept) else kept[::2]
            size, distance = sum(map(len, kept)), 2 * distance
    if kept and kept[-1] is not line:
        kept.append(line)
    return kept, total


def _read_hardness(run: Run, name: str, missing: list[str]) -> list[dict[str, Any]]:
    """Read hardness.jsonl; its absence is reported by the figures that need it."""
    try:
        return _read_log(run.hardness_file).lines
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        missing.append(f"{name}: hardness.jsonl cannot be read: {error.strerror}.")
        return []


def _read_results(run: Run, name: str, missing: list[str]) -> dict[str, dict[str, Any]]:
    found = {}
    for file in sorted(run.results.glob("*.json")) if run.results.is_dir() else []:
        result = _read_object(file, name, missing)
        if result is not None:
            found[file.stem] = result
    return found


def _read_object(file: Path, name: str, missing: list[str]) -> dict[str, Any] | None:
    """Read a JSON object; on failure, return None and add a sentence to `missing`."""
    where = f"{name}: {file.parent.name + '/' if file.parent.name == 'results' else ''}{file.name}"
    try:
        value = read_json(file)
    except FileNotFoundError:
        missing.append(f"{where} is missing.")
        return None
    except OSError as error:
        missing.append(f"{where} cannot be read: {error.strerror}.")
        return None
    except ValueError:
        missing.append(f"{where} is damaged: it cannot be read as JSON.")
        return None
    if not isinstance(value, dict):
        missing.append(f"{where} is not a JSON object.")
        return None
    return value


def _read_config(
    run: Run, name: str, values: dict[str, Any], missing: list[str]
) -> PretrainConfig | None:
    """Return the config if this version can read it; problems are added to `missing`."""
    if not values:
        missing.append(f"{name} is labelled only by its folder.")
        return None
    missing.extend(_unknown_settings(name, recorded(values)))
    try:
        return build_config(values, str(run.config_file))
    except (InputError, TypeError, ValueError) as error:
        missing.append(f"{name}: its settings are invalid: {error}")
        return None


def _unknown_settings(name: str, settings: dict[str, Any]) -> list[str]:
    known = known_settings(settings)
    own = own_facts(settings.get("method"))
    free = {each for each, facts in own.items() if not facts.identity}
    unknown = sorted(settings.keys() - known)
    absent = sorted(
        each for each in known - settings.keys() - MAY_DIFFER - free if method_uses(settings, each)
    )
    sentences = []
    if unknown:
        sentences.append(
            f"{name}: this version does not know {', '.join(unknown)}; shown as recorded."
        )
    if absent:
        sentences.append(
            f"{name}: an older version did not record {', '.join(absent)}; it is only grouped with"
            " runs that lack them, too."
        )
    return sentences


UNSAID = ("mochi", "keep", None)
"""Values that are not shown: the paper's own mixing, and unset values."""


def method_uses(settings: Mapping[str, Any], name: str, *, unknown: bool = True) -> bool:
    """Return whether the method uses a setting; `unknown` for one this version lacks."""
    method = settings.get("method")
    facts = METHOD_FACTS.get(method) if isinstance(method, str) else None
    return unknown if facts is None else facts.uses(name)


def known_settings(settings: Mapping[str, Any]) -> set[str]:
    """Return the names of all settings that this version knows for a run's method."""
    return FACTS.keys() | own_facts(settings.get("method")).keys()


def identity(settings: Mapping[str, Any], *, pooled: Collection[str] = ()) -> dict[str, Any]:
    """Return the settings that identify a run, without those that its method does not use.

    `pooled` settings are omitted too: runs that differ only in these are grouped.
    """
    own = own_facts(settings.get("method"))
    free = {name for name, facts in own.items() if not facts.identity}
    return {
        name: value
        for name, value in settings.items()
        if name not in MAY_DIFFER
        and name not in free
        and name not in pooled
        and method_uses(settings, name)
    }


def label_runs(
    settings: Sequence[Mapping[str, Any]], names: Sequence[str], *, pooled: Collection[str] = ()
) -> list[str]:
    """Return a unique label for each run, the same in tables and figures.

    It consists of the method, the settings in which the run differs from others of that method,
    and its name if that is not enough. A run without known settings is labelled by its name.
    `pooled` settings are not used, so that a label can stand for several seeds.
    """
    known = [{k: v for k, v in each.items() if k not in pooled} for each in settings]
    titles = [method_title(each) if each else name for each, name in zip(known, names, strict=True)]
    labels = tell_apart(titles, known)
    count = Counter(labels)
    return [
        f"{label}, {name}" if count[label] > 1 else label
        for label, name in zip(labels, names, strict=True)
    ]


def tell_apart(labels: Sequence[str], settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Extend equal labels by the settings that differ: "MoCHi (256, 256, 32), K = 1024".

    Labels stay equal if the runs differ in no setting that has a label and that the method uses.
    """
    told = []
    for label, own in zip(labels, settings, strict=True):
        same = [each for other, each in zip(labels, settings, strict=True) if other == label]
        of_method = own_facts(own.get("method"))
        words = LABELS | {k: facts.label for k, facts in of_method.items() if facts.label}
        parts = [
            text.format(own[name])
            for name, text in words.items()
            if name in own
            and own[name] not in UNSAID
            and any(each.get(name) != own[name] for each in same)
            and method_uses(own, name)
        ]
        told.append(", ".join([label, *parts]))
    return told
