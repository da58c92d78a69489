"""The recipe `photos` before its first step: look at the images, measure a few steps, choose.

Rank 0 looks and decides; all ranks take the measured steps, as they will in the run. The chosen
settings are saved in config.json, and the reasons in fitting.json: a resumed run chooses nothing.
"""

import json
import time
from contextlib import suppress
from dataclasses import replace
from itertools import count
from statistics import median
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize
from torchvision.transforms.v2.functional import resize

from hardmix.data.colours import channel_statistics, normalise
from hardmix.data.image_files import UnreadableImage, read_image
from hardmix.data.image_set import ImageSet
from hardmix.data.sources import data_name, has_test, open_images
from hardmix.errors import InputError
from hardmix.evaluation.baselines import ColourHistogram
from hardmix.runs.folder import Run
from hardmix.runtime.console import say, silent, table
from hardmix.runtime.device import choose_compute
from hardmix.runtime.distributed import agree_on_max, broadcast_object, is_main, world_size
from hardmix.runtime.files import read_json
from hardmix.runtime.signals import StopRequest
from hardmix.settings.config import PretrainConfig
from hardmix.settings.fitting_rules import SHOWN, Choice, FolderFacts, Machine, Pace, fit
from hardmix.settings.saved import build_config, settings, to_json, with_settings
from hardmix.training.setup import Own, prepare
from hardmix.training.state import TimeLimit, Training, settle
from hardmix.training.step import take_step
from hardmix.weights.foreign import FETCHED, recognised_backbone

LOOKED_AT = 200
"""Number of images that are looked at."""
LOOK_SECONDS = 10.0
"""Seconds after which the look at the images ends."""
NEAREST = 0.05
"""Share of the images among which an image's other half is found by its colours."""
SIDE = 32
"""Side in pixels of the halves of an image whose colours are compared."""
WARM_UP, FEWEST_STEPS, MOST_STEPS, STEP_SECONDS = 2, 5, 20, 5.0
"""Steps that are not measured; fewest and most that are; seconds in which more than the fewest are
taken."""
FETCHED_BACKBONES = {"timm": "timm:tf_efficientnet_lite0", "torchvision": "resnet18"}
"""Small networks with pre-trained weights, for model.init=timm and torchvision."""


class FittedRun(NamedTuple):
    """A run with every setting chosen."""

    config: PretrainConfig
    images: ImageSet
    """The images that were looked at, so that they need not be listed again."""
    record: dict[str, Any]
    """How the settings were chosen, for fitting.json."""
    limit: TimeLimit | None
    """When training ends, finished or not; None if the user has chosen the epochs."""


def fit_run(config: PretrainConfig, run: Run, own: Own, stop: StopRequest) -> FittedRun:
    """Look at the images, measure a few steps, and choose every setting in `config.choose`."""
    started = time.monotonic()
    config = _with_backbone(config)
    say("Looking at the images, and measuring a few steps.")
    images = open_folder_images(config, own)
    facts = FolderFacts(*broadcast_object(look(config, images, own) if is_main() else ()))
    gpu = choose_compute(config.train.device, config.train.precision).device.type != "cpu"
    machine = Machine(gpu, world_size())
    guess = fit(config, facts, machine).config
    pace = measure_pace(guess, facts, run, own, stop, images)
    pace = Pace(*broadcast_object(pace._replace(spent=time.monotonic() - started)))
    fitted = fit(config, facts, machine, pace)
    tell(fitted.choices, facts, config.minutes)
    limit = None
    if "train.epochs" in config.choose:
        limit = TimeLimit(started + 60 * config.minutes, pace.step, fitted.after)
    record = {
        "minutes": config.minutes,
        "images": facts._asdict(),
        "machine": machine._asdict(),
        "pace": pace._asdict(),
        "choices": {each.name: each._asdict() for each in fitted.choices},
    }
    return FittedRun(fitted.config, images, record, limit)


def as_saved(config: PretrainConfig, run: Run) -> PretrainConfig:
    """Return the config that the run chose when it started, for a program that resumes it."""
    text = to_json(run.config()).decode() if is_main() else ""
    saved = settings(build_config(json.loads(broadcast_object(text)), str(run.config_file)))
    return replace(with_settings(config, {n: saved[n] for n in config.choose}), choose=())


def _with_backbone(config: PretrainConfig) -> PretrainConfig:
    """Return the config with the backbone of `model.init`, unless the user has named one."""
    init = config.model.init
    if init is None or "model.backbone" not in config.choose:
        return config
    name = FETCHED_BACKBONES[init] if init in FETCHED else recognised_backbone(init)
    return with_settings(config, {"model.backbone": name})


def open_folder_images(config: PretrainConfig, own: Own) -> ImageSet:
    """Open the images to look at; raise InputError if they are a stream."""
    if own.images is not None:
        return own.images
    if data_name(config.data) == "shards":
        raise InputError(
            f"data.root={config.data.root}: the recipe photos looks at the images first, but shards"
            " are a stream; use a folder, or another recipe."
        )
    return open_images(config.data, "train", config.train.seed)


def look(config: PretrainConfig, images: ImageSet, own: Own) -> FolderFacts:
    """Return the number of images, their size, and how well their colours identify them."""
    tests = 0
    if own.images is None and images.labels is not None and has_test(config.data):
        with silent():
            tests = len(open_images(config.data, "test", config.train.seed))
    sides, pictures = look_at(images)
    side = int(torch.tensor(sides).median())
    colour = told_by_colour(pictures) if images.channels == 3 else 0.0
    return FolderFacts(len(images), side, colour, images.labels is not None, tests)


