"""The words that ranks leave in their store: here, failed, left, gone, each with the rank."""

import time
from typing import Any

from hardmix.runtime.launch import Launch

LAST_WORDS = 3.0
"""Seconds that the remaining processes wait for each other to report."""


def here_of(ranks: list[int]) -> list[str]:
    """Return the words of ranks that have started."""
    return [f"here-{each}" for each in ranks]


def missing_ranks(store: Any, words: list[str], ranks: list[int], seconds: float) -> list[int]:
    """Return the ranks that have put none of these words in the store after so many seconds."""
    end = time.monotonic() + seconds
    missing = ranks
    while True:
        missing = [
            each for each in missing if not any(store.check([f"{word}-{each}"]) for word in words)
        ]
        if not missing or time.monotonic() > end:
            return missing
        time.sleep(0.02)


def host_of(store: Any, rank: int) -> str:
    """Return the host of a rank that has started."""
    return str(store.get(f"here-{rank}").decode().partition(" ")[0])


def go_last(store: Any, launch: Launch, others: list[int]) -> None:
    """Let the rank that keeps the store exit only after the others have read it."""
    store.set(f"gone-{launch.rank}", "")
    if launch.rank == 0 and not launch.agent_store:
        missing_ranks(store, ["gone"], others, LAST_WORDS)
