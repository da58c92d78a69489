"""Groups of runs that differ only in the seed, one row of a table each, and their differences."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hardmix.evaluation.accuracy import mean_and_deviation
from hardmix.report.sentences import SAME_SEED
from hardmix.runs.reading import RunRecord, identity, label_runs
from hardmix.settings.saved import own_facts

BASELINE = "moco-v2"
POOLED = ("train.seed",)


@dataclass(frozen=True)
class SeedGroup:
    """Runs with the same config but different seeds."""

    runs: list[RunRecord]
    label: str
    """Label of its runs, without the seed."""
    number: int

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of its first run."""
        return self.runs[0].settings

    @property
    def seeds(self) -> str:
        """Seeds of its runs, in order."""
        return ", ".join("not recorded" if run.seed is None else str(run.seed) for run in self.runs)


def group_runs(runs: Sequence[RunRecord]) -> list[SeedGroup]:
    """Group runs with the same config except for the seed; those without a config stay alone."""
    by_key: dict[str, list[RunRecord]] = {}
    for run in runs:
        by_key.setdefault(group_key(run.settings) or f"alone {run.name}", []).append(run)
    firsts = [members[0] for members in by_key.values()]
    labels = label_runs(
        [first.settings for first in firsts], [first.name for first in firsts], pooled=POOLED
    )
    return [
        SeedGroup(members, label, number)
        for number, (members, label) in enumerate(zip(by_key.values(), labels, strict=True))
    ]


def group_key(settings: Mapping[str, Any]) -> str:
    """Return a key that the runs of a group share; empty if nothing is known."""
    kept = identity(settings, pooled=POOLED)
    return json.dumps({k: _plain(v) for k, v in sorted(kept.items())}) if kept else ""


def baseline_key(settings: Mapping[str, Any]) -> str:
    """Return the group key of MoCo-v2 runs that differ only in the method's own settings."""
    own = own_facts(settings.get("method"))
    shared = {name: value for name, value in settings.items() if name not in own}
    return group_key({**shared, "method": BASELINE})


def repeated_seeds(groups: Sequence[SeedGroup]) -> list[str]:
    """Return sentences about runs with equal settings and seeds, which are not independent."""
    repeated = []
    for group in groups:
        seeds = [str(run.seed) for run in group.runs if run.seed is not None]
        for seed in sorted({seed for seed in seeds if seeds.count(seed) > 1}):
            names = [run.name for run in group.runs if str(run.seed) == seed]
            repeated.append(SAME_SEED.format(runs=", ".join(names), seed=seed))
    return repeated


def _plain(value: Any) -> Any:
    """Return a value that is the same for 1 and 1.0."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


# -- differences of groups


GainId = Literal["difference", "one-seed", "baseline", "no-baseline", "not-evaluated"]
"""Kind of gain: known with its error, of a single seed, or the reason why it is unknown."""


@dataclass(frozen=True)
class Gain:
    """Percentage points over the MoCo-v2 baseline, or the reason why they are unknown."""

    id: GainId
    word: str = ""
    """A word that a table prints with the difference."""
    points: float | None = None
    error: float | None = None
    """Standard error of the difference; None if either side has a single seed."""


def difference(ours: list[float], theirs: list[float]) -> Gain:
    """Return the difference of two means, with its standard error if both have two values."""
    (mean, deviation), (mean0, deviation0) = mean_and_deviation(ours), mean_and_deviation(theirs)
    if min(len(ours), len(theirs)) < 2:
        return Gain("one-seed", "one seed", mean - mean0)
    error = math.sqrt(deviation**2 / len(ours) + deviation0**2 / len(theirs))
    return Gain("difference", "", mean - mean0, error)
