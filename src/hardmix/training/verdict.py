"""The verdict at the end of every run: is the encoder better than untrained features?

It is compared with the untrained network, raw pixels, a colour histogram and, if there are any, the
weights it started from. A sample of the images is enough, so that it takes seconds. Every encoder
sees the same pixels, in one pass, so that differences can be taken image by image. If training made
the weights it started from worse, those are kept.

With labels, the question is whether an image's nearest neighbour, and the plain vote of its 20
nearest, give its class. The classes of a folder are its finest folders: coarse ones are told apart
by colour alone. Features are centred, since the cosine of raw features favours an encoder that was
trained for it, and near-copies of an image do not vote: finding them is easy for anything.

Without labels, two views of every image are made, and an encoder finds the neighbours of each image
twice, once among the first views and once among the second: how many neighbours do the two lists
share? An encoder is trained for this very agreement. So it can fail this test, but not pass it:
without labels, the verdict is at best that nobody can tell.
"""

import copy
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from hardmix.data.image_files import printable
from hardmix.data.image_set import UNKNOWN, ImageSet
from hardmix.data.loading import ViewLoader
from hardmix.data.sources import data_name
from hardmix.evaluation.baselines import baseline_trunk
from hardmix.evaluation.features import extract
from hardmix.evaluation.knn import KnnImages
from hardmix.evaluation.neighbours import neighbours
from hardmix.runs.folder import Run
from hardmix.runs.weight_files import read_safetensors
from hardmix.runtime.device import Compute
from hardmix.runtime.distributed import (
    agree_on_max,
    broadcast,
    gather_uneven,
    is_main,
    rank,
    share_state,
    world_size,
)
from hardmix.settings.config import DataConfig, PretrainConfig
from hardmix.settings.evaluations import Baseline
from hardmix.settings.fitting_rules import MOST_EPOCHS
from hardmix.training import messages
from hardmix.training.mixing_advice import mixing_advice
from hardmix.training.state import Training, pause

MOST, FEWEST = 5000, 200
"""Most and fewest images of the sample."""
OPERATIONS = {"cpu": 4e12}
"""Floating-point operations that the sample may cost, by device: half a minute on two cores."""
GPU_OPERATIONS = 4e14
"""The same for all other devices."""
TESTED = 0.2
"""Share of the sample that is classified, if there are test images."""
CLEAR = 2.0
"""Standard errors by which two encoders must differ."""
FEW = 10_000
"""Images below which pre-trained weights are the first thing to try."""
IN_A_FOLDER = 5
"""Fewest images of a folder that counts as a class."""
NEAR_COPY = 0.97
"""Cosine of centred pixels from which two images are taken for copies of each other."""
COPIES = 10
"""Most near-copies of an image that are left out."""
VOTING = 20
"""Most nearest neighbours that vote: a tenth of the images if they are few."""
SHARED = 10
"""Most nearest neighbours of each view that are compared: a tenth of the images if they are few."""
VIEW_STRENGTH = 0.5
"""Strength of the colour changes of the two views, as data.colour_strength."""
VIEW_SCALE = 0.2
"""Smallest area of the two views, as data.min_scale."""
BATCH = 64
"""Images encoded at once on each process."""

Between = Callable[[], None]
"""Called before each batch, equally often on every process."""


class VerdictImages(NamedTuple):
    """The images of the verdict."""

    bank: ImageSet
    """Images among which neighbours are looked for."""
    test: ImageSet | None
    """Labelled test images; None means those of the bank, each classified by the others."""
    labelled: bool
    """Whether the labels decide."""
    classes: str = ""
    """Number and kind of the classes, in words: 81 folders."""


class Scores(NamedTuple):
    """How each encoder did, image by image."""

    each: dict[str, Float[Tensor, " images"]]
    """Score of every image by encoder, 0 to 1; the same images in the same order."""
    k: int
    """Number of nearest neighbours."""
    searched: int
    """Number of images among which neighbours are looked for."""
    chance: float
    """Score of features that say nothing about the images."""
    parts: dict[str, dict[str, float]] = {}  # noqa: RUF012
    """Accuracy of the nearest neighbour and of the vote by encoder; empty without labels."""


class Lead(NamedTuple):
    """The encoder's lead over another one."""

    difference: float
    """Mean over the images of its score minus the other's."""
    error: float
    """Standard error of that mean."""
    better: bool
    """Whether the lead is clear: more than two standard errors."""
    worse: bool
    """Whether the other's lead is clear."""


