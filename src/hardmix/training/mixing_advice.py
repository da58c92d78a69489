"""Is mixing worth it in this run? What our own pairs of runs say at its proxy accuracy.

Questions 1, 2 and 5 of docs/plan-of-experiments.md trained MoCo-v2 and MoCHi from the same seeds at
several strengths of views, from a proxy task that is hardly solved to one that is (Sec. 3.2), and
at three temperatures. A run is told what was found nearest to it, and no more than its interval
supports.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from hardmix.settings.config import PretrainConfig

PAGE = "docs/results.md"


class Finding(NamedTuple):
    """MoCHi's gain over MoCo-v2 at one strength of views, CIFAR-100, 10,000 images, 20 epochs."""

    proxy_accuracy: float
    """Of MoCo-v2 in its last epoch, in percent."""
    gain: float
    """Percentage points of the linear probe, mean of the differences by seed."""
    low: float
    """Lower end of the 95 % interval (Student's t)."""
    high: float
    temperature: float = 0.2
    pairs: int = 6
    """Pairs of runs behind it, all there are."""


FINDINGS: tuple[Finding, ...] = (
    Finding(9.05, -0.35, -0.90, 0.19),  # crops from 0.08, colours
    Finding(14.00, -0.29, -0.51, -0.07, pairs=12),  # crops from 0.2, colours: MoCo-v2's own views
    Finding(46.51, 0.04, -0.26, 0.33),  # crops from 0.6, colours
    Finding(48.60, 0.17, -0.08, 0.42),  # crops from 0.08, no colours
    Finding(60.68, 0.22, 0.04, 0.41, pairs=14),  # crops from 0.2, no colours
    Finding(91.03, 0.30, 0.21, 0.40),  # crops from 0.6, no colours
    Finding(69.42, -0.19, -0.44, 0.07, temperature=0.1),  # crops from 0.2, no colours
    Finding(48.87, 0.24, -0.00, 0.49, temperature=0.4),  # crops from 0.2, no colours
)
"""A test computes them from docs/results/records."""


def mixing_advice(config: PretrainConfig, lines: Sequence[dict[str, Any]]) -> str | None:
    """Return a sentence on mixing for a run with these log lines; None if it says nothing of it."""
    if config.method not in ("moco-v1", "moco-v2", "mochi"):
        return None
    logged = [line for line in lines if "proxy_accuracy" in line]
    if not logged:
        return None
    last = [each["proxy_accuracy"] for each in logged if each["epoch"] == logged[-1]["epoch"]]
    percent = 100 * statistics.mean(last)
    near = min(FINDINGS, key=lambda each: _distance(each, config.train.temperature, percent))
    return f"Proxy accuracy {percent:.0f} %: {_expected(near)} ({_measured(near)}; {PAGE})."


def _distance(finding: Finding, temperature: float, percent: float) -> tuple[float, float]:
    """First by temperature: at a low one, hard negatives have most of the weight already."""
    factor = abs(math.log(finding.temperature / temperature))
    return round(factor, 6), abs(finding.proxy_accuracy - percent)


def _expected(near: Finding) -> str:
    if near.low > 0:
        return "mixing is expected to help a little"
    if near.high < 0:
        return "the negatives are hard enough already, and mixing is not expected to help yet"
    return "we could not tell MoCHi from MoCo-v2 there, so do not count on mixing"


def _measured(near: Finding) -> str:
    return (
        f"at {near.proxy_accuracy:.0f} % and temperature {near.temperature}, MoCHi's linear probe"
        f" was {near.gain:+.2f} points from MoCo-v2's, 95 % interval {near.low:+.2f} to"
        f" {near.high:+.2f}, {near.pairs} pairs of runs on CIFAR-100"
    )
