"""Records of finished runs: small JSON files from which all tables can be made again.

RECORDS/NAME.json has the run's config, seed and measures, and what they depend on. It contains no
paths, so that it can be committed; the run's folder may then be deleted.
"""

import dataclasses
import json
import shlex
import statistics
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import hardmix
from hardmix.errors import InputError
from hardmix.runs.folder import versions
from hardmix.runs.reading import RunRecord, number
from hardmix.runtime.atomic_files import write_atomically
from hardmix.settings.saved import read_json
from hardmix.sweep.measures import MEASURES
from hardmix.sweep.planning import Job, SweepOptions

FORMAT = "hardmix-record-1"


def record_file(options: SweepOptions, name: str) -> Path:
    """Return the path of a run's record."""
    return options.records_folder / f"{name}.json"


def read_record(options: SweepOptions, name: str) -> dict[str, Any] | None:
    """Read a run's record; None if it has none."""
    file = record_file(options, name)
    try:
        found = read_json(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read: {error}; fix or delete it.") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT or found.get("name") != name:
        raise InputError(f"{file} is not the record of {name} ({FORMAT}): fix or delete it.")
    return found


def is_recorded(options: SweepOptions, job: Job) -> bool:
    """Return whether a run's record is complete, so that it need not be trained here."""
    record = read_record(options, job.name)
    return record is not None and set(job.evaluations) <= set(record["evaluations"])


def write_record(options: SweepOptions, job: Job, record: RunRecord) -> Path:
    """Write the record of a finished and evaluated run.

    If there is one already and only evaluations are added, the commit stays that of the training,
    and so do evaluations that another grid asked for.
    """
    earlier = read_record(options, job.name) or {}
    kept = (name for name in earlier.get("evaluations", ()) if name in record.results)
    config, trained = dataclasses.asdict(job.config), record.results.get("pretrain", {})
    config["data"]["root"] = None
    facts = {
        "format": FORMAT,
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
