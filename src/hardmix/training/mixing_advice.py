"""Is mixing worth it in this run? What our own pairs of runs say at its proxy accuracy.

The decisive parts of docs/plan-of-experiments.md trained MoCo-v2 and MoCHi from the same seeds at
several strengths of views, at three temperatures and two lengths. A run is told what was found near
it, and no more than its intervals support; a run far from all of them is told nothing. The proxy
accuracy depends on the length of the queue, so a run with another one is far, too.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from hardmix.runs.reading import number
from hardmix.settings.config import PretrainConfig
from hardmix.settings.loss_options import LossConfig

NEAR = 10.0
"""Percent of proxy accuracy within which a finding is of a run like this one."""
QUEUE_SIZE = 2048
"""Keys in the queue in all findings; the same training had a proxy accuracy of 15 % with 2048 keys
and of 27 % with 512."""


class Effect(NamedTuple):
    """MoCHi minus MoCo-v2 in percentage points: mean of the differences by seed."""

    mean: float
    low: float
    """Lower end of the 95 % interval (Student's t)."""
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.2f} ({self.low:+.2f} to {self.high:+.2f})"


class Finding(NamedTuple):
    """MoCHi over MoCo-v2 at one strength of views: CIFAR-100, 10,000 images, 20 or 60 epochs."""

    proxy_accuracy: float
    """Of MoCo-v2 in its last epoch, in percent."""
    probe: Effect
    knn: Effect
    temperature: float = 0.2
    pairs: int = 6
    """Pairs of runs behind it, all there are."""


FINDINGS: tuple[Finding, ...] = (
    # Crops from 0.08, colours.
    Finding(9.05, Effect(-0.35, -0.90, 0.19), Effect(0.24, -0.03, 0.51)),
    # Crops from 0.2, colours: MoCo-v2's own views.
    Finding(14.00, Effect(-0.29, -0.51, -0.07), Effect(0.45, 0.36, 0.53), pairs=12),
    # The same, 60 epochs.
    Finding(27.73, Effect(0.43, -0.14, 1.00), Effect(0.86, 0.63, 1.10)),
    # Crops from 0.6, colours.
    Finding(46.51, Effect(0.04, -0.26, 0.33), Effect(0.41, 0.02, 0.80)),
    # Crops from 0.08, no colours.
    Finding(48.60, Effect(0.17, -0.08, 0.42), Effect(0.30, 0.17, 0.42)),
    # Crops from 0.2, no colours.
    Finding(60.68, Effect(0.22, 0.04, 0.41), Effect(0.46, 0.40, 0.53), pairs=14),
    # Crops from 0.6, no colours.
    Finding(91.03, Effect(0.30, 0.21, 0.40), Effect(0.57, 0.47, 0.68)),
    # Crops from 0.2, no colours.
    Finding(69.42, Effect(-0.19, -0.44, 0.07), Effect(-0.04, -0.16, 0.07), temperature=0.1),
    Finding(48.87, Effect(0.24, -0.00, 0.49), Effect(0.62, 0.43, 0.80), temperature=0.4),
)
"""A test computes them from docs/results/records."""


def mixing_advice(config: PretrainConfig, lines: Sequence[dict[str, Any]]) -> str | None:
    """Return a sentence on mixing for a run with these log lines; None if it says nothing of it."""
    if not _is_comparable(config):
        return None
    logged = [line for line in lines if number(line.get("proxy_accuracy")) is not None]
    if not logged:
        return None
    epoch = logged[-1].get("epoch")
    last = [each["proxy_accuracy"] for each in logged if each.get("epoch") == epoch]
    percent = 100 * statistics.mean(last)
    near = min(FINDINGS, key=lambda each: _distance(each, config, percent))
    if not _is_near(near, config, percent):
        return None
    return (
        f"Proxy accuracy {percent:.0f} %: {_expected(near)} (in {near.pairs} pairs of runs on"
        f" CIFAR-100 at {near.proxy_accuracy:.0f} %, linear probe {near.probe} points, k-NN"
        f" {near.knn})."
    )


def _is_comparable(config: PretrainConfig) -> bool:
    """Return whether the run is MoCo or MoCHi in its plain form, as those of the findings."""
    return (
        config.method in ("moco-v1", "moco-v2", "mochi")
        and config.loss == LossConfig()
        and config.mix.strategy == "mochi"
        and config.mix.real_negatives == "keep"
        and not config.oracle
    )


def _distance(finding: Finding, config: PretrainConfig, percent: float) -> tuple[float, float]:
    """Return how far a finding is, first by temperature: a low one is much like mixing."""
    factor = abs(math.log(finding.temperature / config.train.temperature))
    return round(factor, 6), abs(finding.proxy_accuracy - percent)


def _is_near(finding: Finding, config: PretrainConfig, percent: float) -> bool:
    factor, away = _distance(finding, config, percent)
    queue = abs(math.log2(config.train.queue_size / QUEUE_SIZE))
    return factor == 0 and away <= NEAR and queue <= 1


def _expected(near: Finding) -> str:
    if near.probe.low > 0:
        return "mixing is expected to help a little"
    apart = ", except by k-NN" if near.knn.low > 0 else ""
    if near.probe.high < 0:
        return (
            "the task is still too hard for this encoder, so mixing is not expected to help"
            f" yet{apart}"
        )
    return f"mixing is not expected to make a clear difference{apart}"
