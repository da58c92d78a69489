"""`hardmix sweep`: trains and evaluates a grid, and compares it with the paper's numbers.

Every run has its own folder, named by its settings: finished runs are used, stopped ones resumed,
and those being run by another process skipped. A run that fails is recorded, and the next one
starts.
"""

import shutil
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hardmix.analysis.analyze import compare
from hardmix.analysis.picture import save
from hardmix.errors import InputError, LockedError, OutputError, UnfinishedError
from hardmix.report.page import write_page
from hardmix.runs.folder import Run
from hardmix.runs.reading import read_run, read_runs
from hardmix.runtime.console import duration, say, warn
from hardmix.runtime.files import locked_folder, write_atomically
from hardmix.runtime.signals import StopRequest, listening
from hardmix.sweep.claims import JUDGED, judge, write_claims
from hardmix.sweep.estimates import seconds_left, show_plan
from hardmix.sweep.gpus import check_gpus, evaluate_by_torchrun, taken_gpus, train_by_torchrun
from hardmix.sweep.measures import evaluate, is_present, shared_command
from hardmix.sweep.pairs import (
    MeasuredTrend,
    Pairs,
    check_scipy,
    forests,
    gains_over,
    paired,
    refused_pairs,
    show_pairs,
    trends,
    without_trend,
    write_pairs,
)
from hardmix.sweep.planning import Job, Plan, SweepOptions, make_plan, name_of
from hardmix.sweep.results import SweepResult, collect, show_tables, write_tables
from hardmix.sweep.sweep_folder import (
    check_folder,
    check_roots,
    prepare_folder,
    state_in,
    state_of,
    write_record,
)
from hardmix.training.pretrain import pretrain

NOT_COPIED = ("results", "figures", "detection", "encoder.safetensors", "status.json", ".lock")
"""Files that a longer run does not copy from the run that it continues."""

MOST_SENTENCES = 3
"""Sentences printed on missing figures; a large grid has dozens."""


@dataclass(frozen=True)
class Failure:
    """A run that could not be trained or evaluated."""

    job: Job
    file: Path
    """File with the full error."""
    sentence: str
    ours: bool
    """Whether it is a bug in hardmix rather than bad input."""


@dataclass
class Outcome:
    """The outcome of a sweep."""

    failures: list[Failure] = field(default_factory=list)
    elsewhere: list[Job] = field(default_factory=list)
    """Runs that are being run by another process."""


class NotYetError(Exception):
    """The run that this one continues is not finished."""


def sweep(
    options: SweepOptions,
    *,
    dry_run: bool = False,
    job_only: bool = False,
    collect_only: bool = False,
    pairs: bool = False,
) -> Outcome:
    """Show the plan, run it, and write tables and the report; a dry run changes nothing.

    `collect_only` trains nothing and makes tables of the finished or recorded runs; `pairs` also
    shows and draws differences by seed.
    """
    if not (dry_run or job_only):
        check_scipy()
    if collect_only and not dry_run:
        tell(make_plan(options), Outcome(), pairs=pairs)
        return Outcome()
    check_folder(options)
    if not dry_run:
        check_roots(options)
        check_gpus(options.gpus_per_run, options.device, here=not job_only)
    plan = make_plan(options)
    show_plan(plan)
    if dry_run:
        return Outcome()
    prepare_folder(plan)
    if job_only:
        say(f"Wrote {options.out / 'job.sh'}: {len(plan.chains)} parts. Nothing was trained.")
        return Outcome()
    outcome = run_jobs(plan)
    tell(plan, outcome, pairs=pairs)
    return outcome


