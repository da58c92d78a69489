"""`python -m benchmarks.torture`, or `make torture`: about half an hour of faults.

After every part it writes results.json beside this file: what was done, and what was found. At the
end it writes the table of docs/reliability.md. With --resume, parts that were done at the same
commit are kept. Any finding makes the exit status 1. The processes are those of the tests
(tests/support/ranks.py). Small disks need root, and kills at chosen file calls a C compiler;
without them those parts are skipped, with a note.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests" / "support"))
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"

import torch  # noqa: E402

import ranks  # noqa: E402
from benchmarks.torture.calls import fail_runs, kill_runs, kill_saves, preload  # noqa: E402
from benchmarks.torture.commands import fill_command, kill_command  # noqa: E402
from benchmarks.torture.damage import (  # noqa: E402
    damage_checkpoints,
    damage_configs,
    damage_folders,
    damage_images,
)
from benchmarks.torture.odd import hostile_shards, names_of_code, odd_files  # noqa: E402
from benchmarks.torture.shards import (  # noqa: E402
    change_shards,
    damage_caches,
    damage_indexes,
    rewrite_while_reading,
    train_on_shards,
)
from benchmarks.torture.table import totals, write_page  # noqa: E402
from benchmarks.torture.training import fill_disks, kill_processes  # noqa: E402
from hardmix.runs.folder import versions  # noqa: E402
from small_methods import EVERY  # noqa: E402

PARTS = {
    "kill saves at every file call": (kill_saves, len(EVERY)),  # methods
    "kill runs at file calls": (kill_runs, 84),
    "fail file calls of runs": (fail_runs, 84),
    "odd files": (odd_files, 200),
    "names of code": (names_of_code, 60),
    "hostile shards": (hostile_shards, 20),
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
"""Parts by name, with how often each is done."""

IMPORTED = [
    *(f"benchmarks.torture.{name}" for name in ("calls", "commands", "odd", "shards")),
    "hardmix.evaluation.detection.detect",
    "hardmix.evaluation.linear",
    "hardmix.commands.options",
    "PIL.PngImagePlugin",
    "PIL.JpegImagePlugin",
]
"""Modules that processes have when they start, so that they start at once."""

RESULTS = HERE / "results.json"
SOURCES = (":/src", ":/tests", ":/benchmarks")
CALLS = ("kill saves", "kill runs", "fail file")
"""First words of the parts that need the preloaded library."""


def main() -> None:
    """Do all parts, or those that were asked for."""
    options = read_options()
    torch.set_num_threads(1)
    ranks.IMPORTED += IMPORTED
    result: dict[str, dict[str, object]] = {}
    if (options.only or options.resume) and options.out.exists():  # other parts stay as they were
        result = json.loads(options.out.read_text())
    commit = commit_of(HERE)
    result["of"] = {"versions": versions(), "seed": options.seed, "commit": commit}
    titles = [each for each in PARTS if any(map(each.startswith, options.only or [""]))]
    with tempfile.TemporaryDirectory(prefix="torture-") as name:
        compiled = preload(Path(name))
        for number, title in enumerate(titles, start=1):
            if options.resume and result.get(title, {}).get("commit") == commit:
                continue
            print(
                f"{time.strftime('%H:%M:%S')} part {number} of {len(titles)}: {title}", flush=True
            )
            if not compiled and title.startswith(CALLS):
                result[title] = {"skipped": "kills at file calls need a C compiler"}
                continue
            result[title] = {**do(title, Path(name), options), "commit": commit}
            print(json.dumps(result[title], indent=1), flush=True)
            options.out.write_text(json.dumps(result, indent=2) + "\n")
    found = any(part.get("findings") for part in result.values())
    print(totals(result))
    if options.out == RESULTS:
        write_page(result)
    print("See the findings above." if found else "Nothing good was lost.")
    sys.exit(found)


def read_options() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="first words of parts")
    parser.add_argument("--resume", action="store_true", help="keep parts done at this commit")
    parser.add_argument("--times", type=float, default=1.0, help="factor on all numbers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def do(title: str, folder: Path, options: argparse.Namespace) -> dict[str, object]:
    """Do a part; return what was done, what was found, and how long it took."""
    part, number = PARTS[title]
    started, findings = time.monotonic(), []
    generator = random.Random(f"{title} {options.seed}")
    number = max(1, round(options.times * number))
    counts = part(folder / title.replace(" ", "-"), number, generator, findings)
    seconds = round(time.monotonic() - started, 1)
    return {**counts, "findings": findings, "seconds": seconds}


def commit_of(folder: Path) -> str:
    """Return the commit of a checkout, with a plus if files differ from it."""
    git = ["git", "-C", str(folder)]
    try:
        commit = subprocess.check_output([*git, "rev-parse", "--short=12", "HEAD"], text=True)
        changed = subprocess.check_output(
            [*git, "status", "--porcelain", "--untracked-files=no", "--", *SOURCES]
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.strip() + "+" * bool(changed)


if __name__ == "__main__":
    main()
