"""How long people wait: for `hardmix --help`, and for the first step of `hardmix pretrain demo`.

Each time in a fresh process, from its start. The demo's pictures are drawn once and kept in the
cache, so that the first, unmeasured, time may take longer.
"""

import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hardmix.bench.jobs import BenchJob, Row, Setup, Tell
from hardmix.bench.rounds import Block, milliseconds, summary, take_turns

FIRST_STEP, HELP = "hardmix pretrain demo, to its first step", "hardmix --help"
MOST_ROUNDS = 5
"""Seconds of a process vary little."""
LONGEST = 300.0
"""Seconds after which the first step will not come."""
POLL = 0.01


def plan(setup: Setup) -> list[BenchJob]:
    """One job."""
    rounds = 1 if setup.quick else min(MOST_ROUNDS, setup.rounds)
    settings = {**setup.common, "rounds": rounds, "quick": setup.quick}
    return [BenchJob(title="start", kind="start", settings=settings, turns=rounds)]


def measure(settings: dict[str, Any], tell: Tell) -> list[Row]:
    """Both in turns; neither is a variant of the other, so that each has a row."""
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
    command = [sys.executable, "-m", "hardmix", "--help"]
    run = partial(subprocess.run, command, stdout=subprocess.DEVNULL, check=True)
    return milliseconds(run, "cpu")


def first_step(options: list[str]) -> float:
    """Milliseconds until metrics.jsonl has its first line; the run is ended then."""
    with TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "hardmix", "pretrain", "demo", "--out", str(run)]
        command += ["--train.log-every", "1", "--train.knn-every", "0", *options]
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            while not _has_line(run / "metrics.jsonl"):
                if process.poll() is not None or time.perf_counter() - start > LONGEST:
                    raise RuntimeError("hardmix pretrain demo took no step; its words are above")
                time.sleep(POLL)
            return 1000 * (time.perf_counter() - start)
        finally:
            process.kill()
            process.wait()


def _has_line(file: Path) -> bool:
    return file.exists() and file.stat().st_size > 0