def conclude(training: Training, backbone: str | None) -> dict[str, Any]:
    """Judge the encoder, keep the better one of two, and write results/verdict.json."""
    verdict, run = judge(training), training.run
    if is_main():
        run.trained_file.unlink(missing_ok=True)
    if is_main() and verdict["kept"] == "start":
        trunk = training.method.trunk
        run.write_encoder(trunk, training.config, backbone, run.trained_file)
        start = copy.deepcopy(trunk)
        start.load_state_dict(read_safetensors(run.start_file)[0])
        run.write_encoder(start, training.config, backbone)
    if is_main() and training.config.recipe != "photos":
        verdict["mixing"] = mixing_advice(training.config, run.metrics())
    run.write_result("verdict", verdict)
    return verdict


def judge(training: Training) -> dict[str, Any]:
    """Compare the encoder with its baselines; return the contents of results/verdict.json."""
    started, config = time.monotonic(), training.config
    if training.images is None:
        return no_verdict(config)
    encoders = encoders_of(training)
    number = sample_size(encoders, config.data)
    finest = data_name(config.data) == "folder"
    images = choose_images(
        training.images, training.knn_images, number, config.train.seed, finest=finest
    )
    scores = measure(training, encoders, images)
    leads = compare(scores)
    keep = "start" if "start" in leads and leads["start"].worse else "encoder"
    ahead = all(lead.better for lead in leads.values())
    return {
        "text": tell(scores, leads, classes=images.classes, keep=keep),
        "better": (None if ahead else False) if not images.labelled else ahead,
        "next": [] if ahead else advise(config, leads, len(training.images), training.run),
        "measure": "knn" if images.labelled else "views",
        "classes": images.classes,
        "scores": {
            name: _score(values) | scores.parts.get(name, {})
            for name, values in scores.each.items()
        },
        "differences": {name: lead._asdict() for name, lead in leads.items()},
        "kept": keep,
        "images": len(scores.each["encoder"]),
        "searched": scores.searched,
        "k": scores.k,
        "chance": scores.chance,
        "leave_one_out": images.labelled and images.test is None,
        "seed": config.train.seed,
        "seconds": time.monotonic() - started,
    }


def no_verdict(config: PretrainConfig) -> dict[str, Any]:
    """Return the verdict on a stream of shards, in which no neighbours can be looked for."""
    return {
        "text": messages.NO_VERDICT,
        "better": None,
        "next": [messages.EVALUATE_A_FOLDER],
        "measure": None,
        "scores": {},
        "differences": {},
        "kept": "encoder",
        "seed": config.train.seed,
    }


# The encoders and the images


def encoders_of(training: Training) -> dict[str, nn.Module]:
    """Return the trained encoder and what it is compared with, by name, on every process."""
    config, trunk = training.config, training.method.trunk
    for buffer in trunk.buffers():  # rank 0's statistics are those that are saved
        broadcast(buffer)
    encoders = {"encoder": trunk}
    file = training.run.start_file  # on the disk of rank 0, and perhaps only there
    if agree_on_max(int(is_main() and file.exists())):
        encoders["start"] = copy.deepcopy(trunk)
        if is_main():
            encoders["start"].load_state_dict(read_safetensors(file)[0])
        share_state(encoders["start"])
    baselines: list[Baseline] = ["pixels", "colours"]
    if not training.own_trunk:
        baselines.insert(0, "untrained")
    channels, size = config.data.channels, config.data.image_size
    for name in baselines:
        baseline = baseline_trunk(name, config.model.backbone, channels, size, config.train.seed)
        encoders[name] = baseline.to(training.compute.device)
    return {
        name: encoder.to(memory_format=torch.channels_last) for name, encoder in encoders.items()
    }


def sample_size(encoders: dict[str, nn.Module], data: DataConfig) -> int:
    """Return how many images can be compared; operations are counted, so that it is repeatable."""
    trunk = encoders["encoder"]
    device = next(trunk.parameters(), torch.empty(0)).device
    image = torch.zeros(1, data.channels, data.image_size, data.image_size, device=device)
    training = trunk.training
    trunk.eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        trunk(image)
    trunk.train(training)
    networks = sum(name in ("encoder", "start", "untrained") for name in encoders)
    cost = max(1, counter.get_total_flops() * networks)
    allowed = OPERATIONS.get(device.type, GPU_OPERATIONS)
    return int(min(MOST, max(FEWEST, allowed / cost)))


