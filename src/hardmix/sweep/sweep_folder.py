"""A sweep's folder: what is written before the first run, and the SLURM script."""

import json
import os
import shlex
from pathlib import Path
from typing import Any

from hardmix.errors import InputError
from hardmix.runtime.atomic_files import write_atomically
from hardmix.runtime.own_code import allowed_code
from hardmix.settings.saved import read_json, to_json
from hardmix.sweep.grids import grid_named
from hardmix.sweep.planning import Plan, SweepOptions, selected_rows

FORMAT = "hardmix-sweep-1"


def check_roots(options: SweepOptions) -> None:
    """Raise InputError if data is not given or missing, rather than after hours."""
    wanted: dict[str, tuple[Any, str]] = {}
    needed = {name for row in selected_rows(options) for name in row.evaluations}
    needed -= set() if options.scale == "paper" else {"voc"}  # its detectors need large images
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
    """Raise InputError for the folder of a sweep of another scale or length."""
    file = options.out / "sweep.json"
    if options.out.exists() and not options.out.is_dir():
        raise InputError(f"--out {options.out} is a file: choose a folder.")
    if not file.exists():
        return
    try:
        found = read_json(file)
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read: {error}; choose another --out.") from error
    for name, value in _identity(options).items():
        if not isinstance(found, dict) or found.get(name) != value:
            other = found.get(name) if isinstance(found, dict) else found
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
    on_gpu = plan.options.scale == "paper" and not plan.options.is_own
    gpu = "#SBATCH --gpus-per-task=1\n" if on_gpu else ""
    command = shlex.join(sweep_command(plan.options))
    return f"""#!/bin/bash
# {plan.options.grid_name}, {parts} parts: sbatch {shlex.quote(str(plan.options.out / "job.sh"))}
# Set time, memory and partition. Submit it again to resume.
#SBATCH --job-name=hardmix-{plan.options.grid_name}
#SBATCH --array=1-{parts}
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=8
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
        return {"format": FORMAT, "scale": "own", "labelled_images": images}
    return {
        "format": FORMAT,
        "scale": options.scale,
        "epochs": options.epochs,
        "num_images": options.num_images,
        "temperature": options.temperature,
    }
