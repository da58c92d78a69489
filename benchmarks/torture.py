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
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tests"), str(HERE)]
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"

import torch  # noqa: E402

import ranks  # noqa: E402
from hardmix.runs.folder import versions  # noqa: E402
from torture_commands import fill_commands, kill_commands  # noqa: E402
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
    kill_processes: 54,
    kill_commands: 14,  # of each command
    damage_images: 1600,
    damage_checkpoints: 500,
    damage_configs: 500,
    damage_folders: 80,
    damage_indexes: 400,
    damage_caches: 200,
    change_shards: 200,
    rewrite_while_reading: 20,  # seconds
    train_on_shards: 12,
    fill_disks: 20,
    fill_commands: 6,  # of each command
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
    parser.add_argument("--only", nargs="*", default=[], help="names of parts")
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
        for part, number in PARTS.items():
            if options.only and part.__name__ not in options.only:
                continue
            started, findings = time.monotonic(), []
            generator = random.Random(f"{part.__name__} {options.seed}")
            number = max(1, round(options.times * number))
            counts = part(Path(name) / part.__name__, number, generator, findings)
            seconds = round(time.monotonic() - started, 1)
            result[part.__name__] = {**counts, "findings": findings, "seconds": seconds}
            print(part.__name__, json.dumps(result[part.__name__], indent=1), flush=True)
            options.out.write_text(json.dumps(result, indent=2) + "\n")
    found = any(part.get("findings") for part in result.values())
    print("See the findings above." if found else "Nothing good was lost.")
    sys.exit(found)


if __name__ == "__main__":
    main()
