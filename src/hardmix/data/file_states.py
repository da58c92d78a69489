"""Sizes and times of files: what tells whether they have changed, by one look at the disk each."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from jaxtyping import Int64
from torch import Tensor

from hardmix.data.video_frames import source_of
from hardmix.errors import InputError
from hardmix.runtime.distributed import agree_on_max, broadcast, is_main, while_main_works

MISSING = (-1, -1)
"""Of a file that is not there."""
LOOKED_AT, LOOKING = 1000, 16
"""Files that are looked at together, and threads that look."""


def file_states(files: Sequence[str]) -> Int64[Tensor, "n 2"]:
    """Return the bytes of every file, and the time of its last change in nanoseconds."""
    return _joined(_look_at(files))


def shared_states(files: Sequence[str]) -> Int64[Tensor, "n 2"]:
    """Return `file_states`, as rank 0 finds them, on every rank.

    A million files on a network disk take minutes, in which the other processes hear that rank 0
    is still at it.
    """
    most = agree_on_max(len(files))
    if most != len(files):
        raise InputError(
            f"this process finds {len(files)} images, another one {most}: all processes must see"
            " the same files."
        )
    found = while_main_works(_look_at(files))
    return broadcast(_joined(found) if is_main() else torch.zeros(most, 2, dtype=torch.int64))


def _look_at(files: Sequence[str]) -> Iterator[Int64[Tensor, "some 2"]]:
    """Part by part, by several threads: on a network disk each look is a journey."""
    parts = [files[start : start + LOOKED_AT] for start in range(0, len(files), LOOKED_AT)]
    with ThreadPoolExecutor(LOOKING) as threads:
        yield from threads.map(_states_of, parts)


def _states_of(files: Sequence[str]) -> Int64[Tensor, "some 2"]:
    states = []
    for file in files:
        try:
            found = os.stat(source_of(file))
        except (OSError, ValueError):  # gone, or a name that only the user's own `read` knows
            states.append(MISSING)
        else:
            states.append((found.st_size, found.st_mtime_ns))
    return torch.tensor(states)


def _joined(parts: Iterator[Tensor] | list[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0, 2, dtype=torch.int64), *parts])
