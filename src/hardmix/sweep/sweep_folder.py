"""A sweep's folder: what is written before the first run, the states of its runs, their records.

RECORDS/NAME.json has a finished run's config, seed and measures, and what they depend on, so that
all tables can be made again. It contains no paths and can be committed; the run's folder may then
be deleted.
"""

import dataclasses
import json
import os
import shlex
import statistics
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch

import hardmix
from hardmix.errors import InputError
from hardmix.runs.folder import Run, versions
from hardmix.runs.reading import RunRecord, number
from hardmix.runtime.files import read_json, write_atomically
from hardmix.runtime.own_code import allowed_code
from hardmix.settings.config import PretrainConfig
from hardmix.settings.saved import to_json
from hardmix.sweep.grids import grid_named
from hardmix.sweep.measures import MEASURES
from hardmix.sweep.planning import (
    Job,
    Plan,
    SweepOptions,
    selected_rows,
)

CORES_PER_GPU = 8
"""Cores that a job asks for with each GPU: they decode its images."""
SWEEP_FORMAT, RECORD_FORMAT = "hardmix-sweep-1", "hardmix-record-1"


def check_roots(options: SweepOptions) -> None:
    """Raise InputError if a folder of data is not named or missing, rather than after hours."""
    wanted: dict[str, tuple[Any, str]] = {}
    needed = {name for row in selected_rows(options) for name in row.evaluations}
    if options.scale != "paper" and options.voc_root is None:
        needed.discard("voc")  # at a small scale Table 2 has its linear accuracies without it
    if options.is_own:
        configs = [row.own for row in selected_rows(options) if row.own is not None]
        if any(config.data.name != "shapes" for config in configs):
            wanted["--data.root"] = options.data_root, "the folder of the grid's images"
    elif options.scale != "shapes":
        images = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}.get(options.scale, "ImageNet")
        wanted["--data.root"] = options.data_root, f"the folder of {images}"
    elif options.data_root is not None:
        raise InputError(
            f"--data.root {options.data_root} with --scale shapes: these images are generated;"
            " omit it, or choose --scale cifar10."
        )
    others: dict[str, tuple[Any, str]] = {
        "transfer": (options.transfer_root, "the folder of another data set's images"),
        "voc": (options.voc_root, "the folder of VOC2007 and VOC2012"),
        "coco": (options.coco_root, "the folder of COCO"),
    }
    wanted |= {f"--{name}-root": others[name] for name in others if name in needed}
    at_scale = "" if options.is_own else f" at --scale {options.scale}"
    without_files = "" if options.is_own else "; --scale shapes trains without files"
    for option, (value, what) in wanted.items():
        if value is None:
            raise InputError(
                f"{option} is missing: {options.grid}{at_scale} needs {what}."
                f" --dry-run shows the plan without it{without_files}."
            )
        if not Path(value).expanduser().exists():
            raise InputError(f"{option} {value} does not exist: it must be {what}.")


def check_folder(options: SweepOptions) -> None:
    """Raise InputError if the folder contains a sweep of another scale or length."""
    file = options.out / "sweep.json"
    if options.out.exists() and not options.out.is_dir():
        raise InputError(f"--out {options.out} is a file: choose a folder.")
    if not file.exists():
        return
    try:
        saved = read_json(file)
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read: {error}; choose another --out.") from error
    for name, value in _identity(options).items():
        other = saved.get(name) if isinstance(saved, dict) else saved
        if other != value:
            raise InputError(
                f"--out {options.out} contains a sweep with {name} {other}, but this one has"
                f" {value}: choose another folder."
            )