def choose_images(
    images: ImageSet, labelled: KnnImages | None, number: int, seed: int, *, finest: bool = False
) -> VerdictImages:
    """Return a sample of the images: labelled ones, if the labels say anything.

    Args:
        images: all training images.
        labelled: those of a known class, and test images if there are any.
        number: most images of the sample.
        seed: decides which images are taken.
        finest: whether folders inside the class folders are classes of their own.
    """
    folders = _by_folder(images, labelled) if finest else None
    labelled, kind = (folders, "folders") if folders else (labelled, "classes")
    if labelled is None or not _says_anything(labelled.bank):
        return VerdictImages(images.subset(number // 2, seed), None, False)
    test = labelled.test
    if test is not None:
        test = test.subset(max(1, int(TESTED * number)), 0)
    bank = labelled.bank.subset(number - (0 if test is None else len(test)), seed)
    assert labelled.bank.labels is not None
    return VerdictImages(bank, test, True, f"{len(labelled.bank.labels.unique())} {kind}")


def _by_folder(images: ImageSet, labelled: KnnImages | None) -> KnnImages | None:
    """Return the images with their finest folders as classes, if most are in folders of several."""
    names = _folders(images)
    counts = Counter(names)
    kept = sorted(name for name, count in counts.items() if count >= IN_A_FOLDER)
    if len(kept) < 2 or 2 * sum(counts[name] for name in kept) < len(images):
        return None
    number = {name: i for i, name in enumerate(kept)}
    bank = _relabelled(images, names, number)
    if labelled is None or labelled.test is None:
        return KnnImages(bank, None)
    names = _folders(labelled.test)
    if not number.keys() & set(names):
        return None
    return KnnImages(bank, _relabelled(labelled.test, names, number))


def _folders(images: ImageSet) -> list[str]:
    """Return the folder of every image, relative to the one that holds them all."""
    folders = [os.path.dirname(file) for file in images.files or ()]
    root = os.path.commonpath(folders) if folders else ""
    return [os.path.relpath(folder, root) for folder in folders]


def _relabelled(images: ImageSet, names: list[str], number: dict[str, int]) -> ImageSet:
    labels = torch.tensor([number.get(name, UNKNOWN) for name in names])
    return replace(images, labels=labels, classes=tuple(map(printable, number))).labelled()


def _says_anything(images: ImageSet) -> bool:
    """Return whether neighbours can be of the same class: not if each image has its own class."""
    assert images.labels is not None
    counts = images.labels.bincount()
    shared = int(counts[counts > 1].sum())
    return int((counts > 0).sum()) >= 2 and 2 * shared >= len(images)


# The scores


class SideBySide(nn.Module):
    """Several encoders on the same images, their features next to each other."""

    def __init__(self, encoders: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.encoders = nn.ModuleDict(encoders)
        self.widths: list[int] = []

    def forward(self, images: Float[Tensor, "batch channels y x"]) -> Float[Tensor, "batch all"]:
        """Return the features of all encoders in a row."""
        features = [encoder(images).float() for encoder in self.encoders.values()]
        self.widths = [each.shape[1] for each in features]
        return torch.cat(features, dim=1)

    def separate(self, features: Float[Tensor, "n all"]) -> dict[str, Tensor]:
        """Return the features of each encoder by its name."""
        return dict(zip(self.encoders, features.split(self.widths, dim=1), strict=True))


def measure(training: Training, encoders: dict[str, nn.Module], images: VerdictImages) -> Scores:
    """Score every encoder on the same images, with labels or without, in float32."""
    config = training.config
    compute = training.compute._replace(bf16=False, fp16=False)
    between = partial(pause, training)
    if images.labelled:
        return compare_by_labels(encoders, images, config.data, compute, between)
    return compare_by_views(encoders, images.bank, config.data, config.train.seed, compute, between)


def compare_by_labels(
    encoders: Mapping[str, nn.Module],
    images: VerdictImages,
    data: DataConfig,
    compute: Compute,
    between: Between,
) -> Scores:
    """Score 1/2 if the nearest neighbour has the image's class, 1/2 if the vote of k gives it."""
    together = SideBySide(encoders)
    encode = partial(extract, compute=compute, title="verdict", between=between)
    bank = asked = encode(together, images.bank, data)
    if images.test is not None:
        asked = encode(together, images.test, data)
    alone = images.test is None
    k = max(1, min(VOTING, len(bank.labels) // 10))
    asked_features = together.separate(asked.features)
    features = {
        name: _centred(each, asked_features[name])
        for name, each in together.separate(bank.features).items()
    }
    copies = near_copies(*features["pixels"], leave_one_out=alone)
    each, parts = {}, {}
    for name, (ours, theirs) in features.items():
        places = _nearest(ours, theirs, k + COPIES, leave_one_out=alone)
        labels = bank.labels[without(places, copies, k)]
        right = labels == asked.labels[:, None]
        nearest, vote = right[:, 0].float(), (plain_vote(labels) == asked.labels).float()
        each[name] = ((nearest + vote) / 2).cpu()
        parts[name] = {"nearest": float(nearest.mean()), "vote": float(vote.mean())}
    frequency = bank.labels.bincount().max() / len(bank.labels)
    return Scores(each, k, len(bank.labels), float(frequency), parts)


def _centred(bank: Tensor, asked: Tensor) -> tuple[Tensor, Tensor]:
    mean = bank.mean(dim=0)
    return bank - mean, asked - mean


def near_copies(
    bank: Float[Tensor, "n pixels"], asked: Float[Tensor, "m pixels"], *, leave_one_out: bool
) -> Int[Tensor, "m copies"]:
    """Return the places of each image's near-copies in the bank by their pixels; -1 for none."""
    parts = neighbours(bank, asked, COPIES, device=bank.device, leave_one_out=leave_one_out)
    return torch.cat([part.places.where(part.similarity > NEAR_COPY, -1) for part in parts])


def without(
    places: Int[Tensor, "m near"], copies: Int[Tensor, "m copies"], k: int
) -> Int[Tensor, "m k"]:
    """Return the first k places of each row that are no near-copies, in their order."""
    copied = (places[:, :, None] == copies[:, None, :]).any(dim=2)
    order = copied.int().argsort(dim=1, stable=True)
    return places.gather(1, order)[:, :k]


def plain_vote(labels: Int[Tensor, "m k"]) -> Int[Tensor, " m"]:
    """Return the most frequent class of each row; of equally frequent ones the first to occur."""
    count = (labels[:, :, None] == labels[:, None, :]).sum(dim=2)
    return labels.gather(1, count.argmax(dim=1, keepdim=True))[:, 0]


@torch.no_grad()
def compare_by_views(
    encoders: Mapping[str, nn.Module],
    images: ImageSet,
    data: DataConfig,
    seed: int,
    compute: Compute,
    between: Between,
) -> Scores:
    """Score each image by the share of its nearest neighbours on which its two views agree."""
    together = SideBySide(encoders)
    views = _two_views(together, images, data, seed, compute, between)
    first, second = (together.separate(features) for features in views)
    number = len(next(iter(first.values())))
    k = max(1, min(SHARED, number // 10))
    scores = {name: shared_neighbours(first[name], second[name], k) for name in encoders}
    return Scores(scores, k, number, k / max(1, number - 1))


def shared_neighbours(
    first: Float[Tensor, "n dim"], second: Float[Tensor, "n dim"], k: int
) -> Float[Tensor, " n"]:
    """Return the share of every row's k nearest other rows on which both features agree."""
    one, other = (_nearest(each, each, k, leave_one_out=True) for each in (first, second))
    return (one[:, :, None] == other[:, None, :]).any(dim=2).float().mean(dim=1)


def _nearest(
    bank: Float[Tensor, "n dim"], asked: Float[Tensor, "m dim"], k: int, *, leave_one_out: bool
) -> Int[Tensor, "m k"]:
    parts = neighbours(bank, asked, k, device=bank.device, leave_one_out=leave_one_out)
    return torch.cat([part.places for part in parts])


def _two_views(
    together: SideBySide,
    images: ImageSet,
    data: DataConfig,
    seed: int,
    compute: Compute,
    between: Between,
) -> tuple[Tensor, Tensor]:
    """Return the features of two views of every image, in the images' order, on every process."""
    config = replace(
        data,
        augmentation="moco-v2",
        blur=False,
        views=None,
        min_scale=VIEW_SCALE,
        colour_strength=VIEW_STRENGTH,
    )
    batch = min(BATCH, max(1, len(images) // world_size())) * world_size()
    loader = ViewLoader(
        images, config, batch, seed, compute.device, rank(), world_size(), keep_last=True
    )
    rows: list[tuple[Tensor, ...]] = []
    training = together.training
    together.eval()
    batches = loader.epoch(0)
    try:
        for _ in range(loader.steps_per_epoch):
            between()
            views = next(batches)
            with compute.autocast():
                pair = [
                    together(view.contiguous(memory_format=torch.channels_last)).cpu()
                    for view in views.views
                ]
            rows.append((*pair, views.ids.cpu()))
    finally:
        loader.close()
        together.train(training)
    first, second, ids = (gather_uneven(torch.cat(column)) for column in zip(*rows, strict=True))
    order = _places_of_images(ids)
    return first[order], second[order]


def _places_of_images(ids: Int[Tensor, " n"]) -> Int[Tensor, " m"]:
    """Return one place of each image, in order; an image in place of an unreadable one repeats."""
    order = ids.argsort(stable=True)
    ordered = ids[order]
    new = torch.ones(len(ids), dtype=torch.bool)
    new[1:] = ordered[1:] != ordered[:-1]
    return order[new]


def compare(scores: Scores) -> dict[str, Lead]:
    """Return the encoder's lead over each of the others, with its standard error."""
    own = scores.each["encoder"].double()
    leads = {}
    for name, values in scores.each.items():
        if name != "encoder":
            lead = own - values.double()
            error = float(lead.std()) / len(lead) ** 0.5 if len(lead) > 1 else 1.0
            mean = float(lead.mean())
            leads[name] = Lead(mean, error, mean > CLEAR * error, mean < -CLEAR * error)
    return leads


def _score(values: Tensor) -> dict[str, float]:
    error = float(values.std()) / len(values) ** 0.5 if len(values) > 1 else 1.0
    return {"score": float(values.mean()), "error": error}


# The sentences


def tell(scores: Scores, leads: dict[str, Lead], *, classes: str, keep: str) -> str:
    """Return the verdict as one sentence, and a second one if the encoder was not kept."""
    own = scores.each["encoder"]
    error = f"{2 * float(own.std()) / len(own) ** 0.5:.1%}" if len(own) > 1 else "100%"
    ranked = sorted(leads, key=lambda name: leads[name].difference)
    cannot_tell = not classes and all(lead.better for lead in leads.values())
    template = messages.BY_LABELS if classes else messages.BY_VIEWS
    text = template.format(
        judgement=messages.CANNOT_TELL if cannot_tell else _judgement(leads),
        k=scores.k,
        classes=classes,
        score=_percent(own),
        error=error,
        images=len(own),
        others=", ".join(f"{messages.BASELINES[n]} {_percent(scores.each[n])}" for n in ranked),
    )
    return text + messages.START_KEPT if keep == "start" else text


def _judgement(leads: dict[str, Lead]) -> str:
    worse = [messages.BASELINES[name] for name, lead in leads.items() if lead.worse]
    even = [
        messages.BASELINES[name]
        for name, lead in leads.items()
        if not lead.worse and not lead.better
    ]
    if worse and even:
        return messages.WORSE_AND_EVEN.format(worse=_listed(worse), even=_listed(even))
    if worse:
        return messages.WORSE.format(worse=_listed(worse))
    if even:
        return messages.EVEN.format(even=_listed(even))
    return messages.BETTER if "start" in leads else messages.BETTER_THAN_SIMPLE


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _percent(scores: Tensor) -> str:
    return f"{float(scores.mean()):.1%}"


def advise(config: PretrainConfig, leads: dict[str, Lead], images: int, run: Run) -> list[str]:
    """Return what to try, the likeliest cure first."""
    advice, keys, data = [], config.train.queue_size, config.data
    if config.uses("train.queue_size") and 5 * keys > images:
        fewer = max(1, images // 5)
        advice.append(messages.SMALLER_QUEUE.format(keys=keys, images=images, fewer=fewer))
    changed = data.augmentation != "plain" and data.colour_strength > 0
    if not leads["colours"].better and changed:
        weaker = f"{data.colour_strength / 2:.2g}" if data.colour_strength > 0.3 else "0"
        advice.append(messages.WEAKER_COLOURS.format(weaker=weaker))
    longer = messages.LONGER.format(
        command=messages.resume_command(run), epochs=2 * config.train.last_epoch
    )
    enough = config.train.last_epoch >= MOST_EPOCHS
    if config.model.init is not None:
        cures = [messages.LOWER_TRUNK_LR.format(lower=config.trunk_lr / 10)]
        return [*advice, *cures, *([] if enough else [longer])]
    if enough:
        return [messages.FROM_WEIGHTS, *advice]
    return [messages.FROM_WEIGHTS, *advice, longer] if images < FEW else [*advice, longer]
