"""Messages of a training run: templates of its sentences, its start, its end and its profile."""

import json
import math
import shlex
from typing import Any

from hardmix.data.image_set import ImageSet
from hardmix.data.sources import data_name
from hardmix.runs.folder import Run
from hardmix.runtime.console import in_notebook, say, table, warn
from hardmix.runtime.device import Compute, describe_device
from hardmix.runtime.distributed import is_main, world_size
from hardmix.runtime.files import write_atomically
from hardmix.runtime.profile import SKIPPED, Stopwatch
from hardmix.settings.config import OptimizerConfig, PretrainConfig
from hardmix.settings.methods import method_title
from hardmix.settings.saved import settings

SKIPPED_SHOWN = 20
"""Most unreadable images that are named, one on each line."""

# The verdict.

BASELINES = {
    "start": "the weights it started from",
    "untrained": "the untrained network",
    "pixels": "raw pixels",
    "colours": "a colour histogram",
}
"""Names of the encoders that the trained one is compared with."""

BETTER = "The encoder is better than everything it was compared with"
BETTER_THAN_SIMPLE = (
    "The encoder is better than the simple baselines; it was not compared with pre-trained weights"
)
CANNOT_TELL = (
    "Without labels nobody can tell how good the encoder is; look at its neighbours (hardmix"
    " report). It beats the baselines in what it was trained for"
)
WORSE = "The encoder is worse than {worse}"
EVEN = "The encoder is not clearly better than {even}"
WORSE_AND_EVEN = "The encoder is worse than {worse} and not clearly better than {even}"

BY_LABELS = (
    "{judgement}: the nearest neighbour and the vote of the {k} nearest give the right one of"
    " {classes} for {score} ± {error} of {images:,} images; {others}."
)
BY_VIEWS = (
    "{judgement}: two views of an image agree on {score} ± {error} of its {k} nearest neighbours"
    " ({images:,} images); {others}."
)
START_KEPT = (
    " Training made the weights it started from worse, so these are kept: encoder.safetensors"
    " holds them, encoder-trained.safetensors the trained ones."
)
NO_VERDICT = "No verdict: shards are read as a stream; evaluate the encoder on a folder."
EVALUATE_A_FOLDER = "hardmix knn RUN --data.root FOLDER --baseline pixels untrained colours"

# Advice on the next run.

SMALLER_QUEUE = (
    "a smaller queue: it holds {keys} keys for {images} images; --train.queue-size {fewer}"
)
WEAKER_COLOURS = (
    "weaker colour changes, because colour tells these images apart:"
    " --data.colour-strength {weaker}"
)
FROM_WEIGHTS = (
    "start from pre-trained weights: --model.init timm with --model.backbone timm:NAME, or"
    " --model.init FILE"
)
LOWER_TRUNK_LR = "a lower learning rate of the trunk: --optimizer.trunk-lr {lower:g}"
LONGER = "train longer: {command} --train.epochs {epochs}"

# The expected effect of mixing.

MIXING_HELPS = "mixing is expected to help a little"
MIXING_UNCLEAR = "mixing is not expected to make a clear difference"
MIXING_UNCLEAR_BUT_KNN = "mixing is not expected to make a clear difference, except by k-NN"
MIXING_TOO_EARLY = (
    "the task is still too hard for this encoder, so mixing is not expected to help yet"
)
MIXING_TOO_EARLY_BUT_KNN = (
    "the task is still too hard for this encoder, so mixing is not expected to help yet, except by"
    " k-NN"
)
MIXING = (
    "Proxy accuracy {percent:.0f} %: {expectation} (in {pairs} pairs of runs on CIFAR-100 at"
    " {near:.0f} %, linear probe {probe} points, k-NN {knn})."
)
EFFECT = "{mean:+.2f} ({low:+.2f} to {high:+.2f})"

RESEARCH = ("imagenet100", "imagenet1k")
"""Recipes after which a researcher evaluates, rather than looks."""

# A run that goes wrong.

COLLAPSED = (
    "step {step}: the keys have collapsed (spread {spread:.3f}; 1 is uniform): lower optimizer.lr,"
    " or raise model.key_momentum."
)
TOO_MUCH_MASS = (
    "step {step}: synthetic points hold {synthetic_mass:.0%} of the softmax, so that real negatives"
    " hardly count: lower mix.num_pairs and mix.num_with_query, or raise train.temperature."
)
NOTHING_LEARNT = (
    "step {step}: nothing is learnt so far: the loss ({loss:.2f}) is at the level of guessing"
    " ({chance:.2f}) and does not fall, and the proxy accuracy is {proxy_accuracy:.1%}. Stop the"
    " run (Ctrl-C) and start another with a smaller train.queue_size, a lower optimizer.lr, a lower"
    " data.colour_strength, a higher data.min_scale, or model.init."
)

# Results that cannot be written.

