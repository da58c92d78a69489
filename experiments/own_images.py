"""A table for any folder with labels: does `hardmix pretrain photos` help, does its verdict tell?

    python experiments/own_images.py TRAIN TEST OUT [--minutes 10] [--seeds 0 1 2]
        [--init WEIGHTS [--statistics moving]]

TRAIN and TEST are folders of images in folders named by class. Training sees TRAIN alone, and the
verdict is about TRAIN alone; TEST, on which nothing was trained or chosen, then shows whether it
was right. Every encoder is measured four ways with centred features: the nearest image and the vote
of the 20 nearest within TRAIN, each image by the others; the nearest training image of a test
image; logistic regression from TRAIN to TEST. A line of JSON for each seed is added to OUT.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import hardmix
from hardmix.data.image_set import ImageSet
from hardmix.data.sources import open_images
from hardmix.evaluation.baselines import baseline_trunk
from hardmix.evaluation.features import extract
from hardmix.evaluation.neighbours import neighbours
from hardmix.evaluation.probe import probe_accuracy
from hardmix.models.backbones import build_backbone
from hardmix.runs.folder import read_config
from hardmix.runs.weight_files import read_safetensors
from hardmix.settings.config import DataConfig
from hardmix.training.verdict import plain_vote

WORDS = {True: "better", False: "not better", None: "cannot tell"}


def measures(
    trunk: nn.Module, train: ImageSet, test: ImageSet, data: DataConfig
) -> dict[str, float]:
    """Return the four accuracies of an encoder."""
    known, unseen = extract(trunk, train, data), extract(trunk, test, data)
    mean = known.features.mean(dim=0)
    bank, asked = known.features - mean, unseen.features - mean
    within = torch.cat(
        [near.places for near in neighbours(bank, bank, 20, device=bank.device, leave_one_out=True)]
    )
    beyond = torch.cat([near.places for near in neighbours(bank, asked, 1, device=bank.device)])
    labels = known.labels[within]
    probe = probe_accuracy(bank, known.labels, asked, unseen.labels, penalty=1e-3)
    return {
        "nearest": float((labels[:, 0] == known.labels).float().mean()),
        "vote": float((plain_vote(labels) == known.labels).float().mean()),
        "test nearest": float((known.labels[beyond[:, 0]] == unseen.labels).float().mean()),
        "test logistic": probe.top1,
    }


def compare(args: argparse.Namespace, seed: int) -> dict[str, object]:
    """Train once and measure the encoder beside its baselines."""
    run = args.out.parent / f"{args.train.parent.name}-{args.minutes:g}-{args.statistics}-{seed}"
    started = time.monotonic()
    config = hardmix.recipes.photos()
    config = replace(
        config,
        data=replace(config.data, root=str(args.train)),
        model=replace(config.model, init=args.init, statistics=args.statistics),
        train=replace(config.train, seed=seed),
        minutes=args.minutes,
    )
    hardmix.pretrain(config, run)
    seconds = time.monotonic() - started
    config = read_config(hardmix.Run(run).config_file)
    data = replace(config.data, num_images=None)
    train = open_images(data, "train", 0)
    test = open_images(replace(data, root=str(args.test)), "train", 0)
    assert train.classes == test.classes
    trunks = {
        name: baseline_trunk(name, config.model.backbone, 3, data.image_size, seed)
        for name in ("untrained", "pixels", "colours")
    }
    verdict = json.loads((run / "results" / "verdict.json").read_text())
    files = {"encoder": "encoder", "start": "start"}
    if verdict["kept"] == "start":
        files = {"encoder": "encoder-trained", "start": "encoder"}
    for name, file in files.items():
        if (path := run / f"{file}.safetensors").exists():
            trunk = build_backbone(config.model.backbone, 3, data.image_size).trunk
            trunk.load_state_dict(read_safetensors(path).tensors)
            trunks[name] = trunk
    return {
        "images": args.train.parent.name,
        "seed": seed,
        "minutes": args.minutes,
        "seconds": round(seconds),
        "init": args.init and Path(args.init).name,
        "statistics": args.statistics,
        "measures": {name: measures(trunk, train, test, data) for name, trunk in trunks.items()},
        "verdict": WORDS[verdict["better"]],
        "differences": verdict["differences"],
        "text": verdict["text"],
    }


def main() -> None:
    """Train with every seed and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("train", "test", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--init", default=None)
    parser.add_argument("--statistics", default="auto", choices=["auto", "moving", "frozen"])
    args = parser.parse_args()
    for seed in args.seeds:
        found = compare(args, seed)
        with args.out.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(json.dumps(found["measures"], indent=1), found["verdict"])


if __name__ == "__main__":
    main()
