"""A run's folder as plain numbers. Nothing here raises: what is missing becomes a sentence.

Folders may be half-written, of an older version, or made by somebody else: every value is checked
before it is used, and no setting is filled in by a guess.
"""

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hardmix.runs.folder import Run
from hardmix.settings.config import PretrainConfig
from hardmix.settings.saved import MAY_CHANGE

METHOD_NAMES = {
    "moco-v1": "MoCo",
    "moco-v2": "MoCo-v2",
    "mochi": "MoCHi",
    "supervised": "supervised",
}

NOT_THE_RUN = MAY_CHANGE - {"train.epochs", "train.stop_epoch", "data.root"}
"""Settings that change nothing in what is trained: device, logging, workers."""


@dataclass(frozen=True)
class RunFacts:
    """What a run's folder tells; `settings` are config.json's, by their dotted names."""

    name: str
    run: Run
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    results: dict[str, dict[str, Any]]
    missing: list[str] = field(default_factory=list)

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting by its dotted name, as on the command line but for the dashes."""
        return flatten(self.config)

    @property
    def seed(self) -> object:
        """None: not recorded."""
        return self.settings.get("train.seed")

    @property
    def label(self) -> str:
        """The method in the paper's words, with (N, s, s') where it mixes."""
        return method_label(self.settings)

    @property
    def is_empty(self) -> bool:
        """Nothing in it can be shown."""
        return not (self.config or self.metrics or self.results)


def read_runs(paths: Sequence[Path]) -> list[RunFacts]:
    """Every run once, in the order given, each with a name of its own."""
    unique = list({os.path.realpath(path): path for path in paths}.values())
    return [read_run(path, name) for path, name in zip(unique, short_names(unique), strict=True)]


def short_names(paths: Sequence[Path]) -> list[str]:
    """The folder's name; with as many folders above it as tell the runs apart."""
    parts = [Path(os.path.abspath(path)).parts for path in paths]
    for depth in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(each[-depth:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def read_run(path: Path, name: str) -> RunFacts:
    """The run in a folder, as far as it can be read."""
    run = Run(path)
    missing: list[str] = []
    if not path.is_dir():
        return RunFacts(name, run, {}, [], {}, [f"{path} is not a folder."])
    config = _read_object(run.config_file, name, missing)
    metrics = _read_metrics(run, name, missing)
    results = _read_results(run, name, missing)
    facts = RunFacts(name, run, config or {}, metrics, results, missing)
    if facts.is_empty:
        return RunFacts(name, run, {}, [], {}, [f"{path} is not a run: it has no config.json."])
    missing += _unknown_settings(facts)
    missing += _unlabelled(facts)
    missing += _unfinished(facts)
    missing += _stale_results(facts)
    return facts


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """{"train": {"seed": 0}} as {"train.seed": 0}."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{inner}": each for inner, each in value.items()}
        else:
            flat[name] = value
    return flat


def method_label(settings: Mapping[str, Any]) -> str:
    """MoCHi (N, s, s'), MoCo-v2, ..., with the oracle named."""
    method = settings.get("method", "unknown method")
    label = METHOD_NAMES.get(method, method) if isinstance(method, str) else str(method)
    if method == "mochi":
        counts = (
            settings.get(f"mix.num_{each}", "?") for each in ("hardest", "pairs", "with_query")
        )
        label += f" ({', '.join(map(str, counts))})"
    return f"{label}, oracle" if settings.get("oracle") is True else label


def number(value: object) -> float | None:
    """A finite number, or None for all else: NaN stands where there were no synthetic points."""
    if type(value) is float:  # nearly all of metrics.jsonl: a million of them on a large page
        return value if math.isfinite(value) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def read_json(file: Path) -> Any:
    """Any JSON file; ValueError or OSError where it is none (deep nesting counts as none)."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _read_object(file: Path, name: str, missing: list[str]) -> dict[str, Any] | None:
    """A JSON object, or None and a sentence."""
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
        missing.append(f"{where} is not whole: it cannot be read as JSON.")
        return None
    if not isinstance(value, dict):
        missing.append(f"{where} holds no settings or numbers by name.")
        return None
    return value


def _read_metrics(run: Run, name: str, missing: list[str]) -> list[dict[str, Any]]:
    try:
        lines = [line for line in run.metrics() if isinstance(line, dict)]
        written = sum(bool(line.strip()) for line in run.metrics_file.open(encoding="utf-8"))
    except FileNotFoundError:
        missing.append(f"{name}: metrics.jsonl is missing, so it has no curves.")
        return []
    except (OSError, ValueError, RecursionError):
        missing.append(f"{name}: metrics.jsonl cannot be read, so it has no curves.")
        return []
    whole = [line for line in lines if number(line.get("step")) is not None]
    if not whole:
        missing.append(f"{name}: metrics.jsonl is empty, so it has no curves.")
    elif len(whole) < written:
        broken = written - len(whole)
        words = (
            "broken line of metrics.jsonl was"
            if broken == 1
            else "broken lines of metrics.jsonl were"
        )
        missing.append(f"{name}: {broken} {words} left out.")
    return whole


def _read_results(run: Run, name: str, missing: list[str]) -> dict[str, dict[str, Any]]:
    found = {}
    for file in sorted(run.results.glob("*.json")) if run.results.is_dir() else []:
        result = _read_object(file, name, missing)
        if result is not None:
            found[file.stem] = result
    if not set(found) - {"pretrain", "embedding"}:
        missing.append(f"{name}: no evaluation yet; try hardmix knn and hardmix linear.")
    return found


def _unknown_settings(facts: RunFacts) -> list[str]:
    known = set(flatten(dataclasses.asdict(PretrainConfig())))
    unknown = sorted(set(facts.settings) - known)
    absent = sorted(known - set(facts.settings) - NOT_THE_RUN)
    sentences = []
    if facts.config and unknown:
        sentences.append(
            f"{facts.name}: this version does not know {', '.join(unknown)}; shown as recorded."
        )
    if facts.config and absent:
        sentences.append(
            f"{facts.name}: an older version did not record {', '.join(absent)}; so it is grouped"
            " only with runs that lack the same."
        )
    return sentences


def _unlabelled(facts: RunFacts) -> list[str]:
    seen = {name for line in facts.metrics for name in line}
    if not facts.metrics or facts.config.get("method") == "supervised":
        return []
    if "false_negatives_top" in seen or "knn" in seen:
        return []
    return [f"{facts.name}: its images have no labels, so no false negatives and no k-NN."]


def _unfinished(facts: RunFacts) -> list[str]:
    planned = [facts.settings.get(f"train.{name}") for name in ("epochs", "stop_epoch")]
    last = min((n for n in planned if isinstance(n, int)), default=None)
    reached = [number(line.get("epoch")) for line in facts.metrics]
    done = max((int(n) + 1 for n in reached if n is not None), default=0)
    if last is None or done == 0 or "pretrain" in facts.results:
        return []
    return [f"{facts.name}: training has not ended (epoch {done} of {last})."]


def _stale_results(facts: RunFacts) -> list[str]:
    """Results written before the run went on with other epochs."""
    sentences = []
    for name, result in facts.results.items():
        measured = result.get("run")
        if not isinstance(measured, dict) or not facts.config:
            continue
        then, now = flatten(measured), facts.settings
        for setting in ("train.epochs", "train.stop_epoch"):
            if setting in then and then[setting] != now.get(setting):
                sentences.append(
                    f"{facts.name}: results/{name}.json was measured when {setting} was"
                    f" {then[setting]}; it is {now.get(setting)} now."
                )
    return sentences
