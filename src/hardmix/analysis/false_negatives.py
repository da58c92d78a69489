"""Sec. 3.3, what a class oracle sees: Fig. 2c, from metrics.jsonl."""

from collections.abc import Sequence

from hardmix.analysis.figures import Line, fig2c
from hardmix.analysis.figures.fig2 import BOTH_PARENTS, FALSE, ONE_PARENT, QUERY_PARENT
from hardmix.analysis.records import Found, Record, curve

MEASURES = {
    "false_negatives_top": FALSE,
    "synthetic_one_false": ONE_PARENT,
    "synthetic_both_false": BOTH_PARENTS,
    "synthetic_query_false": QUERY_PARENT,
}
"""Keys of metrics.jsonl, in words. Oracle runs count what they discard, too."""


def false_negatives(records: Sequence[Record]) -> Found:
    """Shares of false negatives over training of every run whose images have labels."""
    lines = []
    for record in records:
        for key, kind in MEASURES.items():
            epochs, shares = curve(record, key)
            if shares:
                lines.append(Line(record.label, kind, record.hue, epochs, shares))
    if not lines:
        return [], ["No run logged false negatives, which takes labels: no Fig. 2c."]
    oracle = any(record.config is not None and record.config.oracle for record in records)
    note = " Oracle runs discard them in training; here they are counted." if oracle else ""
    return [fig2c(lines, note)], []
