"""Kills, damage and full disks: nothing good may be lost. `make torture`, about half an hour.

Writes torture.json beside this file after every part: what was done, and what was found. Any
finding ends it with status 1. Needs the tests' folder, whose processes (ranks.py) it uses. Small
disks need root; without it that part is skipped, and says so.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tests"), str(HERE)]
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"

import torch  # noqa: E402

import ranks  # noqa: E402
from hardmix.runs.folder import versions  # noqa: E402
from torture_commands import fill_command, kill_command  # noqa: E402
from torture_damage import (  # noqa: E402
    damage_checkpoints,
    damage_configs,
    damage_folders,
    damage_images,
)
from torture_shards import (  # noqa: E402
    change_shards,
    damage_caches,
    damage_indexes,
    rewrite_while_reading,
    train_on_shards,
)
from torture_training import fill_disks, kill_processes  # noqa: E402

PARTS = {
    "kill pre-training": (kill_processes, 54),
    "kill cache": (partial(kill_command, "cache"), 14),
    "kill index": (partial(kill_command, "index"), 14),
    "kill linear": (partial(kill_command, "linear"), 14),
    "kill detect": (partial(kill_command, "detect"), 14),
    "damage images": (damage_images, 1600),
    "damage checkpoints": (damage_checkpoints, 500),
    "damage configs": (damage_configs, 500),
    "damage folders": (damage_folders, 80),
    "damage indexes": (damage_indexes, 400),
    "damage caches": (damage_caches, 200),
    "change shards": (change_shards, 200),
    "rewrite a shard while reading": (rewrite_while_reading, 20),  # seconds
    "change shards while training": (train_on_shards, 8),
    "fill disk, pre-training": (fill_disks, 20),
    "fill disk, cache": (partial(fill_command, "cache"), 5),
    "fill disk, index": (partial(fill_command, "index"), 5),
    "fill disk, linear": (partial(fill_command, "linear"), 5),
    "fill disk, detect": (partial(fill_command, "detect"), 5),
}
"""What is done, and how often."""

COMMANDS = [
    "hardmix.evaluation.detection.detect",
    "hardmix.evaluation.linear",
    "hardmix.commands.options",
    "PIL.PngImagePlugin",
    "PIL.JpegImagePlugin",
]
"""What the killed commands import when they start: processes that have it start in no time."""


def main() -> None:
    """Everything, within bounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="how names of parts begin")
    parser.add_argument("--times", type=float, default=1.0, help="factor on all numbers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE / "torture.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ranks.IMPORTED += ["torture_commands", "torture_shards", *COMMANDS]
    result: dict[str, dict[str, object]] = {}
    if options.only and options.out.exists():  # the other parts stay as they were
        result = json.loads(options.out.read_text())
    result["of"] = {"versions": versions(), "seed": options.seed}
    with tempfile.TemporaryDirectory(prefix="torture-") as name:
        for title, (part, number) in PARTS.items():
            if not any(title.startswith(each) for each in options.only or [""]):
                continue
            started, findings = time.monotonic(), []
            generator = random.Random(f"{title} {options.seed}")
            number = max(1, round(options.times * number))
            counts = part(Path(name) / title.replace(" ", "-"), number, generator, findings)
            seconds = round(time.monotonic() - started, 1)
            result[title] = {**counts, "findings": findings, "seconds": seconds}
            print(title, json.dumps(result[title], indent=1), flush=True)
            options.out.write_text(json.dumps(result, indent=2) + "\n")
    found = any(part.get("findings") for part in result.values())
    print("See the findings above." if found else "Nothing good was lost.")
    sys.exit(found)


if __name__ == "__main__":
    main()
