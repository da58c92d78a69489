"""The paper's ten claims, judged by the runs of a sweep's folder: DIR/claims.md and claims.json.

One rule for all comparisons of accuracies: differences are taken by seed, and are significant if
the 95 % interval of their mean by Student's t excludes 0. If two rows share fewer than two seeds, a
difference is significant if it exceeds twice its standard error. A claim is then "seen" or "not
seen"; without two seeds on each side, or without the runs it is about, it "cannot be judged".
Labels are the paper's (K = 16384); at a small scale, the numbers of the runs are smaller.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from hardmix.analysis.hardness import half_holders
from hardmix.analysis.over_training import epoch_means
from hardmix.evaluation.accuracy import mean_and_deviation
from hardmix.report.grouping import difference
from hardmix.runs.reading import RunRecord
from hardmix.sweep.grids import BEST
from hardmix.sweep.pairs import student_interval
from hardmix.sweep.planning import SweepOptions, make_plan
from hardmix.sweep.results import TableRow, collect, write_files

Verdict = Literal["seen", "seen in part", "not seen", "cannot be judged"]

JUDGED = ("table1", "table1-supp", "fig3a", "fig3b", "variants")
"""Grids whose rows share labels and settings."""
FEW = 0.1
"""Claim 4, as a fraction of all synthetic points: the paper says "around only 1 %"."""
SMALL = 64
"""Claim 6: the paper's smallest N."""
MOCO, MOCHI = "MoCo-v2", f"MoCHi {BEST}"


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, the verdict of the runs, and the numbers."""

    number: int
    claim: str
    place: str
    verdict: Verdict
    evidence: str


Judgement = tuple[Verdict, str]


class Evidence:
    """The rows of a folder by label, with their values by measure and their runs."""

    def __init__(self, options: SweepOptions) -> None:
        self.lines: dict[str, TableRow] = {}
        self._values: dict[tuple[str, str], dict[int, float]] = {}
        for grid in JUDGED:
            result = collect(make_plan(replace(options, grid=grid, only=(), index=None)))
            for line in result.lines:
                if line.finished.names:
                    self.lines[line.row.label] = line
                for measure, cell in line.cells.items():
                    self._values[line.row.label, measure] = cell.values

    def values(self, label: str, measure: str) -> dict[int, float]:
        """Return values by seed; "linear" is the scale's own protocol."""
        if measure == "linear":
            full = self._values.get((label, "linear"))
            return full or self._values.get((label, "linear-cached"), {})
        return self._values.get((label, measure), {})

    def records(self, label: str) -> list[RunRecord]:
        """Return the finished runs of a row."""
        return self.lines[label].finished.records if label in self.lines else []

    def by_epoch(self, label: str, key: str) -> dict[int, list[float]]:
        """Return a metric's means by epoch in percent, for every run by seed."""
        runs = {r.seed: epoch_means(r.metrics, key) for r in self.records(label)}
        return {
            seed: [100 * value for value in run]
            for seed, run in runs.items()
            if run and isinstance(seed, int)
        }

    def last(self, label: str, key: str) -> dict[int, float]:
        """Return the metric at the end of training, by seed."""
        return {seed: run[-1] for seed, run in self.by_epoch(label, key).items()}

    def compare(self, ours: str, theirs: str, measure: str = "linear") -> tuple[int | None, str]:
        """Return the difference's sign and words; 0 within the noise, None without two seeds."""
        mine, other = self.values(ours, measure), self.values(theirs, measure)
        if not mine or not other:
            return None, f"{ours if not mine else theirs} has no {measure} result"
        sign, words = sign_of(mine, other)
        return sign, f"{measure} of {ours} {_mean(mine)}, of {theirs} {_mean(other)}: {words}"


def judge(options: SweepOptions) -> list[Claim]:
    """Judge all ten claims, in the paper's order."""
    evidence = Evidence(options)
    return [
        Claim(number, claim, place, *judgement(evidence))
        for number, (claim, place, judgement) in enumerate(CLAIMS, start=1)
    ]


def write_claims(options: SweepOptions, claims: Sequence[Claim]) -> list[Path]:
    """Write the claims as Markdown and as JSON."""
    rows = [f"| {c.number} | {c.claim} ({c.place}) | {c.verdict} | {c.evidence} |" for c in claims]
    head = ["| | the paper's claim | here | evidence |", "|---|---|---|---|"]
    return write_files(
        {
            options.out / "claims.md": "\n".join([__doc__ or "", *head, *rows, ""]),
            options.out / "claims.json": json.dumps([asdict(c) for c in claims], indent=2),
        }
    )


