"""The plan of a sweep on the screen, with the time that training and evaluations are to take."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hardmix.runs.folder import Run
from hardmix.runs.reading import number, read_metrics, read_settings
from hardmix.runtime.console import duration, say, table
from hardmix.runtime.files import read_json
from hardmix.settings.config import PretrainConfig
from hardmix.settings.evaluations import LINEAR_PRESETS, SCHEDULES
from hardmix.settings.methods import METHOD_FACTS
from hardmix.settings.recipes import RECIPES
from hardmix.sweep.grid_rows import (
    IMAGES,
    IMAGES_PER_SECOND,
    PAPER_GPUS,
    Row,
    paper_columns,
    paper_text,
)
from hardmix.sweep.planning import (
    Job,
    Plan,
    config_of,
    describe,
    name_of,
    same_run,
    share_of,
)
from hardmix.sweep.sweep_folder import shown_mix, state_in

DETECTOR_IMAGES_PER_SECOND = 18.0
"""Training images per second and GPU of a C4 detector: 0.11 s for 16 images on 8 V100s, from
detectron2's model zoo."""
MOST_MEASURED = 50_000
"""Most images whose alignment and uniformity are measured."""


@dataclass(frozen=True)
class Speed:
    """How fast this sweep trains and evaluates."""

    by_method: dict[str, float]
    """Measured images per second of training."""
    passes: float
    """Forward passes per second, from which the speed of other methods follows."""
    source: str
    evaluations: dict[str, float]
    """Measured seconds of an evaluation of a run."""
    detector: float
    """Training images of a detector per second."""
    detector_steps: int | None = None
    """Steps of a detector; None means those of its schedule."""

    def of(self, config: PretrainConfig) -> float:
        """Return the images per second of a method in training."""
        guess = self.passes / METHOD_FACTS[config.method].passes
        return self.by_method.get(config.method, guess)

    def of_evaluation(self, name: str, config: PretrainConfig) -> float:
        """Return the seconds of an evaluation."""
        if name in self.evaluations:
            return self.evaluations[name]
        if name.startswith("detection-"):
            _, task, schedule = name.split("-")
            chosen = SCHEDULES[task, schedule]  # type: ignore[index]  # of a result's name
            steps = self.detector_steps or chosen.iterations
            return steps * chosen.batch_size * chosen.trials / self.detector
        images = images_of(config)
        preset = LINEAR_PRESETS.get(config.recipe)  # type: ignore[call-overload]
        passes = {
            "linear": images * (preset.epochs if preset is not None else 1),
            "embedding": min(images, MOST_MEASURED),
            "queue": 0,
        }
        return float(passes.get(name, images) / self.passes)


def images_of(config: PretrainConfig) -> int:
    """Return the number of training images."""
    return config.data.num_images or IMAGES[config.recipe]


def measure_speed(plan: Plan) -> Speed:
    """Return the speed of the runs in a sweep's folder, or a guess from the recipe's cost."""
    rates: dict[str, list[float]] = {}
    seconds: dict[str, list[float]] = {}
    for file in sorted(plan.options.out.glob("runs/*/config.json")):
        run = Run(file.parent)
        lines = read_metrics(run, run.path.name, [])
        found = [rate for line in lines if (rate := number(line.get("images_per_second")))]
        method = read_settings(run).get("method")  # problems are reported when its turn comes
        if found and method in METHOD_FACTS:
            rates.setdefault(str(method), []).append(statistics.median(found))
        for result in run.results.glob("*.json"):
            if taken := _seconds_in(result):
                seconds.setdefault(result.stem, []).append(taken)
    evaluations = {name: statistics.fmean(values) for name, values in seconds.items()}
    detector = DETECTOR_IMAGES_PER_SECOND * plan.options.gpus_per_run
    steps = plan.options.detector_iterations
    if not rates:
        return _guess(plan, evaluations, detector)
    means = {method: statistics.fmean(values) for method, values in rates.items()}
    count = sum(map(len, rates.values()))
    passes = statistics.fmean(rate * METHOD_FACTS[method].passes for method, rate in means.items())
    usual = statistics.fmean(means.values())
    source = f"measured in {count} run{'s' * (count != 1)}, {usual:.0f} images/s"
    return Speed(means, passes, source, evaluations, detector, steps)


def _guess(plan: Plan, evaluations: dict[str, float], detector: float) -> Speed:
    """Return the speed that the recipe's cost suggests: of MoCo on the paper's GPUs."""
    recipe, gpus = config_of(plan.rows[0], plan.options, 0).recipe, plan.options.gpus_per_run
    guess = IMAGES_PER_SECOND[recipe]
    if recipe in PAPER_GPUS:
        guess *= gpus / PAPER_GPUS[recipe]
    source = f"guessed {guess:.0f} images/s from the recipe's cost: {RECIPES[recipe].cost}"
    passes, steps = guess * METHOD_FACTS["moco-v2"].passes, plan.options.detector_iterations
    return Speed({}, passes, source, evaluations, detector, steps)