def prepare_folder(plan: Plan) -> None:
    """Write the folder's settings, every run's config, and the job script."""
    options = plan.options
    check_folder(options)
    configs = options.out / "configs"
    try:
        configs.mkdir(parents=True, exist_ok=True)
        write_atomically(
            options.out / "sweep.json", json.dumps(_identity(options), indent=2).encode()
        )
        for job in (job for chain in plan.chains for job in chain):
            write_atomically(configs / f"{job.name}.json", to_json(job.config))
        write_atomically(options.out / "job.sh", job_script(plan).encode())
    except OSError as error:
        raise InputError(f"--out {options.out} cannot be written: {error.strerror}.") from error


def job_script(plan: Plan) -> str:
    """Return a SLURM array job in which every task runs one chain of runs."""
    parts = len(plan.chains)
    options, gpus = plan.options, plan.options.gpus_per_run
    on_gpu = options.device != "cpu" and (
        gpus > 1 or (options.scale == "paper" and not options.is_own)
    )
    gpu = f"#SBATCH --gpus-per-task={gpus}\n" if on_gpu else ""
    command = shlex.join(sweep_command(plan.options))
    return f"""#!/bin/bash
# {plan.options.grid_name}, {parts} parts: sbatch {shlex.quote(str(plan.options.out / "job.sh"))}
# Set time, memory and partition. Submit it again to resume.
#SBATCH --job-name=hardmix-{plan.options.grid_name}
#SBATCH --array=1-{parts}
#SBATCH --ntasks=1
#SBATCH --cpus-per-task={CORES_PER_GPU * gpus}
{gpu}#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=USR1@300
#SBATCH --open-mode=append

srun {command} --index "$SLURM_ARRAY_TASK_ID/{parts}"
status=$?
# 75: stopped by the signal five minutes before the end, and saved.
if [ $status -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $status
"""


def sweep_command(options: SweepOptions, *, anywhere: bool = True) -> list[str]:
    """Return this sweep's command without --index; `anywhere` makes it work from any folder."""

    def place(path: Path | str) -> str:
        return os.path.abspath(Path(path).expanduser()) if anywhere else str(path)

    grid = place(options.grid) if options.is_own else options.grid
    words = ["hardmix", "sweep", grid, "--out", place(options.out)]
    words += [] if options.is_own else ["--scale", options.scale]
    words += ["--seeds", str(options.seeds)]
    words += ["--first-seed", str(options.first_seed), "--device", options.device]
    for option, value in {
        "--epochs": options.epochs,
        "--num-images": options.num_images,
        "--temperature": options.temperature,
        "--data.workers": options.workers,
        "--precision": options.precision,
        "--detector-iterations": options.detector_iterations,
    }.items():
        words += [] if value is None else [option, str(value)]
    for option, path in {
        "--data.root": options.data_root,
        "--transfer-root": options.transfer_root,
        "--voc-root": options.voc_root,
        "--coco-root": options.coco_root,
        "--records": options.records,
    }.items():
        words += [] if path is None else [option, place(path)]
    if options.gpus_per_run > 1:
        words += ["--gpus-per-run", str(options.gpus_per_run)]
    if options.coco_schedule != "1x":
        words += ["--coco-schedule", options.coco_schedule]
    words += [word for name in allowed_code() for word in ("--allow-code", name)]
    return words + (["--only", *options.only] if options.only else [])


def _identity(options: SweepOptions) -> dict[str, Any]:
    if options.is_own:  # such runs are named by all of their settings
        images = grid_named(options.grid).labelled_images
        return {"format": SWEEP_FORMAT, "scale": "own", "labelled_images": images}
    return {
        "format": SWEEP_FORMAT,
        "scale": options.scale,
        "epochs": options.epochs,
        "num_images": options.num_images,
        "temperature": options.temperature,
        "precision": options.precision,
    }


# -- states of runs

State = Literal["finished", "recorded", "begun", "new"]
"""States of a run; a recorded one was finished elsewhere, and its record is complete."""


def state_of(run: Run) -> State:
    """Return a run's state; it is finished once its encoder is written."""
    if run.encoder_file.exists():
        return "finished"
    return "begun" if run.exists else "new"


