"""Pre-training, from images to an encoder. The functions are in the order they run."""

import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hardmix.data.changed_data import record_data, write_list
from hardmix.data.image_set import ImageSet
from hardmix.data.own_views import OWN_VIEWS, Pipeline
from hardmix.data.workers import dead_workers_named
from hardmix.errors import InputError, OutputError, UnfinishedError
from hardmix.evaluation.knn import knn_of_trunk
from hardmix.methods.base import OwnMixing
from hardmix.mixing.family import Denominator, Formula, NegativeFilter, NegativeWeights
from hardmix.mixing.strategies import Strategy
from hardmix.runs.folder import OWN_TRUNK, Resume, Run, check_resumable
from hardmix.runs.reading import number
from hardmix.runtime.console import Meter, progress, say, speak_as
from hardmix.runtime.device import (
    Late,
    algorithms_chosen,
    cpu_name,
    forget_peak,
    peak_mb,
    threads_kept,
)
from hardmix.runtime.distributed import (
    agree_on_max,
    broadcast,
    broadcast_object,
    is_main,
    mean_over_ranks,
    rank,
)
from hardmix.runtime.files import locked_folder, remove_leftovers, write_atomically
from hardmix.runtime.profile import end_step, profiling, start_steps
from hardmix.runtime.rendezvous import losses_named
from hardmix.runtime.signals import listening
from hardmix.settings.config import PretrainConfig
from hardmix.settings.saved import absolute_root
from hardmix.training import messages
from hardmix.training.fitting import as_saved, fit_run, use_threads_of
from hardmix.training.metric_logs import OnLog
from hardmix.training.setup import Own, prepare
from hardmix.training.state import (
    GONE,
    TimeLimit,
    Training,
    check_ranks_agree,
    end_if_gone,
    out_of_time,
    pause,
    report_checkpoint,
    restore,
    save_checkpoint,
    settle,
)
from hardmix.training.step import shows_hardness, take_ranks, take_step
from hardmix.training.verdict import conclude


def pretrain(
    config: PretrainConfig,
    out: Path | str,
    *,
    resume: Resume = False,
    trunk: nn.Module | None = None,
    strategy: Strategy | None = None,
    weights: NegativeWeights | None = None,
    denominator: Denominator | Formula | None = None,
    filter_negatives: NegativeFilter | None = None,
    images: ImageSet | None = None,
    views: Pipeline | Sequence[Pipeline] | None = None,
    on_log: OnLog | None = None,
    allow_changed_data: bool = False,
) -> Run:
    """Train an encoder and write the run's folder.

    `trunk` is your own network, `strategy` your own plan for synthetic points, `weights`,
    `denominator` and `filter_negatives` your own parts of the loss, `images` your own image set,
    and `views` your own pipeline that makes a view of an image (for all but the trunk the saved
    config says "own"). `on_log` is called with every line of metrics.jsonl. With `resume` a stopped
    run continues from its last checkpoint, and a finished run continues from its end if more epochs
    are asked for (App. C.1: the 800-epoch runs).

    SIGTERM, SIGINT and SIGUSR1 save a checkpoint and raise `UnfinishedError`. If results cannot be
    written, for example on a full disk, `OutputError` is raised at the end. With torch.distributed
    every rank calls this function, and rank 0 writes.
    """
    mixing = OwnMixing(strategy, weights, denominator, filter_negatives)
    config = _with_own_mixing(config, mixing)
    if images is not None:
        config = replace(config, data=replace(config.data, name="own", root=None))
    if views is not None:
        config = replace(config, data=replace(config.data, views=OWN_VIEWS))
    root = absolute_root(config.data.root)  # so that the run can be used from any folder
    config = replace(config, data=replace(config.data, root=root))
    own = Own(trunk=trunk, mixing=mixing, images=images, views=views, on_log=on_log)
    run = Run(out)
    if not is_main():
        speak_as(rank())  # in a program with processes of its own, too
    again = bool(agree_on_max(int(is_main() and run.resumes(resume))))
    # Before anything uses the device: cuBLAS reads its settings when it is first used.
    with algorithms_chosen(config.train.deterministic), threads_kept(), listening() as stop:
        fitting: dict[str, Any] | None = None
        listed: ImageSet | None = None
        limit: TimeLimit | None = None
        if config.choose and again:
            config = as_saved(config, run)
        elif config.choose:
            config, listed, fitting, limit = fit_run(config, run, own, stop)
        if again:
            use_threads_of(run)
        training = prepare(config, run, own, stop, listed)
        training.limit = limit
        device = training.compute.device
        profiled = profiling(config.train.profile, device)
        with locked_folder(run.path), status_recorded(training), profiled as stopwatch:
            forget_peak(device)
            left = start(training, resume=again, allow_changed_data=allow_changed_data)
            if fitting is not None:
                write_atomically(run.fitting_file, (json.dumps(fitting, indent=2) + "\n").encode())
            train(training)
            lost = finish(training, None if trunk is None else OWN_TRUNK, trained=left)
            messages.tell_profile(run, stopwatch)
            if lost:
                raise OutputError(lost)
    return run


