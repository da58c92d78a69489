"""Sec. 3.2, the hardness of negatives: Fig. 2a and the similarities, from hardness.jsonl."""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from hardmix.analysis.figures.fig2 import (
    MOST_PANELS,
    Histogram,
    Ranks,
    fig2a,
    similarity_histograms,
)
from hardmix.analysis.figures.picture import Found
from hardmix.runs.reading import RunRecord

MOST_RANKS = 160
"""Number of ranks drawn, evenly spaced on the logarithmic axis."""

KINDS = {
    "positive": "positives (keys)",
    "hardest": "hardest negatives",
    "pairs": "pair points",
    "with_query": "points mixed with the query",
}
"""Histograms of hardness.jsonl, in words."""


def matching_probabilities(records: Sequence[RunRecord]) -> Found:
    """Draw Fig. 2a for these runs; the sentences tell which of them it omits."""
    found = [(record, _ranks(record)) for record in records]
    without = [str(record.run.path) for record, ranks in found if not ranks]
    missing = []
    if without:
        missing.append(
            f"Fig. 2a omits {', '.join(without)}: no matching probabilities (hardness.jsonl)."
        )
    runs = [(record.label, ranks) for record, ranks in found if ranks]
    if len(runs) > MOST_PANELS:
        missing.append(f"Fig. 2a shows only the first {MOST_PANELS} of {len(runs)} runs.")
    return [fig2a(runs)] if runs else [], missing


def half_holders(record: RunRecord) -> list[float]:
    """Return, by epoch, the fraction of negatives with half of the matching probability."""
    found = []
    for line in record.hardness:
        probability: list[float] = line.get("matching_probability", [])
        if _are_shares(probability) and sum(probability) > 0:
            half = sum(probability) / 2
            before = sum(held < half for held in accumulate(probability))
            found.append((before + 1) / len(probability))
    return found


def similarities(record: RunRecord) -> Found:
    """Draw histograms of similarities over training, if they were recorded."""
    kinds = []
    for key, words in KINDS.items():
        epochs = [
            Histogram(line["epoch"], line[key])
            for line in record.hardness
            if isinstance(line.get("epoch"), int) and _are_counts(line.get(key))
        ]
        if epochs:
            kinds.append((words, epochs))
    if not kinds:
        return [], [f"{record.run.path} has no histograms of similarities (hardness.jsonl)."]
    return [similarity_histograms(record.label, kinds)], []


def _ranks(record: RunRecord) -> list[Ranks]:
    return [
        _thin(line["epoch"], line["matching_probability"])
        for line in record.hardness
        if isinstance(line.get("epoch"), int) and _are_shares(line.get("matching_probability"))
    ]


def _thin(epoch: int, probability: list[float]) -> Ranks:
    """Return ranks evenly spaced on a logarithmic axis, without probabilities of 0."""
    last = len(probability)
    wanted = sorted({round(last ** (i / (MOST_RANKS - 1))) for i in range(MOST_RANKS)})
    kept = [rank for rank in wanted if probability[rank - 1] > 0]
    return Ranks(epoch, kept, [probability[rank - 1] for rank in kept])


def _are_shares(values: Any) -> bool:
    return (
        isinstance(values, list)
        and bool(values)
        and all(isinstance(value, int | float) and math.isfinite(value) for value in values)
    )


def _are_counts(values: Any) -> bool:
    return (
        isinstance(values, list)
        and all(isinstance(value, int) for value in values)
        and sum(values) > 0
    )