KEPT = "The checkpoint of step {step} is kept."
NOTHING_KEPT = "There is no earlier checkpoint."
REPAIR = "Make room, or repair the disk, then {command} continues from step {step}."
REPAIR_AND_RESTART = (
    "Make room, or repair the disk, then {command} starts again from the beginning."
)
NO_CHECKPOINT = (
    "no checkpoint at step {step} ({reason}): {file}. {kept} Training continues and retries at"
    " every checkpoint without saying so again."
)
LOST_STOP = "the checkpoint of step {step} could not be written ({reason}). {kept} {repair}"
LOST_END = "{file} is complete, but these could not be written: {missing}. {kept} {repair}"


def resume_command(run: Run) -> str:
    """Return the command that resumes a run."""
    return f"hardmix pretrain --out {shlex.quote(str(run.path))} --resume"


def how_to_resume(run: Run) -> str:
    """Return what resumes a run that was interrupted: in a notebook a call, else a command."""
    return "the same call with resume=True" if in_notebook() else resume_command(run)


def no_checkpoint(step: int, error: OSError, kept: int | None) -> str:
    """Return a warning that a checkpoint could not be written; `kept` is the one before it."""
    return NO_CHECKPOINT.format(
        step=step, reason=error.strerror, file=error.filename, kept=_kept(kept)
    )


def lost_stop(run: Run, step: int, reason: str, kept: int | None) -> str:
    """Return a message about a run that was stopped and could not be saved."""
    return LOST_STOP.format(step=step, reason=reason, kept=_kept(kept), repair=_repair(run, kept))


def lost_end(run: Run, missing: list[str], kept: int | None) -> str:
    """Return a message about a run that ended and could not write everything."""
    return LOST_END.format(
        file=run.encoder_file,
        missing=", ".join(missing),
        kept=_kept(kept),
        repair=_repair(run, kept),
    )


def _kept(step: int | None) -> str:
    return NOTHING_KEPT if step is None else KEPT.format(step=step)


def _repair(run: Run, step: int | None) -> str:
    template = REPAIR_AND_RESTART if step is None else REPAIR
    return template.format(command=resume_command(run), step=step)


def progress_words(line: dict[str, Any], config: PretrainConfig) -> list[str]:
    """Return the progress in words, the most important first.

    Guessing among the key and a full queue has a loss of log(1 + K).
    """
    loss = f"loss {line['loss']:.3g}"
    if "proxy_accuracy" in line and config.method in ("moco-v1", "moco-v2", "mochi"):
        loss += f", guessing {math.log(1 + config.train.queue_size):.3g}"
    words = [f"epoch {line['epoch'] + 1} of {config.train.last_epoch}", loss]
    if "proxy_accuracy" in line:
        words.append(f"{line['proxy_accuracy']:.0%} of keys recognised")
    words.append(f"{line['images_per_second']:.0f} images/s")
    if "queue_filled" in line and line["queue_filled"] < 1:
        words.append(f"queue {line['queue_filled']:.0%} full")
    return words


def describe_start(
    config: PretrainConfig, images: ImageSet | None, compute: Compute, run: Run
) -> None:
    """Print a table of what will be run."""
    data = "shards" if images is None else f"{images.name}, {len(images)} images"
    if images is not None and images.name == "imagenet100":
        data += f" of the paper's {len(images.classes or ())} classes"
    views = config.data.augmentation if config.data.views is None else config.data.views
    rows = [
        ["method", method_title(settings(config))],
        ["data", f"{data}, {config.data.image_size} px, {views} views"],
        ["backbone", config.model.backbone],
        ["batch", f"{config.train.batch_size}"],
        ["processes", f"{world_size()}, {config.train.batch_size // world_size()} images each"],
        ["epochs", f"{config.train.last_epoch} of {config.train.epochs}"],
        ["optimizer", _optimizer(config.optimizer)],
        ["precision", compute.reason],
        ["device", describe_device(compute.device, config.train.deterministic)],
    ]
    if config.uses("train.queue_size"):
        negatives = "queue" if config.uses("train.queue_start") else "negatives"
        numbers = f"{config.train.queue_size}, {config.train.temperature}"
        rows.append([f"{negatives}, temperature", numbers])
    if config.uses("model.head"):
        rows.append(["head", f"{config.model.head}, {config.model.dim} dimensions"])
    if config.uses("model.key_bn_splits"):
        groups = max(config.model.key_bn_splits, world_size())
        where = ", shuffled within each node" if config.model.key_shuffle == "node" else ""
        rows.append(["key batch norm", f"{groups} groups, normalised separately{where}"])
    rows.append(["folder", str(run.path)])
    table(f"hardmix pretrain {config.recipe}", ["setting", "value"], rows)


def _optimizer(config: OptimizerConfig) -> str:
    warm_up = f", {config.warm_up_epochs:g} epochs of warm-up" if config.warm_up_epochs else ""
    return f"{config.name}, learning rate {config.lr:g}, {config.schedule}{warm_up}"