def _hardness(evidence: Evidence) -> Judgement:
    """Compare the first and last record of Fig. 2a in every MoCo-v2 run."""
    spans = [half_holders(record) for record in evidence.records(MOCO)]
    pairs = [(span[0], span[-1]) for span in spans if len(span) > 1]
    if not pairs:
        return "cannot be judged", "no matching probabilities of MoCo-v2 at two epochs"
    shown = ", ".join(f"{early:.1%} to {late:.1%}" for early, late in pairs)
    fell = all(late < early for early, late in pairs)
    return (
        "seen" if fell else "not seen",
        f"fraction of the recorded negatives with half of the matching probability: {shown}",
    )


def _proxy(evidence: Evidence) -> Judgement:
    """Compare the last epoch with and without synthetic points, and MoCo-v2."""
    kept, discarded, moco = (
        evidence.last(label, key)
        for label, key in (
            (MOCHI, "proxy_accuracy_mixed"),
            (MOCHI, "proxy_accuracy"),
            (MOCO, "proxy_accuracy"),
        )
    )
    if min(len(kept), len(discarded), len(moco)) < 2:
        return "cannot be judged", f"needs two seeds of {MOCHI} and of {MOCO}"
    falls, returns = sign_of(kept, discarded)[0], sign_of(discarded, moco)[0]
    shown = f"{_mean(kept)} with them, {_mean(discarded)} without, {MOCO} {_mean(moco)}"
    if falls != -1:
        return "not seen", shown
    return "seen in part" if returns == -1 else "seen", shown


def _false_negatives(evidence: Evidence) -> Judgement:
    """Compare the first and last epoch of every run of MoCo-v2 and MoCHi."""
    key = "false_negatives_top"
    means = [evidence.by_epoch(label, key) for label in (MOCO, MOCHI)]
    pairs = [(run[0], run[-1]) for row in means for run in row.values() if len(run) > 1]
    if not pairs:
        return "cannot be judged", "no run has labels and two epochs"
    early, late = (dict(enumerate(pair[i] for pair in pairs)) for i in (0, 1))
    shown = f"{_mean(early)} % in the first epoch, {_mean(late)} % in the last, {len(pairs)} runs"
    return "seen" if all(b > a for a, b in pairs) else "not seen", shown


def _false_parents(evidence: Evidence) -> Judgement:
    both, one = (
        evidence.last(MOCHI, key) for key in ("synthetic_both_false", "synthetic_one_false")
    )
    if not both:
        return "cannot be judged", f"no run of {MOCHI} with labels"
    shown = f"both parents false {_mean(both)} %, at least one {_mean(one)} %; the paper: 1 and 8 %"
    return "seen" if max(both.values()) < 100 * FEW else "not seen", shown


def _gain(evidence: Evidence) -> Judgement:
    sign, shown = evidence.compare(MOCHI, MOCO)
    return _seen(sign, 1), shown


def _settings(evidence: Evidence) -> Judgement:
    """Judge every plain MoCHi row with MoCo-v2's K and length; (64, 64, 0) is the smallest N."""
    base = evidence.lines.get(MOCO)
    rows = [line.row for line in evidence.lines.values() if line.row.mix and not line.row.oracle]
    rows = [
        row
        for row in rows
        if base
        and (row.queue_size, row.epochs) == (base.row.queue_size, base.row.epochs)
        and not row.changes
    ]
    signs = {row: evidence.compare(row.label, MOCO) for row in rows}
    large = {row.label: each for row, each in signs.items() if row.mix and row.mix[0] > SMALL}
    small = {row.label: each for row, each in signs.items() if row.mix and row.mix[0] <= SMALL}
    shown = "; ".join(text for _, text in (large | small).values()) or "no MoCHi row"
    known = [sign for sign, _ in large.values() if sign is not None]
    if len(known) < 3 or any(sign is None for sign, _ in small.values()) or not small:
        return "cannot be judged", f"needs three settings and a small N with two seeds: {shown}"
    many = sum(sign > 0 for sign in known) > len(known) / 2
    useless = all(sign is not None and sign <= 0 for sign, _ in small.values())
    return "seen" if many and useless else "seen in part" if many else "not seen", shown


