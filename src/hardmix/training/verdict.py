"""The verdict at the end of every run: is the encoder better than untrained features.

It is compared with the untrained network, raw pixels, a colour histogram, and the weights it
started from, if any: by the k-NN accuracy if the images have labels, otherwise by the agreement of
two views' neighbours (`evaluation.comparison`). A sample of the images is enough, so that it takes
seconds. If training made the weights it started from worse, those are kept.
"""

import copy
import time
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hardmix.data.image_set import ImageSet
from hardmix.evaluation.baselines import ColourHistogram, ReducedPixels
from hardmix.evaluation.comparison import Scores, compare_by_labels, compare_by_views
from hardmix.models.backbones import build_backbone
from hardmix.runs.weight_files import read_safetensors
from hardmix.runtime.distributed import agree_on_max, broadcast, is_main, share_state
from hardmix.runtime.random_numbers import seed_of
from hardmix.settings.config import DataConfig, PretrainConfig
from hardmix.training.knn_images import KnnImages
from hardmix.training.mixing_advice import mixing_advice
from hardmix.training.state import Training, pause
from hardmix.training.verdict_words import Compared, advise, tell

MOST, FEWEST = 5000, 200
"""Images of the sample."""
OPERATIONS = {"cpu": 4e12}
"""Floating-point operations that the sample may cost, by device: half a minute on two cores."""
GPU_OPERATIONS = 4e14
TESTED = 0.2
"""Share of the sample that is classified, if there are test images."""
CLEAR = 2.0
"""Standard errors by which two encoders must differ."""


class VerdictImages(NamedTuple):
    """The images of the verdict."""

    bank: ImageSet
    test: ImageSet | None
    """Labelled test images; None: the bank is classified, leaving one out."""
    labelled: bool


def judge(training: Training) -> dict[str, Any]:
    """Compare the encoder with its baselines; return the contents of results/verdict.json."""
    started, config = time.monotonic(), training.config
    if training.images is None:
        return no_verdict(config)
    encoders = encoders_of(training)
    number = sample_size(encoders, config.data)
    images = choose_images(training.images, training.knn_images, number, config.train.seed)
    scores = measure(training, encoders, images)
    compared = compare(scores)
    keep = "start" if "start" in compared and compared["start"].worse else "encoder"
    better = all(each.better for each in compared.values())
    return {
        "text": tell(scores, compared, labelled=images.labelled, keep=keep),
        "better": better,
        "next": [] if better else advise(config, compared, len(training.images), training.run),
        "measure": "knn" if images.labelled else "views",
        "scores": {name: _score(each) for name, each in scores.each.items()},
        "differences": {name: each.as_json() for name, each in compared.items()},
        "kept": keep,
        "images": len(scores.each["encoder"]),
        "searched": scores.searched,
        "k": scores.k,
        "chance": scores.chance,
        "leave_one_out": images.labelled and images.test is None,
        "seed": config.train.seed,
        "seconds": time.monotonic() - started,
    }


def measure(training: Training, encoders: dict[str, nn.Module], images: VerdictImages) -> Scores:
    """Score every encoder on the same images, with labels or without, in float32."""
    config = training.config
    compute = training.compute._replace(bf16=False, fp16=False)
    between = partial(pause, training)
    if images.labelled:
        return compare_by_labels(encoders, images.bank, images.test, config.data, compute, between)
    return compare_by_views(encoders, images.bank, config.data, config.train.seed, compute, between)


def no_verdict(config: PretrainConfig) -> dict[str, Any]:
    """Shards are a stream, in which no neighbours can be looked for."""
    return {
        "text": "No verdict: shards are read as a stream; evaluate the encoder on a folder.",
        "better": None,
        "next": ["hardmix knn RUN --data.root FOLDER --baseline pixels untrained colours"],
        "measure": None,
        "scores": {},
        "differences": {},
        "kept": "encoder",
        "seed": config.train.seed,
    }


def encoders_of(training: Training) -> dict[str, nn.Module]:
    """Return the trained encoder and what it is compared with, by name, on every process."""
    config, trunk = training.config, training.method.trunk
    for buffer in trunk.buffers():  # rank 0's statistics are those that are saved
        broadcast(buffer)
    found = {"encoder": trunk}
    file = training.run.start_file  # on the disk of rank 0, perhaps only there
    if agree_on_max(int(is_main() and file.exists())):
        found["start"] = copy.deepcopy(trunk)
        if is_main():
            found["start"].load_state_dict(read_safetensors(file)[0])
        share_state(found["start"])
    if not training.own_trunk:
        torch.manual_seed(seed_of("weights", config.train.seed))
        size, channels = config.data.image_size, config.data.channels
        untrained = build_backbone(config.model.backbone, channels, size).trunk
        found["untrained"] = untrained.to(training.compute.device)
    found |= {"pixels": ReducedPixels(), "colours": ColourHistogram()}
    return {name: each.to(memory_format=torch.channels_last) for name, each in found.items()}


def sample_size(encoders: dict[str, nn.Module], data: DataConfig) -> int:
    """Return how many images can be compared; by counting operations, not by a clock."""
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
    images: ImageSet, labelled: KnnImages | None, number: int, seed: int
) -> VerdictImages:
    """Return a sample of the images: labelled ones, if the labels say anything."""
    if labelled is None or not _says_anything(labelled.bank):
        return VerdictImages(images.subset(number // 2, seed), None, False)
    if labelled.test is None:
        return VerdictImages(labelled.bank.subset(number, seed), None, True)
    asked = labelled.test.subset(max(1, int(TESTED * number)), 0)
    return VerdictImages(labelled.bank.subset(number - len(asked), seed), asked, True)


def _says_anything(images: ImageSet) -> bool:
    """Return whether neighbours of the same class are possible: not if each image has its own."""
    assert images.labels is not None
    counts = images.labels.bincount()
    shared = int(counts[counts > 1].sum())
    return int((counts > 0).sum()) >= 2 and 2 * shared >= len(images)


def compare(scores: Scores) -> dict[str, Compared]:
    """Return the encoder's lead over each of the others, with its standard error."""
    own = scores.each["encoder"].double()
    found = {}
    for name, each in scores.each.items():
        if name != "encoder":
            lead = own - each.double()
            error = float(lead.std()) / len(lead) ** 0.5 if len(lead) > 1 else 1.0
            mean = float(lead.mean())
            found[name] = Compared(mean, error, mean > CLEAR * error, mean < -CLEAR * error)
    return found


def _score(each: torch.Tensor) -> dict[str, float]:
    error = float(each.std()) / len(each) ** 0.5 if len(each) > 1 else 1.0
    return {"score": float(each.mean()), "error": error}


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
    if is_main():
        verdict["mixing"] = mixing_advice(training.config, run.metrics())
    run.write_result("verdict", verdict)
    return verdict
