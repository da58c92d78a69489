"""Groups runs that differ only in the seed, which form one row of a table."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hardmix.runs.labels import identity, label_runs
from hardmix.runs.reading import RunRecord
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
    found: dict[str, list[RunRecord]] = {}
    for run in runs:
        found.setdefault(group_key(run.settings) or f"alone {run.name}", []).append(run)
    firsts = [members[0] for members in found.values()]
    labels = label_runs(
        [first.settings for first in firsts], [first.name for first in firsts], pooled=POOLED
    )
    return [
        SeedGroup(members, label, number)
        for number, (members, label) in enumerate(zip(found.values(), labels, strict=True))
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
    sentences = []
    for group in groups:
        known = [str(run.seed) for run in group.runs if run.seed is not None]
        for seed in sorted({seed for seed in known if known.count(seed) > 1}):
            names = [run.name for run in group.runs if str(run.seed) == seed]
            sentences.append(
                f"{', '.join(names)} have the same settings and the same seed {seed}: the table"
                " counts each of them, but they are not independent."
            )
    return sentences


def _plain(value: Any) -> Any:
    """Return a value that is the same for 1 and 1.0."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
