"""The progress of a sweep's runs and the estimated remaining time, shown before it starts."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hardmix.runs.folder import Run
from hardmix.runs.reading import number, read_metrics, read_settings
from hardmix.runtime.console import say, table
from hardmix.settings.config import PretrainConfig
from hardmix.settings.recipes import RECIPES
from hardmix.sweep.grid_rows import Row
from hardmix.sweep.planning import Job, Plan, config_of, describe, run_name, same_run, share_of
from hardmix.sweep.records import is_recorded
from hardmix.sweep.scales import IMAGES, IMAGES_PER_SECOND

State = Literal["finished", "recorded", "begun", "new"]
"""States of a run. Recorded: it was finished elsewhere, and its record is complete."""


@dataclass(frozen=True)
class Speed:
    """Images per second by method, and the source of these numbers."""

    by_method: dict[str, float]
    otherwise: float
    source: str

    def of(self, config: PretrainConfig) -> float:
        """Return the speed of the same method if measured, otherwise the usual one."""
        return self.by_method.get(config.method, self.otherwise)


def state_of(run: Run) -> State:
    """Return a run's state; it is finished once its encoder is written."""
    if run.encoder_file.exists():
        return "finished"
    return "begun" if run.exists else "new"


def measure_speed(plan: Plan) -> Speed:
    """Return the speed of the runs in a sweep's folder, or a guess from the recipe's cost."""
    found: dict[str, list[float]] = {}
    for file in sorted(plan.options.out.glob("runs/*/config.json")):
        run = Run(file.parent)
        lines = read_metrics(run, run.path.name, [])
        rates = [rate for line in lines if (rate := number(line.get("images_per_second")))]
        method = read_settings(run).get("method")  # problems are reported when its turn comes
        if rates and isinstance(method, str):
            found.setdefault(method, []).append(statistics.median(rates))
    if not found:
        recipe = config_of(plan.rows[0], plan.options, 0).recipe
        cost = RECIPES[recipe].cost
        guess = IMAGES_PER_SECOND[recipe]
        return Speed({}, guess, f"guessed {guess:.0f} images/s from the recipe's cost: {cost}")
    means = {method: statistics.fmean(rates) for method, rates in found.items()}
    count = sum(map(len, found.values()))
    usual = statistics.fmean(means.values())
    source = f"measured in {count} run{'s' * (count != 1)}, {usual:.0f} images/s"
    return Speed(means, usual, source)


def state_in(plan: Plan, job: Job) -> State:
    """Return a run's state in a sweep, taking records into account."""
    state = state_of(Run(plan.folder(job.name)))
    return "recorded" if state != "finished" and is_recorded(plan.options, job) else state


def images_left(job: Job, plan: Plan) -> int:
    """Return the number of images that a run has yet to be trained on."""
    run, config = Run(plan.folder(job.name)), job.config
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
    per_epoch = config.data.num_images or IMAGES[config.recipe]
    return max(0, config.train.last_epoch - done) * per_epoch


def seconds_of(jobs: Sequence[Job], plan: Plan, speed: Speed) -> float:
    """Return the estimated seconds of training, without evaluations."""
    return sum(images_left(job, plan) / speed.of(job.config) for job in jobs)


def in_words(seconds: float) -> str:
    """Return a duration in at most two units, such as 3 h 20 min."""
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if seconds < 60:
        return f"{seconds:.0f} s"
    if hours < 1:
        return f"{minutes} min"
    if hours < 48:
        return f"{hours} h {minutes % 60} min"
    return f"{hours // 24} days {hours % 24} h"


def show_plan(plan: Plan) -> None:
    """Print the table of rows with their remaining runs, and the estimated time."""
    options = plan.options
    _, statement, changes = describe(options)
    for sentence in [statement, *changes, *same_run(plan.rows, options)]:
        say(sentence)
    speed = measure_speed(plan)
    jobs = {job.name: job for chain in plan.chains for job in chain}
    rows = [_describe(row, plan, jobs, speed) for row in plan.rows]
    scale = "" if options.is_own else f" at the scale {options.scale}"
    title = f"{options.grid_name}{scale}, {len(jobs)} runs"
    table(title, ["row", "(N, s, s')", "K", "epochs", "runs", "training"], rows)
    part, parts = share_of(options.index)
    if parts > 1:
        say(f"This process runs part {part} of {parts}: {len(plan.own)} of {len(jobs)} runs.")
    total = in_words(seconds_of(plan.own, plan, speed))
    say(f"Estimated time: {total} of training ({speed.source}), plus evaluations.")


def shown_mix(config: PretrainConfig) -> tuple[str, str]:
    """Return (N, s, s') and K as trained; a dash if the method has none."""
    mix = config.mix
    counts = f"({mix.num_hardest}, {mix.num_pairs}, {mix.num_with_query})"
    queue = str(config.train.queue_size) if config.uses("train.queue_size") else "-"
    return counts if config.mixes else "-", queue


def _describe(row: Row, plan: Plan, jobs: dict[str, Job], speed: Speed) -> list[str]:
    options = plan.options
    configs = [config_of(row, options, seed) for seed in options.every_seed]
    own = [jobs[run_name(config)] for config in configs]
    states = Counter(state_in(plan, job) for job in own)
    epochs = str(configs[0].train.last_epoch)
    if configs[0].train.stop_epoch is not None:
        epochs += f" of {configs[0].train.epochs}"
    runs = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    return [
        row.label,
        *shown_mix(configs[0]),
        epochs,
        runs,
        in_words(seconds_of(own, plan, speed)),
    ]
