"""Measures masks, filters, weights and mixing in five loops that people have: the examples.

    python experiments/loops.py [--seeds 8] [--first-seed 1] [--only recommender ...]

Each loop is trained with its example's settings and one change, with the same seeds. A change is a
replacement of the loss's options. The text loop, which finds every paraphrase after 25 steps, is
stopped after 10, and trained for 160 to see what a queue does. Every result is one line of
loops.jsonl; runs that are there are not made again. `python experiments/results.py` writes the
table of docs/family.md.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ.update({"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"})

import torch

ROOT = Path(__file__).resolve().parent.parent
RECORDS = Path(__file__).resolve().parent / "loops.jsonl"

LOOPS = {
    "plain_pytorch": "MochiLoss",
    "sentence_transformers_loop": "MixedNegativesLoss",
    "two_towers": "TwoTowerLoss",
    "recommender": "MochiLoss",
    "supcon_waveforms": "SupConLoss",
    "sentence_transformers_loop, longer": "MixedNegativesLoss",
}
"""The loss in each example, whose module is the name before the comma."""
STEPS = {"sentence_transformers_loop": 10, "sentence_transformers_loop, longer": 160}
"""Numbers of steps that differ from the example's."""
QUEUES: dict[str, dict[str, Any]] = {
    "queue": {"queue_size": 64, "queue_after": 2},
    "queue at once": {"queue_size": 64, "queue_after": 0},
    "queue after 100 steps": {"queue_size": 64},
}

PLAIN = {"num_pairs": 0, "num_with_query": 0, "weights": "none"}
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "filter above-positive": {"filter_negatives": "above-positive"},
    "filter share-of-positive": {"filter_negatives": "share-of-positive"},
    "hardness weights": {"weights": "hardness"},
}
"""Options of the loss, besides those of PLAIN."""
HARDEST = {
    "plain_pytorch": 64,
    "sentence_transformers_loop": 2,
    "two_towers": 8,
    "recommender": 16,
    "supcon_waveforms": 16,
}
"""A sixteenth of the negatives: N, and in the paper's proportions s. s' is an eighth of it."""


def options_of(loop: str, change: str) -> dict[str, Any]:
    """Return the options of the loss that a change sets."""
    number = HARDEST[loop.partition(",")[0]]
    pairs = {"num_hardest": "sixteenth", "num_pairs": number}
    mixed = {
        "mixed pairs": pairs,
        "mixed pairs and query": {**pairs, "num_with_query": max(1, number // 8)},
        "64 mixed pairs": {**pairs, "num_pairs": 64},
    }
    return {**mixed, **CHANGES}.get(change, {})


def main() -> None:
    """Train every loop that has no record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=list(LOOPS), choices=list(LOOPS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT / "examples"))
    there = {(line["loop"], line["change"], line["seed"]) for line in records()}
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for loop in options.only:
            for change in changes_of(loop):
                if (loop, change, seed) not in there:
                    write(
                        {"loop": loop, "change": change, "seed": seed} | trained(loop, change, seed)
                    )


def changes_of(loop: str) -> list[str]:
    """Return the changes that a loop is tried with; masks are its own."""
    if loop.endswith("longer"):
        return ["plain", "queue at once", "queue after 100 steps"]
    masks = {
        "plain_pytorch": ["without ids"],
        "recommender": ["without the mask", "without the mask, above-positive", "logq weights"],
        "sentence_transformers_loop": ["queue"],
        "supcon_waveforms": ["without the queue", "supcon-in"],
    }
    mixed = ["mixed pairs", "mixed pairs and query"]
    mixed += ["64 mixed pairs"] * (HARDEST[loop] != 64)
    return [*CHANGES, *mixed, *masks.get(loop, [])]


def trained(loop: str, change: str, seed: int) -> dict[str, float]:
    """Return the share found before and after training, in percent."""
    module = import_module(loop.partition(",")[0])
    with changed(module, loop, change):
        steps = {"steps": STEPS[loop]} if loop in STEPS else {}
        before, after = module.main(seed=seed, **steps)[:2]
    return {"before": round(100 * before, 4), "after": round(100 * after, 4)}


@contextmanager
def changed(module: Any, loop: str, change: str) -> Iterator[None]:
    """Give the example's loss other options within the context."""
    name = LOOPS[loop]
    loss = getattr(module, name)
    setattr(module, name, with_options(loss, loop, change))
    try:
        yield
    finally:
        setattr(module, name, loss)


def with_options(loss: Callable[..., Any], loop: str, change: str) -> Callable[..., Any]:
    """Return the example's loss with the options of a change."""
    if loop == "supcon_waveforms":
        options: dict[str, Any] = {}
        if change == "without the queue":
            return lambda temperature, **_: loss(temperature=temperature)
        if change == "supcon-in":
            options = {"denominator": "supcon-in"}
        return partial(loss, **{**options, **options_of(loop, change)})
    if loop.startswith(("two_towers", "sentence_transformers_loop")):
        options = QUEUES.get(change) or options_of(loop, change)
        return lambda *arguments, **_: loss(*arguments, **options)
    return partial(own_loss, loss, loop, change)


def own_loss(
    loss: Callable[..., Any],
    loop: str,
    change: str,
    *counts: int,
    temperature: float,
    weights: Any = "none",
) -> Any:
    """Return a MochiLoss with the example's temperature; masks are taken away where asked."""
    del counts
    options: dict[str, Any] = {**PLAIN, "num_hardest": "sixteenth", "temperature": temperature}
    if change == "logq weights":
        options["weights"] = weights
    if change == "without the mask, above-positive":
        options["filter_negatives"] = "above-positive"
    options |= options_of(loop, change)
    built = loss(**options)
    if change == "without ids":
        return lambda query, key, memory, ids: built(query, key, memory)  # noqa: ARG005
    if change.startswith("without the mask"):
        built.in_batch = partial(unmasked, built.in_batch)
    return built


def unmasked(in_batch: Callable[..., Any], query: Any, key: Any, *_: Any, **__: Any) -> Any:
    """Return the loss with all other items of the batch as negatives."""
    return in_batch(query, key)


def records() -> list[dict[str, Any]]:
    """Return the results so far."""
    if not RECORDS.exists():
        return []
    return [json.loads(line) for line in RECORDS.read_text().splitlines()]


def write(line: dict[str, Any]) -> None:
    """Add a result."""
    with RECORDS.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(line, flush=True)


if __name__ == "__main__":
    main()