def _smaller_queue(evidence: Evidence) -> Judgement:
    """Also compare MoCo-v2 with the same queue: the small queue alone may do as well."""
    sign, shown = evidence.compare(f"{MOCHI}, K = 4096", MOCO)
    if evidence.values(f"{MOCO}, K = 4096", "linear"):
        shown += "; " + evidence.compare(f"{MOCO}, K = 4096", MOCO)[1]
    return "cannot be judged" if sign is None else "seen" if sign >= 0 else "not seen", shown


def _oracle(evidence: Evidence) -> Judgement:
    """Sec. 4.3: with the oracle MoCHi is above MoCo-v2, and both above themselves without it."""
    parts = [
        evidence.compare(f"{MOCO}, oracle", MOCO),
        evidence.compare(f"{MOCHI}, oracle", MOCHI),
        evidence.compare(f"{MOCHI}, oracle", f"{MOCO}, oracle"),
    ]
    shown = "; ".join(text for _, text in parts)
    signs = [sign for sign, _ in parts]
    if None in signs:
        return "cannot be judged", shown
    if signs[2] != 1:
        return "not seen", shown
    return "seen" if signs.count(1) == 3 else "seen in part", shown


def _uniformity(evidence: Evidence) -> Judgement:
    sign, shown = evidence.compare(MOCHI, MOCO, "uniformity")
    return _seen(sign, -1), f"{shown} (a loss: less is more uniform)"


def _softmax(evidence: Evidence) -> Judgement:
    sampled = "softmax-sampled"
    labels = [k for k, row in evidence.lines.items() if row.config.mix.strategy == sampled]
    parts = [evidence.compare(label, MOCHI) for label in labels]
    shown = "; ".join(text for _, text in parts) or "no softmax-sampled run"
    signs = [sign for sign, _ in parts if sign is not None]
    if not signs:
        return "cannot be judged", shown
    fallen = signs.count(-1)
    return "seen" if fallen == len(signs) else "seen in part" if fallen else "not seen", shown


CLAIMS: list[tuple[str, str, Callable[[Evidence], Judgement]]] = [
    ("fewer and fewer negatives matter as training goes on", "Fig. 2a", _hardness),
    ("proxy accuracy falls when h' points count, not without them", "Fig. 2b", _proxy),
    ("false negatives among the highest rise with training", "Fig. 2c", _false_negatives),
    ("synthetic points with two false parents stay few", "Fig. 2c", _false_parents),
    ("MoCHi improves linear accuracy over MoCo-v2", "Table 1", _gain),
    ("many (N, s, s') help, a very small N does not", "Fig. 3, Table 1 of the appendix", _settings),
    ("MoCHi with a quarter of the queue matches MoCo-v2", "App. C.2", _smaller_queue),
    ("with the class oracle MoCHi reaches a higher bound than MoCo-v2", "Sec. 4.3", _oracle),
    ("MoCHi raises uniformity", "Fig. 3c", _uniformity),
    ("softmax-sampled negatives hurt much", "App. B.2", _softmax),
]


def _seen(sign: int | None, wanted: int) -> Verdict:
    return "cannot be judged" if sign is None else "seen" if sign == wanted else "not seen"


def sign_of(ours: Mapping[int, float], theirs: Mapping[int, float]) -> tuple[int | None, str]:
    """Return the sign of a significant difference of values by seed, and the difference."""
    both = [value - theirs[seed] for seed, value in ours.items() if seed in theirs]
    if len(both) > 1:
        interval = student_interval(both)
        return interval.sign, f"{interval.text(2)}, {len(both)} pairs"
    gain = difference(list(ours.values()), list(theirs.values()))
    assert gain.points is not None
    if gain.error is None:
        return None, f"{gain.points:+.2f} (one seed)"
    sign = (gain.points > 0) - (gain.points < 0) if abs(gain.points) > 2 * gain.error else 0
    return sign, f"{gain.points:+.2f} ± {gain.error:.2f}, no pairs"


def _mean(by_seed: Mapping[int, float]) -> str:
    values = list(by_seed.values())
    mean, deviation = mean_and_deviation(values)
    return f"{mean:.2f} ± {deviation:.2f}" if len(values) > 1 else f"{mean:.2f}"