def nothing_to_train(config: PretrainConfig, run: Run, epochs: int) -> str:
    """Return a sentence about a run that already has all the epochs asked for."""
    train = config.train
    stopped = train.stop_epoch is not None and train.stop_epoch < train.epochs
    why = f", where train.stop_epoch stops it (train.epochs={train.epochs})" if stopped else ""
    return (
        f"Nothing to train: {run.path} is finished after {epochs} epoch{'s' * (epochs != 1)}{why}."
        f" {longer_command(config, run, epochs)} continues it."
    )


def time_is_over(config: PretrainConfig, run: Run, epoch: int) -> str:
    """Say that a run has ended before its last epoch, and how to continue it."""
    return (
        f"The {config.minutes:g} minutes are over in epoch {epoch + 1} of {config.train.epochs}:"
        f" training was slower than measured. {resume_command(run)} continues it."
    )


def longer_command(config: PretrainConfig, run: Run, epochs: int) -> str:
    """Return the command that trains a run beyond its end: to that of its schedule, or longer."""
    longer = config.train.epochs if epochs < config.train.epochs else 2 * epochs
    return f"{resume_command(run)} --train.epochs {longer}"


def tell_end(
    config: PretrainConfig,
    run: Run,
    result: dict[str, Any],
    verdict: dict[str, Any] | None,
    trained: bool = True,
    labelled: bool = False,
) -> None:
    """Print the result of training, the verdict on the encoder, and what to try next."""
    knn = "" if result["knn"] is None else f", k-NN accuracy {result['knn']:.3f}"
    steps, seconds, unreadable = result["steps"], result["seconds"], result["unreadable"]
    done = "Done" if trained else "Trained before"
    say(f"{done}: {steps} steps in {seconds:.0f} s{knn}. Wrote {run.encoder_file}")
    if unreadable:
        _tell_unreadable(unreadable, run)
    if verdict is not None:
        _tell_verdict(verdict)
    _tell_next(config, run, labelled)


def _tell_verdict(verdict: dict[str, Any]) -> None:
    say(f"Verdict: {verdict['text']}")
    if verdict["next"]:
        say("What may help, the likeliest first:")
    for advice in verdict["next"]:
        say(f"  {advice}")
    if verdict.get("mixing"):
        say(f"Mixing: {verdict['mixing']}")


def _tell_next(config: PretrainConfig, run: Run, labelled: bool) -> None:
    folder = shlex.quote(str(run.path))
    elsewhere = data_name(config.data) in ("shards", "own")
    root = " --data.root FOLDER" if elsewhere else ""
    say("Next:")
    evaluations = evaluation_commands(folder) if labelled and config.recipe in RESEARCH else ()
    for command in evaluations:
        say(f"  {command}")
    say(f"  hardmix report {folder} --out report.html")
    if not evaluations:
        say(f"  hardmix explore {folder}{root} --out explore.html")
        say(f"  hardmix neighbours {folder} IMAGE{root} --out neighbours.png")
    say(f"  {longer_command(config, run, config.train.last_epoch)}")


def evaluation_commands(folder: str) -> list[str]:
    """Return the paper's evaluations of a run, in as many processes as it was trained in."""
    many = world_size()
    start = "hardmix" if many == 1 else f"torchrun --nproc-per-node {many} -m hardmix --"
    own = ("linear {}", "knn {}", "detect {} --task voc --data.root VOCdevkit")
    return [f"{start} {each.format(folder)}" for each in own]


def _tell_unreadable(reasons: list[str], run: Run) -> None:
    """Print the first unreadable images, one on each line, and where the others are listed."""
    say(f"Skipped {len(reasons)} unreadable image{'s' * (len(reasons) > 1)}:")
    for reason in reasons[:SKIPPED_SHOWN]:
        say(f"  {reason}")
    if reasons[SKIPPED_SHOWN:]:
        say(f"  and {len(reasons) - SKIPPED_SHOWN} others: {run.results / 'pretrain.json'}")


def tell_profile(run: Run, stopwatch: Stopwatch | None) -> None:
    """Print how the time of a step was spent, and write RUN/profile.json."""
    if stopwatch is None or not is_main():
        return
    profile = stopwatch.profile()
    if profile.steps == 0:
        warn(f"train.profile: nothing was measured; the first {SKIPPED} steps are skipped.")
        return
    share = {name: value / profile.whole for name, value in profile.parts.items()}
    result = {
        "steps": profile.steps,
        "step_ms": profile.whole,
        "parts": {name: {"ms": profile.parts[name], "share": share[name]} for name in share},
        "workers_ms": profile.workers,
    }
    write_atomically(run.path / "profile.json", (json.dumps(result, indent=2) + "\n").encode())
    rows = [[name, f"{profile.parts[name]:.1f}", f"{share[name]:.1%}"] for name in share]
    rows.append(["step", f"{profile.whole:.1f}", "100.0%"])
    if profile.workers:
        rows.append(["in workers", f"{profile.workers:.1f}", "in parallel"])
    table(f"Time of {profile.steps} steps", ["part", "ms per step", "share"], rows)
