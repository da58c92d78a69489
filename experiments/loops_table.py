"""The table of docs/family.md: what each part of the loss changed in five loops.

A cell is the mean difference by seed with its 95 % interval, in percentage points of what the loop
finds, bold if the interval excludes 0. The runs are those of loops.py.
"""

import json
from pathlib import Path

from hardmix.sweep.pairs import student_interval

RECORDS = Path(__file__).resolve().parent / "loops.jsonl"
LOOPS = {
    "plain_pytorch": "MoCo, digits",
    "sentence_transformers_loop": "text pairs",
    "two_towers": "CLIP, halves of digits",
    "recommender": "recommender",
    "supcon_waveforms": "SupCon, waveforms",
}
"""The columns."""
TEXT, LONGER = "sentence_transformers_loop", "sentence_transformers_loop, longer"

Pair = tuple[str, str, str]
"""A loop, a change and the change it is compared with."""


def everywhere(change: str) -> dict[str, Pair]:
    """Return the pairs of a change that every loop was tried with."""
    return {loop: (loop, change, "plain") for loop in LOOPS}


ROWS: dict[str, dict[str, Pair]] = {
    "**mask** by `ids` and `exclude`": {
        "plain_pytorch": ("plain_pytorch", "plain", "without ids"),
        "recommender": ("recommender", "plain", "without the mask"),
    },
    '**filter** `"above-positive"`, in place of a mask': {
        "recommender": ("recommender", "without the mask, above-positive", "without the mask")
    },
    '**filter** `"above-positive"`': everywhere("filter above-positive"),
    '**filter** `"share-of-positive"`': everywhere("filter share-of-positive"),
    '**weight** `"hardness"`': everywhere("hardness weights"),
    "**weight** `logq_weights`": {"recommender": ("recommender", "logq weights", "plain")},
    "**mix** pairs, s = N = a sixteenth": everywhere("mixed pairs"),
    "**mix** pairs, and an eighth with the query": everywhere("mixed pairs and query"),
    "**mix** 64 pairs of few negatives": {
        loop: (loop, "64 mixed pairs", "plain") for loop in LOOPS if loop != "plain_pytorch"
    },
    "**queue** of 64, used after 2 steps": {
        TEXT: (TEXT, "queue", "plain"),
    },
    "**queue** of 64 at once, 160 steps": {TEXT: (LONGER, "queue at once", "plain")},
    "**queue** of 64 after 100 of 160 steps, the default": {
        TEXT: (LONGER, "queue after 100 steps", "plain")
    },
    "**queue** of 256": {"supcon_waveforms": ("supcon_waveforms", "plain", "without the queue")},
    '`denominator="supcon-in"`': {"supcon_waveforms": ("supcon_waveforms", "supcon-in", "plain")},
}

Results = dict[tuple[str, str], dict[int, float]]


def read() -> Results:
    """Return what was found after training, by loop and change, by seed."""
    results: Results = {}
    for line in RECORDS.read_text().splitlines():
        run = json.loads(line)
        results.setdefault((run["loop"], run["change"]), {})[run["seed"]] = run["after"]
    return results


def loops_table() -> str:
    """Return the table as Markdown."""
    results = read()
    lines = [["", *LOOPS.values()], ["---"] * (1 + len(LOOPS))]
    lines.append(["found without any, %", *(_mean(results[loop, "plain"]) for loop in LOOPS)])
    for label, pairs in ROWS.items():
        cells = (_gain(results, pairs[loop]) if loop in pairs else "" for loop in LOOPS)
        lines.append([label, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _mean(found: dict[int, float]) -> str:
    return f"{sum(found.values()) / len(found):.1f}"


def _gain(results: Results, pair: Pair) -> str:
    loop, change, base = pair
    ours, theirs = results[loop, change], results[loop, base]
    interval = student_interval([ours[seed] - theirs[seed] for seed in ours if seed in theirs])
    return f"**{interval.text(1)}**" if interval.sign else interval.text(1)
