"""Waiting time: of `hardmix --help`, and until the first step of `hardmix pretrain demo`.

Each is measured in a fresh process, from its start. The demo's images are drawn once and cached, so
the first, unmeasured round may take longer.
"""

import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.jobs import BenchJob, Row, Setup, Tell
from benchmarks.rounds import Block, milliseconds, summary, take_turns

FIRST_STEP, HELP = "hardmix pretrain demo, to its first step", "hardmix --help"
MOST_ROUNDS = 5
"""Most rounds: the times of a process vary little."""
LONGEST = 300.0
"""Seconds to wait for the first step."""
POLL = 0.01


def plan(setup: Setup) -> list[BenchJob]:
    """One job."""
    rounds = 1 if setup.quick else min(MOST_ROUNDS, setup.rounds)
    settings = {**setup.common, "rounds": rounds, "quick": setup.quick}
    return [BenchJob(title="start", kind="start", settings=settings, turns=rounds)]


def measure(settings: dict[str, Any], tell: Tell) -> list[Row]:
    """Measure both in turn; each has its own row, since neither is a variant of the other."""
    options = ["--train.device", settings["device"]]
    if settings["quick"]:
        options += ["--data.num-images", "256", "--train.queue-size", "64"]
        options += ["--mix.num-hardest", "32"]
    blocks: dict[str, Block] = {FIRST_STEP: partial(first_step, options), HELP: show_help}
    warm_ups = 0 if settings["quick"] else 1
    row = take_turns("start", blocks, settings["rounds"], tell, warm_ups)
    return [
        {
            "setting": name,
            "judged": True,
            "others_share": row["others_share"],
            **summary({"hardmix": row["milliseconds"][name]}),
        }
        for name in blocks
    ]


def show_help() -> float:
    """Milliseconds of `hardmix --help`."""
    command = [sys.executable, "-P", "-m", "hardmix", "--help"]
    run = partial(subprocess.run, command, stdout=subprocess.DEVNULL, check=True)
    return milliseconds(run, "cpu")


def first_step(options: list[str]) -> float:
    """Return the milliseconds until metrics.jsonl has its first line; then stop the run."""
    with TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-P", "-m", "hardmix", "pretrain", "demo", "--out", str(run)]
        command += ["--train.log-every", "1", "--train.knn-every", "0", *options]
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            while not _has_line(run / "metrics.jsonl"):
                if process.poll() is not None or time.perf_counter() - start > LONGEST:
                    raise RuntimeError("hardmix pretrain demo took no step; see its output above")
                time.sleep(POLL)
            return 1000 * (time.perf_counter() - start)
        finally:
            process.kill()
            process.wait()


def _has_line(file: Path) -> bool:
    return file.exists() and file.stat().st_size > 0