def look_at(images: ImageSet) -> tuple[list[int], list[Tensor]]:
    """Return the shorter sides and small copies of up to 200 images from all over the set."""
    started = time.monotonic()
    sides: list[int] = []
    pictures: list[Tensor] = []
    for index in range(0, len(images), max(1, len(images) // LOOKED_AT)):
        if len(pictures) >= LOOKED_AT or time.monotonic() - started > LOOK_SECONDS:
            break
        with suppress(UnreadableImage):
            picture = _small_image(images, index)
            pictures.append(picture)
            sides.append(_short_side(images, index, picture))
    return sides, pictures


def _small_image(images: ImageSet, index: int) -> Tensor:
    """Decode an image; large photographs are decoded at a reduced size, which is much faster."""
    if images.files is None or images.read is not read_image:
        return images.image(index)
    return read_image(images.files[index], images.channels, images.max_pixels, reduce=2 * SIDE)


def _short_side(images: ImageSet, index: int, picture: Tensor) -> int:
    if images.files is not None and min(picture.shape[1:]) >= 2 * SIDE:
        with suppress(OSError), Image.open(images.files[index]) as opened:
            return min(opened.size)
    return min(picture.shape[1:])


def told_by_colour(pictures: list[Tensor]) -> float:
    """Return how often the colours of an image's left half find its right half among all.

    It is found if it is among the nearest twentieth, so that a few other photographs of the same
    thing may be nearer. By chance that is 0.05. If it is near 1, the things have colours of their
    own, and colour changes remove what distinguishes them.
    """
    pictures = [picture for picture in pictures if picture.shape[2] >= 2]  # those with two halves
    if len(pictures) < 2:
        return 0.0
    widths = [picture.shape[2] // 2 for picture in pictures]
    left = [picture[:, :, :half] for picture, half in zip(pictures, widths, strict=True)]
    right = [picture[:, :, -half:] for picture, half in zip(pictures, widths, strict=True)]
    first, second = (normalize(_colours(halves), dim=1) for halves in (left, right))
    similarity = first @ second.T
    nearer = (similarity > similarity.diagonal()[:, None]).sum(dim=1)
    return float((nearer < max(1, NEAREST * len(pictures))).float().mean())


def _colours(pictures: list[Tensor]) -> Tensor:
    small = torch.stack([resize(each, [SIDE, SIDE], antialias=True) for each in pictures])
    colours: Tensor = ColourHistogram()(normalise(small.float().div(255), *channel_statistics(3)))
    return colours


def measure_pace(
    config: PretrainConfig,
    facts: FolderFacts,
    run: Run,
    own: Own,
    stop: StopRequest,
    images: ImageSet,
) -> Pace:
    """Return the time of a few steps, which are taken as in the run and then forgotten.

    The run itself is prepared afresh: its weights must not have seen these steps.
    """
    number = min(facts.images, max(256, 4 * config.train.batch_size))
    changes: dict[str, Any] = {"data.num_images": number, "mix.warm_up_epochs": 0}
    unneeded = ("train.tensorboard", "train.wandb", "train.verdict", "train.probe")
    changes |= dict.fromkeys(unneeded, False)
    few = with_settings(config, changes | {"train.knn_every": 0})  # opens no labelled images
    with silent():
        training = prepare(few, run, replace(own, on_log=None), stop, images)
        try:
            started = time.perf_counter()
            training.loader.prepare()
            decode = (time.perf_counter() - started) / number
            step, threads = _fastest(training, 0.1 * 60 * config.minutes)
            return Pace(step, decode, threads=threads)
        finally:
            training.loader.close()


def _fastest(training: Training, most: float) -> tuple[float, int]:
    """Return the time of a step with all threads or with one, and use what is faster.

    Beside other programs, two threads that wait for each other can take ten times as long as one.
    """
    threads = torch.get_num_threads()
    step = _step_seconds(training, most)
    if threads == 1 or world_size() > 1 or training.compute.device.type != "cpu":
        return step, threads
    torch.set_num_threads(1)
    alone = _step_seconds(training, most)
    if alone < step:
        return alone, 1
    torch.set_num_threads(threads)
    return step, threads


def use_threads_of(run: Run) -> None:
    """Use the number of threads that a run of one process chose when it started, if it did."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        threads = read_json(run.fitting_file)["pace"]["threads"]
        if world_size() == 1 and isinstance(threads, int) and threads == 1:
            torch.set_num_threads(1)


def _step_seconds(training: Training, most: float) -> float:
    """Return the median time of a few steps after the first ones, on all ranks.

    A mean would depend on a single step that waited for another program.
    """
    started = time.perf_counter()
    times: list[float] = []
    batches = ((epoch, batch) for epoch in count() for batch in training.loader.epoch(epoch))
    for epoch, batch in batches:
        spent = time.perf_counter() - started
        more = len(times) < WARM_UP + FEWEST_STEPS or spent < min(STEP_SECONDS, most)
        if not agree_on_max(int(is_main() and more and len(times) < WARM_UP + MOST_STEPS)):
            break
        take_step(training, batch, epoch)
        settle(training)
        times.append(time.perf_counter() - started - sum(times))
    return median(times[WARM_UP:])


def tell(choices: list[Choice], facts: FolderFacts, minutes: float) -> None:
    """Print a table of the chosen settings, each with its reason."""
    rows = [[each.name, _shown(each.value), each.why] for each in choices if each.name in SHOWN]
    table(
        f"Chosen for {facts.images:,} images and {minutes:g} minutes",
        ["setting", "value", "why"],
        [row for row in rows if row[1] != "all" or row[2] == "yours"],
        text=(0, 2),
    )


def _shown(value: Any) -> str:
    if value is None:
        return "all"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
