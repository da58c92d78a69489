"""`hardmix linear RUN`: accuracy of a linear classifier on the frozen trunk (Sec. 5, App. C.1).

The paper's protocol trains it on random crops, with official MoCo's details: trunk in evaluation
mode, weights from N(0, 0.01), SGD with momentum 0.9 and no weight decay (classifier_training.py).
`cached` extracts features once instead and fits in seconds; results are labelled as this other
protocol.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from hardmix.evaluation.accuracy import Accuracy, mean_and_deviation
from hardmix.evaluation.classifier_training import forget_epochs, train_classifier
from hardmix.evaluation.evaluated_run import EvaluatedRun, open_evaluated_run
from hardmix.evaluation.probe import cross_validated_penalty, probe_accuracy
from hardmix.runtime.console import say
from hardmix.settings.config import DataConfig
from hardmix.settings.evaluation_options import (
    LINEAR_PRESETS,
    LinearConfig,
    LinearOptions,
    LinearPreset,
    ProbeSolver,
)

SMALL = 100_000
"""With fewer training images than this, features are cached unless a preset is given."""


def measure(path: Path, options: LinearOptions, data: DataConfig | None = None) -> dict[str, Any]:
    """Run the protocol of the options; by default, cached features for small data sets."""
    evaluated = open_evaluated_run(path, data, options.precision)
    cached = options.cached
    if cached is None:
        named = options.preset is not None or bool(options.changes)
        cached = not named and len(evaluated.train) < SMALL
    if cached:
        return measure_cached(evaluated, options)
    return measure_on_crops(evaluated, options)


def measure_cached(
    evaluated: EvaluatedRun, options: LinearOptions, name: str = "linear-cached"
) -> dict[str, Any]:
    """Fit a classifier per seed to cached features; writes RUN/results/NAME.json."""
    solver, seeds = options.solver, options.seeds
    arrays = evaluated.split_features(evaluated.encoder)
    penalty = options.penalty
    tried: dict[float, float] = {}
    if penalty is None:
        say("Cross-validating the probe's penalty on the training images.")
        penalty, tried = cross_validated_penalty(*arrays[:2], solver=solver)
        say(f"Penalty {penalty:g}: held-out accuracy {_listed(tried)}.")
    found = [
        probe_accuracy(*arrays, solver=solver, penalty=penalty, seed=seed) for seed in range(seeds)
    ]
    top1, deviation = mean_and_deviation([each.top1 for each in found])
    top5, deviation5 = mean_and_deviation([each.top5 for each in found])
    result = {
        "protocol": cached_protocol(solver),
        "top1": top1,
        "top1_std": deviation,
        "top5": top5,
        "top5_std": deviation5,
        "seeds": seeds,
        "penalty": penalty,
        "penalty_chosen_by": "cross-validation" if tried else "the user",
        "cross_validation": {f"{each:g}": accuracy for each, accuracy in tried.items()},
        "train": len(evaluated.train),
        "test": len(evaluated.test),
    }
    say("This is not the paper's protocol, which trains on random crops and needs a preset.")
    how = f"{solver}, penalty {penalty:g}, {seeds} seeds, ± {deviation:.4f}"
    rows = {how: Accuracy(top1, top5)}
    return evaluated.conclude(name, result, "linear probe, cached features", rows)


def _listed(accuracies: Mapping[float, float]) -> str:
    return ", ".join(f"{value:.4f} with {penalty:g}" for penalty, value in accuracies.items())


def cached_protocol(solver: ProbeSolver) -> str:
    """Return what a result file records about the cached protocol."""
    return f"cached features, {solver}: not the paper's"


def measure_on_crops(evaluated: EvaluatedRun, options: LinearOptions) -> dict[str, Any]:
    """Run the paper's protocol; writes RUN/results/linear.json, led by the last epoch."""
    config, protocol = _protocol(evaluated, options)
    before = fingerprint(evaluated.encoder)
    test = evaluated.features(evaluated.encoder, evaluated.test, "test features")
    training = train_classifier(evaluated, config, test, before)
    curve = training.curve
    unchanged = fingerprint(evaluated.encoder) == before
    assert unchanged, "the trunk changed under linear evaluation"
    best = max(curve, key=lambda line: line["top1"])
    result = {
        "protocol": protocol,
        "top1": curve[-1]["top1"],
        "top5": curve[-1]["top5"],
        "best_top1": best["top1"],
        "best_top5": best["top5"],
        "best_epoch": best["epoch"],
        "trunk_unchanged": unchanged,
        "curve": curve,
        "settings": config.__dict__,
    }
    rows = {
        "after the last epoch": Accuracy(curve[-1]["top1"], curve[-1]["top5"]),
        f"best epoch ({best['epoch']})": Accuracy(best["top1"], best["top5"]),
    }
    result = evaluated.conclude("linear", result, f"linear evaluation, {protocol}", rows)
    forget_epochs(training)
    return result


def _protocol(evaluated: EvaluatedRun, options: LinearOptions) -> tuple[LinearConfig, str]:
    """Return the given preset, or that of the run's recipe, with changes; and a description."""
    recipe = evaluated.run.config().recipe
    fitting: LinearPreset = next((p for p in LINEAR_PRESETS if p == recipe), "imagenet100")
    preset = options.preset or fitting
    changes: dict[str, Any] = options.changes
    changed = "".join(f", {name} {value}" for name, value in changes.items())
    config = replace(LINEAR_PRESETS[preset], seed=options.seed, **changes)
    return config, f"preset {preset}{changed}"


def fingerprint(module: nn.Module) -> str:
    """Return a hash of every parameter and buffer."""
    total = hashlib.sha256()
    for name, value in module.state_dict().items():
        total.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return total.hexdigest()
