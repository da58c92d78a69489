"""MoCo-v2 and MoCHi trained on the built-in shapes or CIFAR-10, compared with untrained baselines.

It ends with the report of both runs.
"""

import json
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from torch import nn

from hardmix.analysis.analyze import sketch
from hardmix.analysis.picture import check_installed, save
from hardmix.data.sources import open_images
from hardmix.errors import InputError
from hardmix.evaluation.accuracy import Accuracy
from hardmix.evaluation.evaluated_run import EvaluatedRun, open_evaluated_run
from hardmix.evaluation.knn import knn_accuracy
from hardmix.evaluation.linear import cached_protocol
from hardmix.evaluation.probe import probe_accuracy
from hardmix.report.page import write_report
from hardmix.runs.folder import Run, versions
from hardmix.runs.reading import read_run
from hardmix.runs.summary import ENCODERS
from hardmix.runtime.console import say, table
from hardmix.runtime.files import write_atomically
from hardmix.settings.config import DataConfig, PretrainConfig
from hardmix.settings.evaluations import Baseline, KnnOptions
from hardmix.settings.methods import MethodName
from hardmix.settings.recipes import RECIPES
from hardmix.training.pretrain import pretrain

COMPARED: tuple[MethodName, ...] = ("moco-v2", "mochi")

UNTRAINED: tuple[Baseline, ...] = ("pixels", "untrained")

VOTE = KnnOptions(k=200)

CIFAR_EPOCHS = 8
"""Enough to see it learn; the recipe's full length takes half an hour per method."""


def show(out: Path | None, data: DataConfig, *, epochs: int | None = None, seed: int = 0) -> Path:
    """Train both methods, evaluate them and two baselines, print a table and write a report."""
    started = time.monotonic()
    if out is None:
        names = (f"demo-{number}" if number > 1 else "demo" for number in count(1))
        out = next(path for path in map(Path("runs").joinpath, names) if not path.exists())
    configs = {method: demo_config(method, data, epochs, seed) for method in COMPARED}
    if out.exists() and any(out.iterdir()):
        raise InputError(f"--out {out} is not empty: choose another folder for the demo.")
    open_images(configs["mochi"].data, "train", seed).labelled()  # fail before training, not after
    runs = {method: pretrain(config, out / method) for method, config in configs.items()}
    subjects = {method: open_evaluated_run(run.path) for method, run in runs.items()}
    subject = subjects["mochi"]
    trunks: dict[str, nn.Module] = {
        **{ENCODERS[name]: subject.baseline(name) for name in UNTRAINED},
        **{method: each.encoder for method, each in subjects.items()},
    }
    found = {name: score(trunk, subject) for name, trunk in trunks.items()}
    scores = {name: {k: v.top1 for k, v in each.items()} for name, each in found.items()}
    file = out / "demo.json"
    facts = {"scores": scores, "seed": seed, "versions": versions()}
    write_atomically(file, json.dumps(facts, indent=2).encode())
    for method, run in runs.items():
        write_results(run, found[method], found, subject)
        draw(run)
    tell(scores, configs["mochi"], runs, file, time.monotonic() - started)
    page = write_report([run.path for run in runs.values()], out / "report.html", look=True)
    say(f"Open the report in a browser: {page.absolute().as_uri()}")
    return file


def demo_config(
    method: MethodName, data: DataConfig, epochs: int | None, seed: int
) -> PretrainConfig:
    """Return the recipe that fits the data, with the requested number of epochs."""
    recipe = "cifar10" if data.name == "cifar10" else "demo"
    config = RECIPES[recipe].build(method, False)
    if recipe == "demo" or data.root is not None:
        config = replace(config, data=data)
    if epochs is None:
        epochs = CIFAR_EPOCHS if recipe == "cifar10" else config.train.epochs
    mix = replace(config.mix, warm_up_epochs=min(config.mix.warm_up_epochs, epochs // 4))
    return replace(config, mix=mix, train=replace(config.train, epochs=epochs, seed=seed))


def score(trunk: nn.Module, subject: EvaluatedRun) -> dict[str, Accuracy]:
    """Return the k-NN and linear-probe accuracies of frozen features on the test images."""
    data = subject.split_features(trunk)
    knn = knn_accuracy(*data, k=200, temperature=VOTE.temperature)
    return {"knn": knn, "linear": probe_accuracy(*data)}


def write_results(
    run: Run, own: dict[str, Accuracy], found: dict[str, dict[str, Accuracy]], subject: EvaluatedRun
) -> None:
    """Write the results that `hardmix knn` and `hardmix linear` would write to the run."""
    where = {"train": len(subject.train), "test": len(subject.test), "data": subject.train.name}
    how: dict[str, dict[str, Any]] = {
        "knn": {"k": VOTE.k, "temperature": VOTE.temperature},
        "linear": {"protocol": cached_protocol("lbfgs")},
    }
    for kind, name in {"knn": "knn", "linear": "linear-cached"}.items():
        baselines = {each: found[ENCODERS[each]][kind]._asdict() for each in UNTRAINED}
        result = {**own[kind]._asdict(), "baselines": baselines, **how[kind], **where}
        run.write_result(name, result)


def draw(run: Run) -> None:
    """Draw the similarities over training; the report makes neighbours, map and gallery."""
    try:
        check_installed()
    except InputError as error:
        say(f"No figures were drawn for {run.path}: {error}")
        return
    for picture in sketch(read_run(run.path))[0]:
        save(picture, run.figures)


def tell(
    scores: dict[str, dict[str, float]],
    config: PretrainConfig,
    runs: dict[MethodName, Run],
    file: Path,
    seconds: float,
) -> None:
    """Print the table, what it shows and does not show, and where the files are."""
    rows = [[name, f"{s['knn']:.1%}", f"{s['linear']:.1%}"] for name, s in scores.items()]
    epochs = config.train.epochs
    table(f"{config.data.name}, test accuracy", ["", "k-NN", "linear probe"], rows)
    floor = max(scores[ENCODERS[name]]["knn"] for name in UNTRAINED)
    better = [name for name in COMPARED if scores[name]["knn"] > floor]
    learnt = " and ".join(better) if better else "neither method"
    say(
        f"After {epochs} epoch{'s' * (epochs != 1)}, {learnt} distinguished the classes better than"
        " raw pixels and the untrained encoder."
    )
    if config.data.name == "shapes" and len(better) == len(COMPARED):
        say("With 16 epochs, this held for all four seeds that were tried.")
    say("One seed cannot show which of the two is better.")
    say(f"Took {seconds:.0f} s. Wrote {file} and")
    for run in runs.values():
        say(f"  {run.path}: config.json, metrics.jsonl, encoder.safetensors")