def run_jobs(plan: Plan) -> Outcome:
    """Run all jobs of this process; those being run by others are tried again at the end."""
    outcome = Outcome()
    todo, again = plan.own, False
    options = plan.options
    with listening() as stop, taken_gpus(options.gpus_per_run, options.device, stop) as gpus:
        while todo:
            later = []
            for number, job in enumerate(todo, start=1):
                left = duration(seconds_left(todo[number - 1 :], plan))
                say(f"Run {number} of {len(todo)}, {job.name}; about {left} left")
                failures = run_job(job, plan, stop, gpus)
                if failures is None:
                    later.append(job)
                else:
                    outcome.failures.extend(failures)
            if again or not later:
                outcome.elsewhere.extend(later)
                break
            todo, again = later, True
    outcome.failures.extend(_orphans(plan, outcome))
    return outcome


def run_job(
    job: Job, plan: Plan, stop: StopRequest, gpus: Sequence[str] = ()
) -> list[Failure] | None:
    """Train and evaluate one run; None if it must wait for another process or run.

    `gpus` are those of this process; with several, torchrun trains and evaluates the run on them.
    """
    failed: dict[str, Exception] = {}
    try:
        with locked_folder(plan.options.out / ".claims" / job.name):
            clear_failures(job, plan)
            if state_in(plan, job) == "recorded":
                say(f"{job.name} was finished elsewhere: using its record.")
                return []
            run = train(job, plan, stop, gpus)
            failed |= evaluate_run(run, job, plan, stop, gpus)
            if not failed:
                write_record(plan.options, job, read_run(run.path))
            pause(stop)
    except LockedError:
        say(f"{job.name} is being run by another process.")
        return None
    except NotYetError as error:
        say(f"{job.name} must wait: {error}")
        return None
    except (UnfinishedError, OutputError):  # a full disk affects the others too
        raise
    except Exception as error:  # one run must not stop the others
        failed["training"] = error
    return [write_failure(job, plan, stage, error) for stage, error in failed.items()]


def evaluate_run(
    run: Run, job: Job, plan: Plan, stop: StopRequest, gpus: Sequence[str] = ()
) -> dict[str, Exception]:
    """Run the evaluations that the run lacks; returns errors by name of the evaluation."""
    failed: dict[str, Exception] = {}
    record = read_run(run.path)
    for name in job.evaluations:
        pause(stop)
        if is_present(record, name):
            continue
        try:
            command = shared_command(run, name, plan.options) if len(gpus) > 1 else None
            if command is None:
                evaluate(run, name, plan.options)
            else:
                evaluate_by_torchrun(command, gpus, stop)
        except (KeyboardInterrupt, UnfinishedError, OutputError):
            raise
        except Exception as error:  # the other evaluations do not depend on it
            failed[name] = error
    return failed


def train(job: Job, plan: Plan, stop: StopRequest, gpus: Sequence[str] = ()) -> Run:
    """Train the run, resume it, or find it finished."""
    run = Run(plan.folder(job.name))
    if run.exists and (name := name_of(run.config(), plan.options)) != job.name:
        raise InputError(
            f"{run.path} contains another run ({name}): its config.json was changed; move the"
            " folder away to train the run again."
        )
    if state_of(run) == "finished":
        say(f"{job.name} is finished: using its encoder.")
        return run
    if job.continues is not None and not run.exists:
        copy_start(Run(plan.folder(job.continues)), run)
    if len(gpus) > 1:
        config = plan.options.out / "configs" / f"{job.name}.json"
        return train_by_torchrun(run, config, gpus, stop)
    try:
        return pretrain(job.config, run.path, resume="auto")
    except UnfinishedError as error:
        raise UnfinishedError(f"{error} The same sweep command resumes it.") from error


