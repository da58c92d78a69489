"""Keeps the galleries of a run that is still training up to date, in a process of its own.

Whenever the run has a new checkpoint, the process makes similar images, from a small part of the
images, and hardest negatives. It takes one core, and leaves it to the training if that needs it.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from hardmix.runtime.own_code import allow_code, allowed_code

EVERY = 60.0
"""Seconds between the end of a gallery and the beginning of the next, at least."""
PROGRAM = "import sys; from hardmix.report.live_gallery import draw; draw(*sys.argv[1:])"


class LiveGallery:
    """Starts the process if there is a newer checkpoint; never waits for it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._drawn: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._next = 0.0

    def follow(self) -> None:
        """Start a process if the newest checkpoint has no gallery and none is under way."""
        if self._process is not None:
            if self._process.poll() is None:
                return
            self._process, self._next = None, time.monotonic() + EVERY
        newest = newest_checkpoint(self._path / "checkpoints")
        if newest is None or newest == self._drawn or time.monotonic() < self._next:
            return
        self._drawn = newest
        self._process = subprocess.Popen(
            # -P: the current folder, which may be the run's, holds no modules of ours.
            [sys.executable, "-P", "-c", PROGRAM, os.fspath(self._path), *allowed_code()],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # without a gallery the page says so
        )

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def newest_checkpoint(folder: Path) -> str | None:
    """Return a text that changes with the newest checkpoint; None if there is none."""
    try:
        found = [(file.stat().st_mtime_ns, file.name) for file in folder.iterdir()]
    except OSError:
        return None
    return f"{max(found)}" if found else None


def draw(path: str, *allowed: str) -> None:
    """Make the galleries of the newest checkpoint, at the lowest priority.

    `allowed` are names of code that the run may use.
    """
    from hardmix.report.looking import look_at
    from hardmix.runs.folder import Run

    if hasattr(os, "nice"):
        os.nice(19)
    allow_code(*allowed)
    look_at(Run(Path(path)), live=True)