def state_in(plan: Plan, job: Job) -> State:
    """Return a run's state in a sweep, taking records into account."""
    state = state_of(Run(plan.folder(job.name)))
    return "recorded" if state != "finished" and is_recorded(plan.options, job) else state


def shown_mix(config: PretrainConfig) -> tuple[str, str]:
    """Return (N, s, s') and K as trained; a dash if the method has none."""
    mix = config.mix
    counts = f"({mix.num_hardest}, {mix.num_pairs}, {mix.num_with_query})"
    queue = str(config.train.queue_size) if config.uses("train.queue_size") else "-"
    return counts if config.mixes else "-", queue


# -- records


def record_file(options: SweepOptions, name: str) -> Path:
    """Return the path of a run's record."""
    return options.records_folder / f"{name}.json"


def read_record(options: SweepOptions, name: str) -> dict[str, Any] | None:
    """Read a run's record; None if it has none."""
    file = record_file(options, name)
    try:
        record = read_json(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read: {error}; fix or delete it.") from error
    facts = record if isinstance(record, dict) else {}
    if (facts.get("format"), facts.get("name")) != (RECORD_FORMAT, name):
        raise InputError(f"{file} is not the record of {name} ({RECORD_FORMAT}): fix or delete it.")
    return facts


def is_recorded(options: SweepOptions, job: Job) -> bool:
    """Return whether a run's record is complete, so that it need not be trained here."""
    record = read_record(options, job.name)
    return record is not None and set(job.evaluations) <= set(record["evaluations"])


def write_record(options: SweepOptions, job: Job, record: RunRecord) -> Path:
    """Write the record of a finished and evaluated run.

    If there is one already and only evaluations are added, it keeps the commit of the training and
    the evaluations that another grid asked for.
    """
    earlier = read_record(options, job.name) or {}
    kept = (name for name in earlier.get("evaluations", ()) if name in record.results)
    config, trained = dataclasses.asdict(job.config), record.results.get("pretrain", {})
    config["data"]["root"] = None
    facts = {
        "format": RECORD_FORMAT,
        "name": job.name,
        "grid": options.grid_name,
        "seed": job.config.train.seed,
        "measures": {
            measure.id: round(value, 6)
            for measure in MEASURES
            if (value := measure.value(record)) is not None
        },
        "evaluations": list(dict.fromkeys((*kept, *job.evaluations))),
        "training_seconds": number(trained.get("seconds")),
        "images_per_second": _median_speed(record),
        "cpu": trained.get("cpu"),
        "threads": trained.get("threads", torch.get_num_threads()),
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": earlier.get("commit") or commit(),
        "versions": versions(),
        "command": _command(options, job),
        "config": config,
    }
    file = record_file(options, job.name)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, (json.dumps(facts, indent=1) + "\n").encode())
    except OSError as error:
        raise InputError(f"{file} cannot be written: {error.strerror}.") from error
    return file


def commit() -> str | None:
    """Return the commit of the checkout, "-dirty" if changed; None if it is not a checkout."""
    package = Path(hardmix.__file__).parent
    if not (package.parents[1] / ".git").exists():
        return None
    git = ["git", "-C", str(package), "describe", "--match=", "--always", "--abbrev=40", "--dirty"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _median_speed(record: RunRecord) -> float | None:
    rates = [rate for line in record.metrics if (rate := number(line.get("images_per_second")))]
    return round(statistics.median(rates), 1) if rates else None


def _command(options: SweepOptions, job: Job) -> str:
    """Return the command that reproduces this run, with DIR and DATA as placeholders."""
    grid = Path(options.grid).name if options.grid_name != options.grid else options.grid
    words = ["hardmix", "sweep", grid, "--out", "DIR", "--data.root", "DATA"]
    words += [] if options.scale == "paper" else ["--scale", options.scale]
    return shlex.join([*words, "--first-seed", str(job.config.train.seed), "--seeds", "1"])