def _with_own_mixing(config: PretrainConfig, own: OwnMixing) -> PretrainConfig:
    """Return the config with "own" for each function that was passed."""
    if own.strategy is not None:
        config = replace(config, mix=replace(config.mix, strategy="own"))
    loss = config.loss
    loss = loss if own.weights is None else replace(loss, weights="own")
    loss = loss if own.denominator is None else replace(loss, denominator="own")
    loss = loss if own.filter_negatives is None else replace(loss, filter="own")
    return replace(config, loss=loss)


@contextmanager
def status_recorded(training: Training) -> Iterator[None]:
    """Record in status.json how the run ended, unless it is killed by SIGKILL."""
    try:
        with losses_named():
            try:
                yield
            finally:
                report_checkpoint(training)
    except UnfinishedError as error:
        failed = isinstance(error, InputError)  # another process failed, with its own error
        state = "failed" if failed else "stopped"
        training.run.set_status(state, step=training.step, reason=str(error))
        raise
    except BaseException as error:
        why = f"{type(error).__name__}: {error}"
        training.run.set_status("failed", step=training.step, reason=why)
        raise
    finally:
        training.loader.close()
        if training.probe is not None:
            training.probe.close()
        for metric_log in training.opened:
            metric_log.close()
    training.run.set_status("done", step=training.step)


def start(training: Training, *, resume: bool, allow_changed_data: bool = False) -> bool:
    """Create the run's folder, or resume; return whether there is anything to train.

    Settings that a resumed run may change are saved only if there is.
    """
    run, config = training.run, training.config
    try:
        if is_main() and resume:
            remove_leftovers(run.path)
            remove_leftovers(run.checkpoints)
            check_resumable(run.path, config)
        elif is_main():
            Run.create(run.path, config)
        messages.describe_start(config, training.images, training.compute, run)
        training.data = record_data(training.images, config.data)
        restored = resume and restore(training, allow_changed_data=allow_changed_data)
        left = training.epoch < config.train.last_epoch
        if resume and left:
            run.write_config(config)
        if not restored and training.starts_from_weights and is_main():
            run.write_encoder(training.method.trunk, config, file=run.start_file)
        write_list(run.images_file, training.data)
        training.data = training.data._replace(sizes=None)
        for metric_log in training.logs:
            metric_log.open(run, training.step)
            training.opened.append(metric_log)
    except OSError as error:
        raise InputError(f"out={run.path} cannot be written: {error.strerror}.") from error
    if not restored:
        training.method.prepare(training.loader)
    training.loader.prepare()
    say(f"Reading images with {training.loader.reading()}.")
    run.keep_place()
    run.set_status("running", step=training.step)
    if not left:
        say(messages.nothing_to_train(config, run, training.epoch))
    return left


def train(training: Training) -> None:
    """Train the remaining epochs."""
    config, steps = training.config, training.loader.steps_per_epoch
    epochs = config.train.last_epoch
    with progress("", epochs * steps, training.step) as meter, dead_workers_named():
        for epoch in range(training.epoch, epochs):
            training.method.begin_epoch(epoch)
            if training.position < steps:  # otherwise stopped while its accuracy was measured
                if train_epoch(training, epoch, meter):
                    save_checkpoint(training)
                    say(messages.time_is_over(config, training.run, epoch))
                    break
                record_hardness(training, epoch)
            check_ranks_agree(training)
            every = config.train.knn_every
            measured = every and ((epoch + 1) % every == 0 or epoch + 1 == epochs)
            better = bool(measured) and measure_knn(training, epoch)
            training.epoch, training.position = epoch + 1, 0
            if better or (epoch + 1) % config.train.save_every == 0 or epoch + 1 == epochs:
                save_checkpoint(training)
    report_checkpoint(training)


def train_epoch(training: Training, epoch: int, meter: Meter) -> bool:
    """Train one epoch, or the rest of it; return whether the time was over before the last one."""
    config, loader = training.config, training.loader
    started, images = time.perf_counter(), 0
    start_steps()
    for batch in loader.epoch(epoch, training.position):
        # All processes have their images here: a failed disk is noticed before the host waits for
        # a GPU that waits for a process without images, as it does where numbers are logged.
        following = training.step + 1
        logged = following % config.train.log_every == 0
        logged = logged or training.position + 1 == loader.steps_per_epoch
        pause(training, at_once=not training.late or logged)
        loss = take_step(training, batch, epoch)
        training.losses += [] if loss is None else [loss]
        training.step += 1
        training.position += 1
        images += config.train.batch_size
        last = training.position == loader.steps_per_epoch
        over = out_of_time(training, logged=logged)
        over = over and not (last and epoch + 1 == config.train.last_epoch)
        described = last or over or training.step % config.train.log_every == 0
        if described:
            settle(training)
        if described and training.losses:
            line = describe_steps(training, epoch)
            seconds = time.perf_counter() - started
            training.seconds += seconds
            line["images_per_second"] = images / seconds
            log(training, line)
            meter.advance(training.step, *messages.progress_words(line, config))
            started, images = time.perf_counter(), 0
        else:
            meter.advance(training.step)
        end_step()
        if over:
            return True
    return False


