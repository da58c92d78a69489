"""Memory of worker processes that look at the names of a million files: a tuple, and FileNames.

    python benchmarks/names_memory.py [--names 1281167] [--workers 8]

Every worker looks at names at random, as a loader does. The program counts the proportional share
of memory (PSS) of all processes together, beyond that of processes without names. Linux only.
"""

import argparse
import os
import random
import re
from collections.abc import Sequence
from pathlib import Path

from hardmix.data.image_set import FileNames


def main() -> None:
    """Measure both."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--names", type=int, default=1_281_167)
    options.add_argument("--workers", type=int, default=8)
    given = options.parse_args()
    nothing = in_child(lambda: shared_memory((), given.workers))
    for kind in (tuple, FileNames):

        def measure(kind: type = kind) -> int:
            names = (
                f"/data/imagenet/train/n{k % 1000:08d}/n{k % 1000:08d}_{k}.JPEG"
                for k in range(given.names)
            )
            return shared_memory(kind(names), given.workers)

        total = in_child(measure) - nothing
        print(f"{kind.__name__}: {total / 1e6:.0f} MB in {given.workers + 1} processes")


def shared_memory(names: Sequence[str], workers: int) -> int:
    """Start workers, let them look at names, and return the memory of all, in bytes."""
    pipes = []
    for number in range(workers):
        ready, asked = os.pipe(), os.pipe()
        if os.fork() == 0:
            choose = random.Random(number)
            for _ in range(2 * len(names)):
                len(names[choose.randrange(len(names))])
            os.write(ready[1], b"r")
            os.read(asked[0], 1)
            os._exit(0)
        pipes.append((ready, asked))
    for ready, _ in pipes:
        os.read(ready[0], 1)
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    total = sum(proportional(process) for process in ["self", *children])
    for _, asked in pipes:
        os.write(asked[1], b"e")
    for _ in pipes:
        os.wait()
    return total


def proportional(process: str) -> int:
    """Return a process's share of the memory that it uses, in bytes."""
    text = Path(f"/proc/{process}/smaps_rollup").read_text()
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def in_child(measure) -> int:
    """Run it in a process of its own, so that nothing of it stays."""
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, str(measure()).encode())
        os._exit(0)
    found = int(os.read(read, 100))
    os.wait()
    return found


if __name__ == "__main__":
    main()
