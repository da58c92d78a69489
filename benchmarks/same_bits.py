"""Does a refactor change a single bit? Runs an older commit and this one, and compares.

    python benchmarks/same_bits.py --commit 29a82f6 --cifar DIR

The older commit is checked out in a worktree and run on this machine, with the same Python and the
same fully written configs (its own). The comparison covers encoder.safetensors, tensor by tensor,
and every number of metrics.jsonl and hardness.jsonl except the speed. Each run is made in one
process, in two processes, and stopped in the middle and resumed; a run that the older commit has
begun and this one has finished is compared as well.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from safetensors.torch import load_file

HERE = Path(__file__).resolve().parent.parent
SPEED = ("images_per_second",)
"""Numbers that depend on the clock."""

CASES = {
    "demo mochi": ["demo", "--method", "mochi"],
    "demo moco-v2": ["demo", "--method", "moco-v2"],
    "demo moco-v1": ["demo", "--method", "moco-v1"],
    "demo mochi oracle": ["demo", "--method", "mochi", "--oracle"],
    "demo supervised": ["demo", "--method", "supervised"],
    "cifar10 mochi": ["cifar10", "--method", "mochi"],
    "cifar10 moco-v2": ["cifar10", "--method", "moco-v2"],
    "cifar10 mochi oracle": ["cifar10", "--method", "mochi", "--oracle"],
    "cifar10 supervised": ["cifar10", "--method", "supervised"],
}
"""Recipe and method; SMALL makes each a matter of seconds."""

SMALL = {
    "demo": {"data": {"num_images": 1536}, "train": {"queue_size": 512}},
    "cifar10": {"data": {"num_images": 1536}, "train": {"queue_size": 1024}},
}
EPOCHS = 3


def main() -> None:
    """Compare every case, four ways; end with status 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", required=True, help="the older commit")
    parser.add_argument("--cifar", type=Path, help="folder of CIFAR-10; without it, shapes alone")
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="same-bits-") as name:
        folder = Path(name)
        old = folder / "old"
        git("worktree", "add", "--detach", str(old), options.commit)
        try:
            cases = [c for c in options.only if options.cifar or not c.startswith("cifar10")]
            differences = [d for c in cases for d in compare_case(c, folder, old, options.cifar)]
        finally:
            git("worktree", "remove", "--force", str(old))
    print("\n".join(differences) or f"{len(cases)} cases, four ways each: the same bits.")
    sys.exit(bool(differences))


def compare_case(case: str, folder: Path, old: Path, cifar: Path | None) -> list[str]:
    """Return a sentence for each difference between the two commits in one case."""
    config = write_config(case, folder, old, cifar)
    runs = folder / case.replace(" ", "-")
    runs.mkdir()
    words = ["pretrain", "--config", str(config), "--out"]
    started = time.monotonic()
    for tree, name in ((old, "old"), (HERE, "new")):
        finish(tree, [*words, str(runs / f"{name}-1")])
        finish(tree, [*words, str(runs / f"{name}-2")], processes=2)
    stop_in_the_middle(HERE, [*words, str(runs / "new-resumed")], runs / "new-resumed")
    finish(HERE, [*words, str(runs / "new-resumed"), "--resume"])
    stop_in_the_middle(old, [*words, str(runs / "begun-by-old")], runs / "begun-by-old")
    finish(HERE, [*words, str(runs / "begun-by-old"), "--resume"])
    pairs = [("old-1", "new-1"), ("old-2", "new-2")]
    pairs += [("old-1", "new-resumed"), ("old-1", "begun-by-old")]
    found = [d for a, b in pairs for d in differences_of(runs / a, runs / b)]
    print(f"{case}: {'differs' if found else 'same bits'}, {time.monotonic() - started:.0f} s")
    return [f"{case}: {each}" for each in found]


def write_config(case: str, folder: Path, old: Path, cifar: Path | None) -> Path:
    """Write the older commit's config of a case, with every setting, and made small."""
    recipe, _, method, *rest = CASES[case]
    source = (
        "import dataclasses, json, sys\n"
        "try: from hardmix.recipes import RECIPES\n"
        "except ImportError: from hardmix.settings.recipes import RECIPES\n"
        f"config = RECIPES[{recipe!r}].build({method!r}, {bool(rest)})\n"
        "json.dump(dataclasses.asdict(config), sys.stdout)"
    )
    config = json.loads(run(old, ["-c", source], capture=True))
    for group, values in SMALL[recipe].items():
        config[group] |= values
    config["train"] |= {"epochs": EPOCHS, "log_every": 3, "knn_every": 2, "seed": 7}
    config["mix"] |= {"warm_up_epochs": 1}
    if recipe == "cifar10":
        config["data"]["root"] = str(cifar)
    file = folder / f"{case.replace(' ', '-')}.json"
    file.write_text(json.dumps(config))
    return file


def finish(tree: Path, words: list[str], processes: int = 1) -> None:
    """Run a `hardmix` command of a tree to its end."""
    launcher = ["-m", "hardmix"]
    if processes > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        launcher += [str(processes), "-m", "hardmix", "--"]
    run(tree, [*launcher, *words])


def stop_in_the_middle(tree: Path, words: list[str], folder: Path) -> None:
    """Send SIGTERM as soon as two lines are logged: the run saves and ends with status 75."""
    process = subprocess.Popen([sys.executable, "-m", "hardmix", *words], **quietly(tree))
    metrics = folder / "metrics.jsonl"
    while process.poll() is None:
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= 2:
            process.send_signal(signal.SIGTERM)
            break
        time.sleep(0.01)
    if process.wait() != 75:
        raise SystemExit(f"{words} of {tree} ended with {process.returncode}, not 75")


def run(tree: Path, words: list[str], *, capture: bool = False) -> str:
    """Run Python with a tree's package, and exit if it fails."""
    options = quietly(tree) | ({"stdout": subprocess.PIPE} if capture else {})
    done = subprocess.run([sys.executable, *words], check=False, text=True, **options)
    if done.returncode:
        raise SystemExit(f"{words} of {tree} ended with {done.returncode}")
    return done.stdout or ""


def quietly(tree: Path) -> dict:
    """Return options for one thread; with more, the order of sums may vary."""
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    return {"env": environment, "stdout": subprocess.DEVNULL, "cwd": tree}


def differences_of(first: Path, second: Path) -> list[str]:
    """Return a sentence for tensors and logged numbers that are not equal to the bit."""
    names = f"{first.name} and {second.name}"
    ours, theirs = (load_file(each / "encoder.safetensors") for each in (first, second))
    found = [f"{names}: other tensors"] if ours.keys() != theirs.keys() else []
    found += [
        f"{names}: {name} differs"
        for name in ours.keys() & theirs.keys()
        if ours[name].numpy().tobytes() != theirs[name].numpy().tobytes()
    ]
    for log in ("metrics.jsonl", "hardness.jsonl"):
        lines = [logged(each / log) for each in (first, second)]
        if lines[0] != lines[1]:
            found.append(f"{names}: {log} differs")
    return found


def logged(file: Path) -> list[dict]:
    """Return a log without numbers that depend on the clock."""
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [{k: repr(v) for k, v in line.items() if k not in SPEED} for line in lines]


def git(*words: str) -> None:
    """Run git in this repository."""
    subprocess.run(["git", "-C", str(HERE), *words], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
