"""The paper's claims, judged by the runs of a sweep's folder: DIR/claims.md and claims.json.

One rule for all comparisons of accuracies: differences are taken by seed, and are significant if
the 95 % interval of their mean by Student's t excludes 0. If two rows share fewer than two seeds, a
difference is significant if it exceeds twice its standard error. A claim is then "seen" or "not
seen"; without two seeds on each side, or without the runs it is about, it "cannot be judged".
Of detectors, three fine-tunings of one run count as three seeds, as in the paper. A claim that two
numbers are similar is seen if they differ by less than 2 points, or not significantly.
Labels are the paper's (K = 16384); at a small scale, the numbers of the runs are smaller.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Literal

from hardmix.analysis.hardness import half_holders
from hardmix.analysis.over_training import epoch_means
from hardmix.evaluation.accuracy import mean_and_deviation
from hardmix.report.grouping import difference
from hardmix.runs.reading import RunRecord, number
from hardmix.sweep.grids import BEST
from hardmix.sweep.pairs import student_interval
from hardmix.sweep.planning import SweepOptions, make_plan
from hardmix.sweep.results import TableRow, collect, write_files

Verdict = Literal["seen", "seen in part", "not seen", "cannot be judged"]

ON_IMAGENET1K = ("table2", "table2-supp", "table3")
"""Grids of ImageNet-1k; their labels and settings are shared, too."""
JUDGED = (
    *("table1", "table1-supp", "fig2", "fig3a", "fig3b", "proxy", "variants"),
    *ON_IMAGENET1K,
)
"""Grids that claims are judged from; those of one data set share labels and settings."""
SIMILAR = 2.0
"""Points within which two accuracies of the proxy task are called similar."""
HALF = 50.0
"""Percent of the queries that decide whether synthetic points are harder than negatives."""
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
    """The rows of some grids by label, with their values by measure and their runs."""

    def __init__(self, options: SweepOptions, grids: Sequence[str]) -> None:
        self.lines: dict[str, TableRow] = {}
        self.detection = options.detection
        self._values: dict[tuple[str, str], dict[int, float]] = {}
        for grid in grids:
            result = collect(make_plan(replace(options, grid=grid, only=(), index=None)))
            for line in result.lines:
                if line.finished.names:
                    self.lines[line.row.label] = line
                for measure, cell in line.cells.items():
                    self._values[line.row.label, measure] = cell.values

    def values(self, label: str, measure: str) -> dict[int, float]:
        """Return values by seed, or by fine-tuning of a single run.

        "linear" is the scale's own protocol, and "voc AP" and "coco APbb" its own detectors.
        """
        if measure == "linear":
            full = self._values.get((label, "linear"))
            return full or self._values.get((label, "linear-cached"), {})
        if measure not in DETECTIONS:
            return self._values.get((label, measure), {})
        task, metric = DETECTIONS[measure]
        file = self.detection.get(task, "")
        by_seed = self._values.get((label, f"{file}/{metric}/ap"), {})
        return by_seed if len(by_seed) > 1 else self._fine_tunings(label, file, metric) or by_seed

    def _fine_tunings(self, label: str, file: str, metric: str) -> dict[int, float]:
        """Return the AP of every detector of a row's single run."""
        for record in self.records(label):
            trials = record.results.get(file, {}).get("trials", [])
            found = [number(trial["scores"][metric]["ap"]) for trial in trials]
            return {k: 100 * value for k, value in enumerate(found) if value is not None}
        return {}

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
    """Judge all claims."""
    small = Evidence(options, [grid for grid in JUDGED if grid not in ON_IMAGENET1K])
    large = Evidence(options, [grid for grid in JUDGED if grid in ON_IMAGENET1K])
    return [
        Claim(place, claim, where, *judgement(large if judgement in OF_IMAGENET1K else small))
        for place, (claim, where, judgement) in enumerate(CLAIMS, start=1)
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


def _gain_at_100(evidence: Evidence) -> Judgement:
    sign, shown = evidence.compare(f"{MOCHI}{SHORT}", f"{MOCO}{SHORT}")
    return _seen(sign, 1), shown


def _growing_gain(evidence: Evidence) -> Judgement:
    """Compare the gain after 200 epochs with that after 100, seed by seed."""
    late, early = (_differences(evidence, f"{MOCHI}{end}", f"{MOCO}{end}") for end in ("", SHORT))
    if min(len(late), len(early)) < 2:
        return "cannot be judged", f"needs two seeds of {MOCHI} and {MOCO} at 100 and 200 epochs"
    sign, words = sign_of(late, early)
    return _seen(sign, 1), f"gain after 200 epochs {_mean(late)}, after 100 {_mean(early)}: {words}"


def _pairs_alone(evidence: Evidence) -> Judgement:
    """Sec. 4.3: with s' = 0 the proxy task ends as for the baseline, even with the points."""
    pairs = evidence.last(PAIRS_ALONE, "proxy_accuracy_mixed")
    moco = evidence.last(MOCO, "proxy_accuracy")
    if min(len(pairs), len(moco)) < 2:
        return "cannot be judged", f"needs two seeds of {PAIRS_ALONE} and of {MOCO}"
    sign, words = sign_of(pairs, moco)
    near = abs(fmean(pairs.values()) - fmean(moco.values())) < SIMILAR
    shown = f"{PAIRS_ALONE} {_mean(pairs)}, {MOCO} {_mean(moco)}: {words}"
    return "seen" if sign == 0 or near else "not seen", shown


def _pairs_easier(evidence: Evidence) -> Judgement:
    harder = evidence.last(PAIRS_ALONE, "pairs_harder") or evidence.last(MOCHI, "pairs_harder")
    if not harder:
        return "cannot be judged", "no run with pair points logged pairs_harder"
    shown = f"max l(h) > max l(n) for {_mean(harder)} % of the queries in the last epoch"
    return "seen" if max(harder.values()) < HALF else "not seen", shown


def _query_points_harder(evidence: Evidence) -> Judgement:
    harder = evidence.last(MOCHI, "with_query_harder")
    if not harder:
        return "cannot be judged", f"no run of {MOCHI} logged with_query_harder"
    shown = f"max l(h') > max l(n) for {_mean(harder)} % of the queries in the last epoch"
    return "seen" if min(harder.values()) > HALF else "not seen", shown


def _fewer_false(evidence: Evidence) -> Judgement:
    key = "false_negatives_top"
    ours, theirs = evidence.last(MOCHI, key), evidence.last(MOCO, key)
    if not ours or not theirs:
        return "cannot be judged", "no run with labels"
    sign, words = sign_of(ours, theirs)
    return _seen(sign, -1), f"{MOCHI} {_mean(ours)} %, {MOCO} {_mean(theirs)} %: {words}"


def _closer_classes(evidence: Evidence) -> Judgement:
    """Sec. 3.3: alignment is the distance within a class, a loss; false negatives rank higher."""
    oracle, key = f"{MOCO}, oracle", "false_negatives_top"
    sign, shown = evidence.compare(oracle, MOCO, "alignment")
    ours, theirs = evidence.last(oracle, key), evidence.last(MOCO, key)
    if ours and theirs:
        shown += f"; false negatives among the highest {_mean(ours)} %, {MOCO} {_mean(theirs)} %"
    return _seen(sign, -1), shown


def _supervised_space(evidence: Evidence) -> Judgement:
    """Fig. 3c: supervised features are close within a class, and spread little. Both are losses."""
    parts = [
        (evidence.compare("supervised", other, measure), wanted)
        for measure, wanted in (("alignment", -1), ("uniformity", 1))
        for other in (MOCO, MOCHI)
    ]
    shown = "; ".join(words for (_, words), _ in parts)
    signs = [(sign, wanted) for (sign, _), wanted in parts]
    if any(sign is None for sign, _ in signs):
        return "cannot be judged", shown
    right = [sign == wanted for sign, wanted in signs]
    return "seen" if all(right) else "seen in part" if any(right) else "not seen", shown


def _longer_oracle(evidence: Evidence) -> Judgement:
    """App. C.2: longer training with the oracle closes most of the gap to cross-entropy."""
    oracle = f"{MOCHI}, oracle"
    sign, shown = evidence.compare(f"{oracle}, 800 epochs", oracle)
    shown += "; " + evidence.compare("supervised", f"{oracle}, 800 epochs")[1]
    return _seen(sign, 1), shown


def _steps_to_v2(evidence: Evidence) -> Judgement:
    """App. B.1: of the three steps from MoCo to MoCo-v2, only the augmentation is harder."""
    accuracies = [evidence.last(label, "proxy_accuracy") for label in STEPS]
    if min(map(len, accuracies)) < 2:
        return "cannot be judged", f"needs two seeds of {', '.join(STEPS)}"
    shown = ", ".join(
        f"{label} {_mean(each)}" for label, each in zip(STEPS, accuracies, strict=True)
    )
    steps = [sign_of(after, before) for before, after in pairwise(accuracies)]
    means = [fmean(each.values()) for each in accuracies]
    easy = [
        sign == 0 or abs(b - a) < SIMILAR
        for (sign, _), (a, b) in zip(steps, pairwise(means), strict=True)
    ]
    harder = steps[-1][0] == -1
    return "seen" if harder and all(easy[:-1]) else "seen in part" if harder else "not seen", shown


def _lower(name: str) -> Callable[[Evidence], Judgement]:
    """Return the judgement of a variant of App. B.2 that is below MoCHi of the same setting."""

    def judgement(evidence: Evidence) -> Judgement:
        ending = f", {name}"
        labels = [label for label in evidence.lines if label.endswith(ending)]
        parts = [evidence.compare(label, label.removesuffix(ending)) for label in labels]
        shown = "; ".join(words for _, words in parts) or f"no MoCHi run {name}"
        signs = [sign for sign, _ in parts if sign is not None]
        if not signs:
            return "cannot be judged", shown
        lower = signs.count(-1)
        return "seen" if lower == len(signs) else "seen in part" if lower else "not seen", shown

    return judgement


def _transfer(measures: Sequence[str], ending: str) -> Callable[[Evidence], Judgement]:
    """Return the judgement of gains over MoCo-v2 in detection, of every MoCHi row of a length."""

    def judgement(evidence: Evidence) -> Judgement:
        labels = [
            label
            for label, line in evidence.lines.items()
            if line.row.mix and not line.row.oracle and label == f"MoCHi {line.row.mix}{ending}"
        ]
        parts = [
            evidence.compare(label, f"{MOCO}{ending}", measure)
            for measure in measures
            for label in labels
        ]
        shown = "; ".join(words for _, words in parts) or f"no MoCHi row{ending}"
        signs = [sign for sign, _ in parts if sign is not None]
        if not signs:
            return "cannot be judged", shown
        gains = signs.count(1)
        most = gains > len(signs) / 2 and -1 not in signs
        return "seen" if most else "seen in part" if gains else "not seen", shown

    return judgement


def _no_linear_gain(evidence: Evidence) -> Judgement:
    labels = [f"MoCHi {mix}" for mix in ((512, 1024, 512), (256, 512, 0), (128, 1024, 512))]
    parts = [evidence.compare(label, MOCO) for label in labels]
    shown = "; ".join(words for _, words in parts)
    signs = [sign for sign, _ in parts if sign is not None]
    if not signs:
        return "cannot be judged", shown
    return "not seen" if signs.count(1) > len(signs) / 2 else "seen", shown


def _query_points_help(evidence: Evidence) -> Judgement:
    """Sec. 5.2 c: the harder strategy, s' > 0, helps for shorter training."""
    mixed, pairs = (f"MoCHi (256, 512, {number}){SHORT}" for number in (256, 0))
    sign, shown = evidence.compare(mixed, pairs, "voc AP")
    return _seen(sign, 1), shown


def _200_like_800(evidence: Evidence) -> Judgement:
    """Sec. 5.2 d: MoCHi after 200 epochs is as good on VOC as MoCo-v2 after 800."""
    sign, shown = evidence.compare("MoCHi (128, 1024, 512)", f"{MOCO}, 800 epochs", "voc AP")
    return "cannot be judged" if sign is None else "seen" if sign >= 0 else "not seen", shown


def _above_supervised(evidence: Evidence) -> Judgement:
    """Sec. 4.3: features of MoCo-v2 and MoCHi transfer better than supervised ones."""
    measure = next((name for name in DETECTIONS if evidence.values("Supervised", name)), "voc AP")
    parts = [
        evidence.compare(label, "Supervised", measure)
        for label in (MOCO, "MoCHi (256, 512, 0)", "MoCHi (128, 1024, 512)")
    ]
    shown = "; ".join(words for _, words in parts)
    signs = [sign for sign, _ in parts if sign is not None]
    if not signs:
        return "cannot be judged", shown
    above = signs.count(1)
    return "seen" if above == len(signs) else "seen in part" if above else "not seen", shown


def _differences(evidence: Evidence, ours: str, theirs: str) -> dict[int, float]:
    mine, other = evidence.values(ours, "linear"), evidence.values(theirs, "linear")
    return {seed: value - other[seed] for seed, value in mine.items() if seed in other}


SHORT = ", 100 epochs"
PAIRS_ALONE = "MoCHi (1024, 1024, 0)"
STEPS = (
    *("MoCo", "MoCo + cosine", "MoCo + cosine + MLP"),
    "MoCo + cosine + MLP + augmentation = MoCo-v2",
)
"""The rows of App. B.1."""
DETECTIONS = {
    "voc AP": ("voc", "VOC07 11-point"),
    "coco APbb": ("coco", "COCO box"),
    "coco APmk": ("coco", "COCO mask"),
}
"""Measures by detectors: the evaluation, and the name of the metric in its result."""
COCO = ("coco APbb", "coco APmk")

OF_IMAGENET1K: dict[Callable[[Evidence], Judgement], tuple[str, str]] = {
    _transfer(("voc AP",), SHORT): (
        "MoCHi learns faster: it transfers better to VOC after only 100 epochs",
        "Sec. 5.2 b, Table 2",
    ),
    _transfer(("voc AP",), ""): ("MoCHi transfers better to VOC than MoCo-v2", "Table 2"),
    _transfer(COCO, SHORT): ("MoCHi transfers better to COCO after 100 epochs", "Table 3"),
    _transfer(COCO, ""): ("MoCHi transfers better to COCO after 200 epochs", "Table 3"),
    _no_linear_gain: ("no gain in linear classification on ImageNet-1k", "Sec. 5.2 a"),
    _query_points_help: ("points mixed with the query help shorter training", "Sec. 5.2 c"),
    _200_like_800: ("MoCHi after 200 epochs matches MoCo-v2 after 800 on VOC", "Sec. 5.2 d"),
    _above_supervised: (
        "MoCo-v2 and MoCHi transfer better than supervised features",
        "Sec. 4.3",
    ),
}
"""Claims about ImageNet-1k and transfer from it: words and place."""

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
    ("MoCHi gains after 100 epochs, too", "Sec. 5.1", _gain_at_100),
    ("the gain grows with longer training", "App. C.2", _growing_gain),
    ("with s' = 0 the proxy task ends as for MoCo-v2", "Sec. 4.3, Fig. 2b", _pairs_alone),
    ("in the end pairs are easier than negatives: max l(h) < max l(n)", "Sec. 4.3", _pairs_easier),
    (
        "points with the query stay harder: max l(h') > max l(n)",
        "Sec. 4.3",
        _query_points_harder,
    ),
    ("MoCHi ends with fewer false negatives than MoCo-v2", "Sec. 4.3, Fig. 2c", _fewer_false),
    ("the class oracle brings images of a class closer", "Sec. 3.3", _closer_classes),
    ("supervised: high alignment, low uniformity", "Sec. 4.3, Fig. 3c", _supervised_space),
    ("longer training with the oracle nears the supervised bound", "App. C.2", _longer_oracle),
    ("of the steps to MoCo-v2 only augmentation makes the task harder", "App. B.1", _steps_to_v2),
    ("ranking by the key is slightly worse", "App. B.2", _lower("ranked by key")),
    ("mixing with the key is slightly worse", "App. B.2", _lower("mixed with key")),
    ("logits times beta are slightly worse", "App. B.2", _lower("logits times beta")),
    *((claim, place, judgement) for judgement, (claim, place) in OF_IMAGENET1K.items()),
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
