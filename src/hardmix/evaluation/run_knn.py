"""`hardmix knn RUN`: k-NN accuracy of a run's encoder on its test images, and of the floor."""

import time
from pathlib import Path

from torch import nn

from hardmix.errors import InputError
from hardmix.evaluation.accuracy import Accuracy
from hardmix.evaluation.evaluated_run import Baseline, Subject, baseline_trunk, open_subject
from hardmix.evaluation.knn import knn_accuracy
from hardmix.runtime.console import say, table
from hardmix.settings.config import DataConfig


def evaluate(
    path: Path,
    data: DataConfig | None = None,
    *,
    k: int = 200,
    temperature: float = 0.07,
    baselines: tuple[Baseline, ...] = (),
) -> Accuracy:
    """All training images vote for all test images; the result is RUN/results/knn.json."""
    if k < 1 or temperature <= 0:
        raise InputError(f"k={k}, temperature={temperature}: both must be above 0.")
    started = time.monotonic()
    subject = open_subject(path, data)
    found = {"encoder": _score(subject, subject.encoder, k, temperature)}
    for baseline in baselines:
        found[baseline] = _score(subject, baseline_trunk(subject, baseline), k, temperature)
    accuracy = found.pop("encoder")
    result = {
        **accuracy._asdict(),
        "baselines": {name: each._asdict() for name, each in found.items()},
        "k": k,
        "temperature": temperature,
        "train": len(subject.train),
        "test": len(subject.test),
        "data": subject.train.name,
        "seconds": time.monotonic() - started,
    }
    file = subject.run.write_result("knn", result)
    rows = [["encoder", f"{accuracy.top1:.4f}", f"{accuracy.top5:.4f}"]]
    rows += [[name, f"{each.top1:.4f}", f"{each.top5:.4f}"] for name, each in found.items()]
    title = f"k-NN accuracy (k {k}, {len(subject.train)} vote, {len(subject.test)} tested)"
    table(title, ["", "top 1", "top 5"], rows)
    say(f"Wrote {file}")
    return accuracy


def _score(subject: Subject, trunk: nn.Module, k: int, temperature: float) -> Accuracy:
    train = subject.features(trunk, subject.train, "training features")
    test = subject.features(trunk, subject.test, "test features")
    data = train.features, train.labels, test.features, test.labels
    return knn_accuracy(*data, k=k, temperature=temperature)
