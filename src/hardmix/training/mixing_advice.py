"""Is mixing worth it in this run? An answer from pairs of runs at about its proxy accuracy.

mixing_findings.csv has the gains of MoCHi over MoCo-v2, trained from the same seeds at several
strengths of views, at three temperatures and two lengths. A run is told what was found near it, and
no more than the intervals support; a run far from all of them is told nothing. The proxy accuracy
depends on the length of the queue, so a run with a different queue counts as far away.
"""

import csv
import math
import statistics
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from hardmix.runs.reading import number
from hardmix.settings.config import LossConfig, PretrainConfig
from hardmix.training import messages

NEAR = 10.0
"""Largest difference in proxy accuracy, in percent, at which a finding is about a run like this."""
QUEUE_SIZE = 2048
"""Keys in the queue in all findings; the same training had a proxy accuracy of 15 % with 2048 keys
and of 27 % with 512."""


class Effect(NamedTuple):
    """MoCHi minus MoCo-v2 in percentage points: mean of the differences by seed."""

    mean: float
    low: float
    """Lower end of the 95 % interval (Student's t)."""
    high: float


class Finding(NamedTuple):
    """MoCHi over MoCo-v2 at one strength of views: 10,000 images of CIFAR-100."""

    proxy_accuracy: float
    """MoCo-v2's in its last epoch, in percent."""
    probe: Effect
    knn: Effect
    temperature: float = 0.2
    pairs: int = 6
    """Pairs of runs behind it, all there are."""


@cache
def findings() -> tuple[Finding, ...]:
    """Return the findings, which tools/mixing_findings.py writes from the records."""
    text = files("hardmix.training").joinpath("mixing_findings.csv").read_text(encoding="utf-8")
    return tuple(_finding(line) for line in csv.DictReader(text.splitlines()))


def _finding(line: Mapping[str, str]) -> Finding:
    probe, knn = (
        Effect(*(float(line[f"{measure}{end}"]) for end in ("", "_low", "_high")))
        for measure in ("probe", "knn")
    )
    proxy, temperature = float(line["proxy_accuracy"]), float(line["temperature"])
    return Finding(proxy, probe, knn, temperature, int(line["pairs"]))


def mixing_advice(config: PretrainConfig, lines: Sequence[dict[str, Any]]) -> str | None:
    """Return a sentence on mixing for a run with these log lines; None if nothing is known."""
    if not _is_comparable(config):
        return None
    logged = [line for line in lines if number(line.get("proxy_accuracy")) is not None]
    if not logged:
        return None
    epoch = logged[-1].get("epoch")
    last = [line["proxy_accuracy"] for line in logged if line.get("epoch") == epoch]
    percent = 100 * statistics.mean(last)
    near = min(findings(), key=lambda finding: _distance(finding, config, percent))
    if not _is_near(near, config, percent):
        return None
    return messages.MIXING.format(
        percent=percent,
        expectation=_expectation(near),
        pairs=near.pairs,
        near=near.proxy_accuracy,
        probe=messages.EFFECT.format(**near.probe._asdict()),
        knn=messages.EFFECT.format(**near.knn._asdict()),
    )


def _is_comparable(config: PretrainConfig) -> bool:
    """Return whether the run is MoCo or MoCHi in its plain form, like those of the findings."""
    return (
        config.method in ("moco-v1", "moco-v2", "mochi")
        and config.loss == LossConfig()
        and config.mix.strategy == "mochi"
        and config.mix.real_negatives == "keep"
        and not config.oracle
    )


def _distance(finding: Finding, config: PretrainConfig, percent: float) -> tuple[float, float]:
    """Return how far away a finding is, first by temperature: a low one is much like mixing."""
    factor = abs(math.log(finding.temperature / config.train.temperature))
    return round(factor, 6), abs(finding.proxy_accuracy - percent)


def _is_near(finding: Finding, config: PretrainConfig, percent: float) -> bool:
    factor, away = _distance(finding, config, percent)
    queue = abs(math.log2(config.train.queue_size / QUEUE_SIZE))
    return factor == 0 and away <= NEAR and queue <= 1


def _expectation(near: Finding) -> str:
    by_knn = near.knn.low > 0
    if near.probe.low > 0:
        return messages.MIXING_HELPS
    if near.probe.high < 0:
        return messages.MIXING_TOO_EARLY_BUT_KNN if by_knn else messages.MIXING_TOO_EARLY
    return messages.MIXING_UNCLEAR_BUT_KNN if by_knn else messages.MIXING_UNCLEAR
