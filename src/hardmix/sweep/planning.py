"""The plan of a sweep, made before anything starts: its runs, their names, who runs which.

DIR/sweep.json                 scale and length: the folder of another sweep is refused
DIR/job.sh                     a SLURM array that shares the sweep
DIR/configs/NAME.json          the config of every run
DIR/runs/NAME/                 one run each, named by its settings
DIR/records/NAME.json          the record of a finished run, whether its folder is kept or not
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from hardmix.errors import InputError
from hardmix.settings.config import PretrainConfig
from hardmix.settings.methods import METHOD_FACTS
from hardmix.settings.named_choices import Precision
from hardmix.settings.saved import MUST_MATCH, own_facts, settings
from hardmix.sweep.grid_rows import Row, ScaleName, comparable, config_at, describe_scale
from hardmix.sweep.grids import grid_named

MOST_SEEDS = 1000
"""Largest number of runs of a row."""

SMALL_DETECTOR = "resnet18-narrow"
"""Backbone of small runs that become detectors: `small` has no C4 stage."""

NAMING = (MUST_MATCH - {"train.seed"}) | {"train.epochs", "train.stop_epoch"}
"""Settings that make up a run's name: all that identify it, except the seed."""


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """Options of `hardmix sweep`, checked before anything is read or written."""

    grid: str
    out: Path
    scale: ScaleName = "paper"
    seeds: int = 3
    first_seed: int = 0
    only: tuple[str, ...] = ()
    index: str | None = None
    epochs: int | None = None
    num_images: int | None = None
    temperature: float | None = None
    data_root: str | None = None
    workers: int | None = None
    device: str = "auto"
    gpus_per_run: int = 1
    precision: Precision | None = None
    """Number format of training; None means fp32 at the paper's scale, else the recipe's."""
    transfer_root: str | None = None
    voc_root: Path | None = None
    coco_root: Path | None = None
    coco_schedule: Literal["1x", "2x"] = "1x"
    detector_iterations: int | None = None
    """Steps of a detector at a small scale; None means those of the schedule `short`."""
    records: Path | None = None

    def __post_init__(self) -> None:
        if self.is_own:
            self._check_own()
        if not 1 <= self.seeds <= MOST_SEEDS or self.first_seed < 0:
            raise InputError(
                f"--seeds {self.seeds} --first-seed {self.first_seed}: the number of seeds must be"
                f" between 1 and {MOST_SEEDS}, and the first seed at least 0."
            )
        self._check_small_scale()
        share_of(self.index)
        selected_rows(self)

    def _check_own(self) -> None:
        changed = self.epochs or self.num_images or self.temperature or self.precision
        if self.scale != "paper" or changed or self.detector_iterations:
            raise InputError(
                "--scale, --epochs, --num-images, --temperature, --precision and"
                " --detector-iterations are for the paper's grids: write the settings to"
                f" {self.grid}."
            )

    def _check_small_scale(self) -> None:
        counts = {
            "--epochs": self.epochs,
            "--num-images": self.num_images,
            "--detector-iterations": self.detector_iterations,
        }
        if self.scale == "paper" and (any(counts.values()) or self.temperature):
            raise InputError(
                f"{', '.join(counts)} and --temperature change the paper's settings: use them"
                " with --scale cifar10, cifar100 or shapes."
            )
        for name, value in counts.items():
            if value is not None and value < 1:
                raise InputError(f"{name} {value} must be at least 1.")
        if self.temperature is not None and not 0 < self.temperature < math.inf:
            raise InputError(
                f"--temperature {self.temperature} must be a finite number above 0: the paper uses"
                " 0.2."
            )

    @property
    def detection(self) -> dict[str, str]:
        """Result files of the evaluations by a detector, by the name of the evaluation.

        At a small scale there are only those whose images are named.
        """
        if self.scale == "paper":
            return {"voc": "detection-voc-24k", "coco": f"detection-coco-{self.coco_schedule}"}
        roots = {"voc": self.voc_root, "coco": self.coco_root}
        return {name: f"detection-{name}-short" for name, root in roots.items() if root is not None}

    @property
    def is_own(self) -> bool:
        """Whether the grid is the user's own file."""
        return grid_named(self.grid).own

    @property
    def grid_name(self) -> str:
        """Name of its tables; for a file, without folders and suffix."""
        return Path(self.grid).stem if self.is_own else self.grid

    @property
    def records_folder(self) -> Path:
        """Folder of the finished runs' records."""
        return self.out / "records" if self.records is None else self.records

    @property
    def every_seed(self) -> range:
        """Seeds of every row."""
        return range(self.first_seed, self.first_seed + self.seeds)