def _seconds_in(file: Path) -> float | None:
    """Return the seconds that a result says its evaluation took."""
    try:
        result = read_json(file)
    except (OSError, ValueError):
        return None
    trials = result.get("trials") if isinstance(result, dict) else None
    parts = trials if isinstance(trials, list) else [result]
    seconds = [number(part.get("seconds")) for part in parts if isinstance(part, dict)]
    return sum(each or 0.0 for each in seconds) or None


def epochs_left(job: Job, plan: Plan) -> int:
    """Return the number of epochs that a run has yet to be trained for."""
    run, last = Run(plan.folder(job.name)), job.config.train.last_epoch
    state = state_in(plan, job)
    if state in ("finished", "recorded"):
        return 0
    done = 0
    if state == "begun":
        trained = [line for line in read_metrics(run, run.path.name, []) if "loss" in line]
        done = max((int(number(line.get("epoch")) or 0) + 1 for line in trained), default=0)
    elif job.continues is not None:
        jobs = {each.name: each.config for chain in plan.chains for each in chain}
        done = jobs[job.continues].train.last_epoch
    return max(0, last - done)


def training_seconds(jobs: Sequence[Job], plan: Plan, speed: Speed) -> float:
    """Return the estimated seconds of the training that is left."""
    return sum(
        epochs_left(job, plan) * images_of(job.config) / speed.of(job.config) for job in jobs
    )


def evaluation_seconds(jobs: Sequence[Job], plan: Plan, speed: Speed) -> float:
    """Return the estimated seconds of the evaluations that are left."""
    return sum(
        speed.of_evaluation(name, job.config)
        for job in jobs
        if state_in(plan, job) != "recorded"
        for name in job.evaluations
        if not (Run(plan.folder(job.name)).results / f"{name}.json").exists()
    )


def seconds_left(jobs: Sequence[Job], plan: Plan) -> float:
    """Return the estimated seconds until all of these runs are trained and evaluated."""
    speed = measure_speed(plan)
    return training_seconds(jobs, plan, speed) + evaluation_seconds(jobs, plan, speed)


def show_plan(plan: Plan) -> None:
    """Print the table of rows with their remaining runs, and the estimated time."""
    options = plan.options
    _, statement, changes = describe(options)
    for sentence in [statement, *changes, *same_run(plan.rows, options), *never_mixed(plan)]:
        say(sentence)
    speed = measure_speed(plan)
    jobs = {job.name: job for chain in plan.chains for job in chain}
    rows = [_describe(row, plan, jobs, speed) for row in plan.rows]
    scale = "" if options.is_own else f" at the scale {options.scale}"
    title = f"{options.grid_name}{scale}, {len(jobs)} runs"
    columns = ["row", "(N, s, s')", "K", "epochs", "runs", "time", "paper"]
    numbered = any(row[-1] for row in rows)
    shown = rows if numbered else [row[:-1] for row in rows]
    table(title, columns if numbered else columns[:-1], shown)
    if numbered:
        say(f"The paper's numbers: {', '.join(paper_columns(plan.rows))}.")
    part, parts = share_of(options.index)
    if parts > 1:
        say(f"This process runs part {part} of {parts}: {len(plan.own)} of {len(jobs)} runs.")
    training = duration(training_seconds(plan.own, plan, speed))
    evaluations = duration(evaluation_seconds(plan.own, plan, speed))
    gpus, kind = options.gpus_per_run, "process" if options.device == "cpu" else "GPU"
    many = f"{gpus} {kind}{('es' if kind == 'process' else 's') * (gpus != 1)}"
    say(
        f"Estimated time: {training} of training and {evaluations} of evaluations, run after run on"
        f" {many} ({speed.source}). In the table, times are of training + evaluations."
    )


def never_mixed(plan: Plan) -> list[str]:
    """Return sentences about rows whose warm-up covers all of their epochs."""
    configs = {row.label: config_of(row, plan.options, 0) for row in plan.rows if not row.read}
    return [
        f"{label} never mixes: its warm-up of {config.mix.warm_up_epochs:g} epochs covers all"
        f" {config.train.last_epoch}, so that it equals its baseline bit for bit."
        for label, config in configs.items()
        if config.only_warms_up
    ]


def _describe(row: Row, plan: Plan, jobs: dict[str, Job], speed: Speed) -> list[str]:
    options = plan.options
    if row.read:
        return [row.label, "-", "-", "-", "read", "-", paper_text(row)]
    configs = [config_of(row, options, seed) for seed in options.every_seed]
    own = [jobs[name_of(config, options)] for config in configs]
    states = Counter(state_in(plan, job) for job in own)
    epochs = str(configs[0].train.last_epoch)
    if configs[0].train.stop_epoch is not None:
        epochs += f" of {configs[0].train.epochs}"
    runs = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    training = duration(training_seconds(own, plan, speed))
    evaluations = duration(evaluation_seconds(own, plan, speed))
    return [
        row.label,
        *shown_mix(configs[0]),
        epochs,
        runs,
        f"{training} + {evaluations}",
        paper_text(row),
    ]