def copy_start(start: Run, run: Run) -> None:
    """App. C.1: start a longer run as a copy of the finished shorter one, which is kept."""
    if state_of(start) != "finished":
        raise NotYetError(f"it continues {start.path.name}, which is not finished.")
    temporary = run.path.with_name(f".{run.path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(start.path, temporary, ignore=shutil.ignore_patterns(*NOT_COPIED))
    shutil.rmtree(run.path, ignore_errors=True)  # a folder without a config: nothing was trained
    temporary.replace(run.path)


def pause(stop: StopRequest) -> None:
    """Stop the sweep between two evaluations after a signal; training saves first."""
    if stop:
        raise UnfinishedError(f"stopped by {stop.name}: the same sweep command resumes.")


def write_failure(job: Job, plan: Plan, stage: str, error: Exception) -> Failure:
    """Write the full error to a file, and print one line of it."""
    folder = plan.options.out / "failures"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{job.name}.{stage}.txt"
    ours = not isinstance(error, InputError)
    lines = traceback.format_exception(error) if ours else [f"{error}\n"]
    write_atomically(file, "".join(lines).encode())
    sentence = f"{job.name}, {stage}: {type(error).__name__ + ': ' if ours else ''}{error}"
    warn(f"failed: {sentence}")
    return Failure(job, file, sentence, ours)


def clear_failures(job: Job, plan: Plan) -> None:
    """Delete the failures of a run that is tried again."""
    for file in (plan.options.out / "failures").glob(f"{job.name}.*.txt"):
        file.unlink(missing_ok=True)


def tell(plan: Plan, outcome: Outcome, *, pairs: bool = False) -> None:
    """Write tables, figures and the report of all finished runs, then print failures."""
    started = time.monotonic()
    result = collect(plan)
    show_tables(result)
    by_seed = paired(result)
    for sentence in refused_pairs(result):
        warn(sentence)
    measured = trends(result, by_seed)
    files = write_tables(result, plan.options.out)
    files += write_pairs(result, by_seed, measured, plan.options.out)
    if pairs:
        show_pairs(by_seed, measured)
        for sentence in without_trend(result, measured):
            say(sentence)
        files += draw_pairs(result, by_seed, measured)
    if plan.options.grid in JUDGED:
        files += write_claims(plan.options, judge(plan.options))
    for file in files:
        say(f"Wrote {file}")
    runs = [path for path in result.runs if state_of(Run(path)) == "finished"]
    if runs:
        draw(plan, runs)
    say(f"Tables, figures and report took {duration(time.monotonic() - started)}.")
    for job in outcome.elsewhere:
        say(f"{job.name} is being run by another process: repeat the command later for its result.")
    for failure in outcome.failures:
        warn(f"failed: {failure.sentence} (see {failure.file})")


def draw_pairs(
    result: SweepResult, pairs: Sequence[Pairs], measured: Sequence[MeasuredTrend]
) -> list[Path]:
    """Draw forest plots, and the gains of the grid's trends."""
    pictures = [*forests(pairs), *gains_over(result, pairs, measured)]
    return [file for picture in pictures for file in save(picture, figures_of(result.options))]


def figures_of(options: SweepOptions) -> Path:
    """Return the folder of a grid's figures: several grids may share DIR."""
    return options.out / "figures" / options.grid_name


def draw(plan: Plan, runs: list[Path]) -> None:
    """Write the grid's figures and its report; warn about figures that cannot be drawn."""
    report = plan.options.out / f"{plan.options.grid_name}.html"
    records = read_runs(runs)
    pictures, missing = compare(records)
    for picture in pictures:
        save(picture, figures_of(plan.options))
    for sentence in missing[:MOST_SENTENCES]:
        warn(sentence)
    if len(missing) > MOST_SENTENCES:
        more = len(missing) - MOST_SENTENCES
        warn(f"{more} more items are missing: see the report's last section")
    try:
        write_page(records, report)
    except InputError as error:
        warn(f"no report: {error}")


def _orphans(plan: Plan, outcome: Outcome) -> list[Failure]:
    """Return failures of runs that wait for one that failed here."""
    failed = {failure.job.name for failure in outcome.failures}
    orphans = []
    for job in list(outcome.elsewhere):
        if job.continues in failed:
            outcome.elsewhere.remove(job)
            failed.add(job.name)
            error = InputError(f"it continues {job.continues}, which failed.")
            orphans.append(write_failure(job, plan, "training", error))
    return orphans
