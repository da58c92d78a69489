"""The value of pre-training in words: a run's results/verdict.json, at the top of the page."""

from collections.abc import Sequence
from typing import NamedTuple

from hardmix.report import sentences
from hardmix.report.grouping import SeedGroup
from hardmix.report.run_figures import first_seeds_first
from hardmix.runs.summary import Verdict, verdict_of


class RunVerdict(NamedTuple):
    """A run's verdict, under the run's name and colour."""

    run: str
    label: str
    group: int
    said: Verdict


def verdicts(groups: Sequence[SeedGroup], missing: list[str]) -> list[RunVerdict]:
    """Return the verdicts of the runs that have one; older runs have none."""
    verdicts = []
    for group, run in first_seeds_first(groups):
        if "verdict" not in run.results:
            continue
        said = verdict_of(run.results["verdict"])
        if said is None:
            missing.append(sentences.NO_VERDICT.format(run=run.name))
        else:
            verdicts.append(RunVerdict(run.name, run.label, group.number, said))
    return verdicts
