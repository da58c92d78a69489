"""Differences by seed as text: on the terminal, DIR/GRID-pairs.csv, .tex and .json."""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hardmix.errors import InputError
from hardmix.runtime.atomic_files import write_atomically
from hardmix.runtime.console import say, table
from hardmix.sweep.pairs import FoundTrend, Interval, Pairs, student_interval
from hardmix.sweep.result_tables import escape
from hardmix.sweep.results import SweepResult

RULE = (
    "Differences are by seed, with the 95 % interval by Student's t; a difference is significant if"
    " its interval excludes 0."
)
WORDS = {1: "yes, higher", -1: "yes, lower", 0: "no", None: "-"}


def show_pairs(pairs: Sequence[Pairs], found: Sequence[FoundTrend]) -> None:
    """Print a table for every measure, then the trends."""
    if not pairs:
        say("There are no pairs: no two rows have a seed in common.")
        return
    say(RULE)
    for measure in dict.fromkeys(each.measure for each in pairs):
        rows = [_cells(each) for each in pairs if each.measure == measure]
        columns = ["", "over", "pairs", "difference and interval", "significant"]
        table(f"paired differences, {measure.title}", columns, rows)
    for sentence in trend_sentences(found):
        say(sentence)


def trend_sentences(found: Sequence[FoundTrend]) -> list[str]:
    """Return each trend in a sentence, with intervals over seeds."""
    sentences = []
    for each in found:
        slopes, means = (
            student_interval(list(values.values())) for values in (each.slopes, each.means)
        )
        sentences.append(
            f"{each.measure.title} over {each.trend.over} in {len(each.trend.rows)} rows,"
            f" {slopes.number} seeds: slope {slopes.text(3)} per 10 % or 0.1; mean gain"
            f" {means.text(2)}."
        )
    return sentences


def write_pairs(
    result: SweepResult, pairs: Sequence[Pairs], found: Sequence[FoundTrend], out: Path
) -> list[Path]:
    """Write the same to files; none if there are no pairs."""
    if not pairs:
        return []
    texts = {
        "csv": _as_csv(result, pairs),
        "tex": _as_latex(result, pairs),
        "json": json.dumps(_facts(pairs, found), indent=2) + "\n",
    }
    files = []
    try:
        for ending, text in texts.items():
            files.append(out / f"{result.options.grid_name}-pairs.{ending}")
            write_atomically(files[-1], text.encode())
    except OSError as error:
        raise InputError(f"--out {out} cannot be written: {error.strerror}.") from error
    return files


def _cells(pair: Pairs) -> list[str]:
    interval, digits = pair.interval, pair.measure.digits
    return [
        pair.row,
        pair.baseline,
        str(interval.number),
        interval.text(digits),
        WORDS[interval.sign],
    ]


def _as_csv(result: SweepResult, pairs: Sequence[Pairs]) -> str:
    """Return a line for every row and measure, with each seed's difference."""
    out = io.StringIO()
    seeds = list(result.options.every_seed)
    names = ["label", "over", "measure", "pairs", "mean", "low", "high", "significant"]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*names, *(f"seed_{seed}" for seed in seeds)])
    for each in pairs:
        found, differences = each.interval, each.differences
        numbers = [found.number, found.mean, found.low, found.high, WORDS[found.sign]]
        by_seed = [differences.get(seed) for seed in seeds]
        writer.writerow([each.row, each.baseline, each.measure.id, *numbers, *by_seed])
    return out.getvalue()


def _as_latex(result: SweepResult, pairs: Sequence[Pairs]) -> str:
    """Return a table environment that needs no LaTeX package."""
    rule = r"\hline"
    columns = ["", "over", "measure", "pairs", "difference", "significant"]
    body = []
    for each in pairs:
        row, over, number, text, word = _cells(each)
        cells = [row, over, each.measure.title, number, text, word]
        body.append(" & ".join(map(escape, cells)) + r" \\")
    return "\n".join(
        [
            r"\begin{table}",
            r"\begin{tabular}{lllrrl}",
            *(rule, " & ".join(columns) + r" \\", rule),
            *(*body, rule),
            r"\end{tabular}",
            rf"\caption{{{escape(f'{result.place}. {RULE}')}}}",
            r"\end{table}",
            "",
        ]
    )


def _facts(pairs: Sequence[Pairs], found: Sequence[FoundTrend]) -> dict[str, Any]:
    return {
        "rule": RULE,
        "pairs": [
            {
                "label": each.row,
                "id": each.id,
                "over": each.baseline,
                "measure": each.measure.id,
                **_interval_facts(each.interval, each.differences),
            }
            for each in pairs
        ],
        "trends": [
            {
                "over": each.trend.over,
                "rows": list(each.trend.rows),
                "measure": each.measure.id,
                name: _interval_facts(student_interval(list(values.values())), values),
            }
            for each in found
            for name, values in (("slope", each.slopes), ("mean_gain", each.means))
        ],
    }


def _interval_facts(interval: Interval, by_seed: dict[int, float]) -> dict[str, Any]:
    return {
        "pairs": interval.number,
        "mean": interval.mean,
        "low": interval.low,
        "high": interval.high,
        "significant": None if interval.sign is None else interval.sign != 0,
        "by_seed": {str(seed): value for seed, value in by_seed.items()},
    }
