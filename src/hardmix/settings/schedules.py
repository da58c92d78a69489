"""Schedules, as pure functions of the epoch or step (App. C.1).

They have no state, so a resumed run gets the same values.
"""

import math
from collections.abc import Sequence

from hardmix.errors import InputError


def cosine(epoch: float, epochs: float) -> float:
    """App. C.1: the factor on the initial learning rate, from 1 down to 0 over half a cosine.

    Official MoCo updates it once per epoch. The paper's 100-epoch results are epoch 100 of
    epochs=200; its 800-epoch runs continue from epoch 200 with epochs=800.
    """
    _check_epochs(epochs)
    return 0.5 * (1 + math.cos(math.pi * min(max(epoch / epochs, 0.0), 1.0)))


def step(epoch: float, milestones: Sequence[float], factor: float = 0.1) -> float:
    """Return MoCo-v1's and the linear evaluation's factor: `factor` per milestone reached."""
    return factor ** sum(epoch >= milestone for milestone in milestones)


def warm_up(epoch: float, epochs: float) -> float:
    """Return the factor on the learning rate, rising linearly from 0 to 1 over `epochs`."""
    return min(epoch / epochs, 1.0) if epochs > 0 else 1.0


def mixing_started(now: float, warm_up: float) -> bool:
    """Sec. 5: no points are synthesised in the first 10 (ImageNet-100) or 15 (ImageNet-1k) epochs.

    Counts from 0, in epochs or in steps; with a warm-up of 0, mixing starts immediately.
    """
    return now >= warm_up


def decreasing(epoch: float, epochs: float, start: float = 100.0, end: float = 0.0) -> float:
    """App. B.2's future work: a percentage of synthetic points that decreases, here linearly."""
    _check_epochs(epochs)
    return start + (end - start) * min(max(epoch / epochs, 0.0), 1.0)


def shown_epochs(epochs: int, number: int = 10) -> list[int]:
    """Fig. 2a: evenly spaced epochs, from the first (0) to the last, to record hardness at."""
    number = min(number, epochs)
    if number <= 1:
        return [epochs - 1]
    return [round(index * (epochs - 1) / (number - 1)) for index in range(number)]


def _check_epochs(epochs: float) -> None:
    if not epochs > 0:
        raise InputError(f"epochs={epochs} must be above 0.")