@dataclass(frozen=True)
class Job:
    """One run to train and evaluate."""

    name: str
    """Name of its folder."""
    config: PretrainConfig
    evaluations: tuple[str, ...]
    """Names of result files."""
    continues: str | None = None
    """The shorter finished run that it continues, if any."""


@dataclass(frozen=True)
class Plan:
    """All runs of a sweep, and the part that this process runs."""

    options: SweepOptions
    rows: tuple[Row, ...]
    chains: list[list[Job]]
    """Runs that continue each other, in order; most chains are a single run."""

    @property
    def own(self) -> list[Job]:
        """Runs of this process: every N-th chain."""
        number, parts = share_of(self.options.index)
        return [job for chain in self.chains[number - 1 :: parts] for job in chain]

    def folder(self, name: str) -> Path:
        """Return the folder of a run."""
        return self.options.out / "runs" / name


def make_plan(options: SweepOptions) -> Plan:
    """Plan the runs of the selected rows, seed by seed, so that every row gets a result early."""
    rows = selected_rows(options)
    chains = [chain for seed in options.every_seed for chain in _chains(rows, options, seed)]
    return Plan(options, rows, chains)


def selected_rows(options: SweepOptions) -> tuple[Row, ...]:
    """Return the rows whose label equals, or otherwise contains, one of the texts of --only."""
    rows = grid_named(options.grid).rows
    if not options.only:
        return rows
    labels = [row.label.casefold() for row in rows]
    chosen: set[str] = set()
    for text in (text.casefold() for text in options.only):
        chosen |= {text} if text in labels else {label for label in labels if text in label}
    found = tuple(row for row, label in zip(rows, labels, strict=True) if label in chosen)
    if not found:
        raise InputError(
            f"--only {' '.join(options.only)} does not match any label of {options.grid}: they are"
            f" {'; '.join(row.label for row in rows)}."
        )
    return found


def share_of(index: str | None) -> tuple[int, int]:
    """Return --index I/N as numbers, I from 1; (1, 1) if unset."""
    if index is None:
        return 1, 1
    number, _, parts = index.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)):
        raise InputError(f"--index {index} must be I/N with I from 1 to N, such as 2/4.")
    return int(number), int(parts)


def config_of(row: Row, options: SweepOptions, seed: int) -> PretrainConfig:
    """Return the complete config of a row's run."""
    if row.own is not None:
        config, data = row.own, row.own.data
    else:
        config = config_at(row, options.scale, options.epochs, options.temperature)
        data = replace(config.data, num_images=options.num_images)
        precision = options.precision or ("fp32" if options.scale == "paper" else "auto")
        config = replace(config, train=replace(config.train, precision=precision))
        if options.scale != "paper" and options.detection.keys() & row.evaluations:
            config = replace(config, model=replace(config.model, backbone=SMALL_DETECTOR))
    if options.workers is not None:
        data = replace(data, workers=options.workers)
    return replace(
        config,
        data=replace(data, root=options.data_root),
        # A sweep compares by its own evaluations: a verdict on each run would only take time.
        train=replace(config.train, seed=seed, device=options.device, verdict=False),
    )


def evaluations_of(row: Row, options: SweepOptions) -> tuple[str, ...]:
    """Return the result files that a row needs; proxy accuracy and cost come with the run."""
    files = dict(options.detection)
    if options.scale != "paper":
        files["linear"] = "linear-cached"
    left_out = {"proxy", "cost", "voc", "coco"} - files.keys()
    if not METHOD_FACTS[row.method].uses("train.queue_size"):
        left_out.add("queue")  # it has none
    return tuple(files.get(name, name) for name in row.evaluations if name not in left_out)


def describe(options: SweepOptions) -> tuple[bool, str, list[str]]:
    """Return whether numbers are comparable with the paper's, a sentence, and the changes."""
    grid = grid_named(options.grid)
    if grid.own:
        return False, "Your own grid: the paper has no numbers for it.", []
    first = next((row for row in grid.rows if not row.read), grid.rows[0])
    changes = describe_scale(first, options.scale, options.epochs, options.temperature)
    if options.scale != "paper" and options.detection:
        changes.append(
            f"Runs that become detectors have the backbone {SMALL_DETECTOR} instead, and detectors"
            f" the schedule short, of {options.detector_iterations or 600} steps."
        )
    if options.scale == "paper" and options.precision not in (None, "fp32"):
        return (
            False,
            (
                f"Not comparable: trained with --precision {options.precision}, not in fp32 as in"
                " the paper."
            ),
            changes,
        )
    return *comparable(options.scale), changes