def describe_steps(training: Training, epoch: int) -> dict[str, Any]:
    """Return a line of metrics.jsonl on the steps since the last one: means over all ranks."""
    numbers = {"loss": torch.stack(training.losses).mean()}
    if training.outcomes and training.kept:
        numbers |= training.outcomes[-1].summary(torch.cat(training.kept, dim=1))
    if training.probe is not None:
        numbers["probe_accuracy"] = training.probe.take_accuracy()
    means = Late(torch.stack(list(numbers.values())))
    training.losses, training.kept = [], []
    # This is the only wait for the device; the loss is on the host by then.
    measured = training.method.describe(training.outcomes) if training.outcomes else {}
    averages = dict(zip(numbers, means.read().tolist(), strict=True))
    loss = averages.pop("loss")
    if math.isnan(averages.get("probe_accuracy", 0.0)):
        del averages["probe_accuracy"]  # no image had a label, on any rank
    return {
        "step": training.step,
        "epoch": epoch,
        **mean_over_ranks({"loss": loss}),
        "lr": training.optimizer.param_groups[0]["lr"],
        **mean_over_ranks(averages | measured),
    }


def log(training: Training, line: dict[str, Any]) -> None:
    """Write a line to metrics.jsonl and pass it to everything that reads it."""
    training.run.log(line)
    for metric_log in training.logs:
        metric_log.write(line)


def record_hardness(training: Training, epoch: int) -> None:
    """Record Fig. 2a at a few epochs of the run, and the similarities of their last step."""
    if not shows_hardness(training.config, epoch):
        return
    measured = training.method.hardness(training.outcomes) if training.outcomes else None
    ranks, training.ranks = take_ranks(training.ranks), None
    if measured is not None:
        line = {"step": training.step, "epoch": epoch, **measured, **ranks}
        training.run.log_hardness(line)


def measure_knn(training: Training, epoch: int) -> bool:
    """Measure k-NN accuracy if there are labels; return whether it is the best so far."""
    config, images = training.config, training.knn_images
    if images is None:
        return False
    report_checkpoint(training)  # its thread has ended before workers are forked
    trunk = training.method.trunk
    for buffer in trunk.buffers():  # rank 0's statistics are those that are saved
        broadcast(buffer)
    compute = training.compute._replace(bf16=False, fp16=False)  # as `hardmix knn` does
    between = partial(pause, training)
    top1 = knn_of_trunk(trunk, images, config.data, compute, between).top1
    log(training, {"step": training.step, "epoch": epoch, "knn": top1})
    say(f"epoch {epoch + 1}: k-NN accuracy {top1:.3f}")
    better = training.best is None or top1 > training.best["knn"]
    if better:
        name = f"step-{training.step:08d}"
        training.best = {"checkpoint": name, "epoch": epoch, "knn": top1}
    return better


def finish(training: Training, backbone: str | None, *, trained: bool = True) -> str:
    """Write the encoder and print a summary; return a message about what could not be written.

    `trained` is whether there was anything left to train.
    """
    run, summarized = training.run, True
    end_if_gone(agree_on_max(0 if run.is_in_place() else GONE), run, training.step)
    run.write_encoder(training.method.trunk, training.config, backbone)
    try:
        peak = peak_mb(training.compute.device)  # of the training, without the verdict
        verdict = conclude(training, backbone) if training.config.train.verdict else None
        result = result_of(training, peak)
        run.write_result("pretrain", result)
        if is_main():
            labelled = training.images is not None and training.images.labels is not None
            messages.tell_end(training.config, run, result, verdict, trained, labelled)
    except OSError:
        summarized = False
    return broadcast_object(training.saved.lost_end(run, summarized))


def result_of(training: Training, peak: float | None) -> dict[str, Any]:
    """Return the contents of results/pretrain.json: what training cost and achieved."""
    lines = training.run.metrics() if is_main() else []
    # A log may have been damaged or written by another program before the run was resumed.
    knn, loss, speeds = (
        [value for line in lines if (value := number(line.get(name))) is not None]
        for name in ("knn", "loss", "images_per_second")
    )
    return {
        "steps": training.step,
        "seconds": training.seconds,
        "images_per_second": statistics.median(speeds) if speeds else None,
        "peak_mb": peak,
        "loss": loss[-1] if loss else None,
        "knn": knn[-1] if knn else None,
        "unreadable": list(training.loader.unreadable.values()),
        "seed": training.config.train.seed,
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
    }
