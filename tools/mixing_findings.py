"""Writes the table of what mixing gained: `python tools/mixing_findings.py [--check]`.

src/hardmix/training/mixing_findings.csv is what a run is told about mixing. It has one line for
every strength of views, length and temperature at which experiments/records has pairs of runs of
MoCo-v2 and MoCHi with the same seed, and nothing else that differs.
"""

import csv
import io
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from hardmix.sweep.pairs import student_interval

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "experiments" / "records"
TABLE = ROOT / "src" / "hardmix" / "training" / "mixing_findings.csv"

REGIME = {
    "data.name": "folder",
    "data.num_images": 10_000,
    "model.backbone": "small",
    "train.queue_size": 2048,
}
"""Settings that all of these runs share: 10,000 images of CIFAR-100."""
MOCHI = {"num_hardest": 128, "num_pairs": 128, "num_with_query": 16, "strategy": "mochi"}
CONDITIONS = ("augmentation", "min_scale", "epochs", "temperature")
COLUMNS = (
    *CONDITIONS,
    "pairs",
    "proxy_accuracy",
    *(f"{measure}{end}" for measure in ("probe", "knn") for end in ("", "_low", "_high")),
)

Measures = dict[str, float]
Pairs = dict[int, dict[str, Measures]]
"""Measures by seed and method."""


def main() -> None:
    """Write the table, or with --check say that it is out of date."""
    if "--check" not in sys.argv:
        TABLE.write_text(table(), encoding="utf-8")
    elif not TABLE.exists() or TABLE.read_text(encoding="utf-8") != table():
        sys.exit(f"{TABLE.name} differs from experiments/records: run `make tables`.")


def table() -> str:
    """Return the table as CSV, from the lowest proxy accuracy to the highest."""
    lines = [line_of(*each) for each in pairs_of_runs().items()]
    complete = [line for line in lines if line is not None]
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(sorted(complete, key=lambda line: float(line["proxy_accuracy"])))
    return text.getvalue()


def line_of(conditions: tuple[Any, ...], by_seed: Pairs) -> dict[str, Any] | None:
    """Return a line of the table; None if no seed has both runs."""
    both = [runs for runs in by_seed.values() if len(runs) == 2]
    if not both:
        return None
    line: dict[str, Any] = dict(zip(CONDITIONS, conditions, strict=True)) | {"pairs": len(both)}
    proxy = statistics.fmean(runs["moco-v2"]["proxy_accuracy"] for runs in both)
    line["proxy_accuracy"] = f"{proxy:.2f}"
    for name, measure in {"probe": "linear-cached", "knn": "knn"}.items():
        gains = [runs["mochi"][measure] - runs["moco-v2"][measure] for runs in both]
        interval = student_interval(gains)
        line |= {name: f"{interval.mean:.2f}", f"{name}_low": f"{interval.low:.2f}"}
        line[f"{name}_high"] = f"{interval.high:.2f}"
    return line


def pairs_of_runs() -> dict[tuple[Any, ...], Pairs]:
    """Return the runs by views, length and temperature, then by seed and method."""
    runs: dict[tuple[Any, ...], Pairs] = defaultdict(lambda: defaultdict(dict))
    for file in sorted(RECORDS.glob("*.json")):
        record = json.loads(file.read_text(encoding="utf-8"))
        config = record["config"]
        regime = {name: config[name.split(".")[0]][name.split(".")[1]] for name in REGIME}
        if regime == REGIME and is_plain(config):
            data, train = config["data"], config["train"]
            conditions = data["augmentation"], data["min_scale"]
            where = (*conditions, train["epochs"], train["temperature"])
            runs[where][record["seed"]][config["method"]] = record["measures"]
    return runs


def is_plain(config: dict[str, Any]) -> bool:
    """Return whether a run is MoCo-v2 or MoCHi (128, 128, 16) and nothing else."""
    loss = config.get("loss", {})  # older records have none
    if loss.get("weights", "none") != "none" or loss.get("denominator", "infonce") != "infonce":
        return False
    mochi = {name: config["mix"][name] for name in MOCHI} == MOCHI
    method = config["method"]
    return not config["oracle"] and (method == "moco-v2" or (method == "mochi" and mochi))


if __name__ == "__main__":
    main()