def name_of(config: PretrainConfig, options: SweepOptions) -> str:
    """Return the name of a sweep's run; it begins with what the images are called."""
    images = "cifar100" if options.scale == "cifar100" else ""
    return run_name(config, grid_named(options.grid).images or images)


@cache
def run_name(config: PretrainConfig, images: str = "") -> str:
    """Return a readable name with a hash of every setting that is not the default.

    The same settings give the same name in every grid, and in later versions with more settings.
    The first word is that of the images, or else the recipe.
    """
    usual, train, mix = _usual_settings(), config.train, config.mix
    chosen = {
        name: value
        for name, value in settings(config).items()
        if name in NAMING
        and value != usual[name]
        and (config.uses(name) or not name.startswith("mix."))
    }
    text = json.dumps(chosen | _own_settings(config), sort_keys=True)
    words = [images or config.recipe, config.method]
    if config.mixes:
        words.append(f"{mix.num_hardest}-{mix.num_pairs}-{mix.num_with_query}")
        words += [mix.strategy] if mix.strategy != "mochi" else []
    chosen_loss = (config.loss.weights, config.loss.denominator, config.loss.filter)
    if config.uses("loss.denominator"):
        words += [each for each in chosen_loss if each not in ("none", "infonce")]
    words += ["oracle"] if config.oracle else []
    words += [f"k{train.queue_size}"] if config.uses("train.queue_size") else []
    words.append(f"e{train.epochs}" if train.stop_epoch is None else f"e{train.stop_epoch}")
    words.append(hashlib.sha256(text.encode()).hexdigest()[:8])
    return f"{'-'.join(words)}-seed{train.seed}"


def _own_settings(config: PretrainConfig) -> dict[str, Any]:
    """Return the method's own settings that identify a run and are not the default."""
    if config.options is None:
        return {}
    usual, facts = asdict(type(config.options)()), own_facts(config.method)
    found = {f"{config.method}.{name}": value for name, value in asdict(config.options).items()}
    return {
        name: value
        for name, value in found.items()
        if facts[name].identity and value != usual[name.partition(".")[2]]
    }


@cache
def _usual_settings() -> dict[str, Any]:
    return settings(PretrainConfig())


def same_run(rows: Sequence[Row], options: SweepOptions) -> list[str]:
    """Return sentences about rows that are equal at this scale."""
    by_name: dict[str, list[str]] = {}
    for row in rows:
        name = name_of(config_of(row, options, options.first_seed), options)
        by_name.setdefault(name, []).append(row.label)
    return [
        f"{' and '.join(labels)} have the same settings at this scale and share a run."
        for labels in by_name.values()
        if len(labels) > 1
    ]


def _chains(rows: Sequence[Row], options: SweepOptions, seed: int) -> list[list[Job]]:
    """Return the runs of one seed, each once; a run that continues another follows it."""
    jobs: dict[str, Job] = {}

    def add(row: Row, evaluations: tuple[str, ...]) -> str:
        config = config_of(row, options, seed)
        name = name_of(config, options)
        start = add(row.start, ()) if row.start is not None else None
        known = jobs.get(name, Job(name, config, (), start if start != name else None))
        every = tuple(dict.fromkeys((*known.evaluations, *evaluations)))
        jobs[name] = replace(known, evaluations=every)
        return name

    for row in rows:
        if not row.read:
            add(row, evaluations_of(row, options))
    stopped = {
        replace(job.config, train=replace(job.config.train, stop_epoch=None)): job.name
        for job in jobs.values()
        if job.config.train.stop_epoch is not None
    }
    chains: dict[str, list[Job]] = {}
    for job in jobs.values():
        if job.continues is None and job.config.train.stop_epoch is None:
            jobs[job.name] = replace(job, continues=stopped.get(job.config))
    for job in sorted(jobs.values(), key=lambda each: _depth(each, jobs)):
        chains.setdefault(_first(job, jobs), []).append(job)
    return list(chains.values())


def _first(job: Job, jobs: dict[str, Job]) -> str:
    return job.name if job.continues is None else _first(jobs[job.continues], jobs)


def _depth(job: Job, jobs: dict[str, Job]) -> int:
    return 0 if job.continues is None else 1 + _depth(jobs[job.continues], jobs)
