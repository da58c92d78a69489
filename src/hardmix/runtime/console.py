"""What people see: tables, lines, progress. The only file that prints."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

QUIET_SECONDS = 20.0
"""Where there is no terminal, a progress line at most this often."""

_out = Console(highlight=False)
_err = Console(stderr=True, highlight=False)
_rank = 0


def speak_as(rank: int) -> None:
    """Of many processes only rank 0 speaks; the others say only why they end, with their rank."""
    global _rank
    _rank = rank
    _out.quiet = rank > 0


def say(text: str) -> None:
    """One line of plain text; nothing in it is taken for markup."""
    _out.print(text, markup=False, soft_wrap=True)


def warn(text: str) -> None:
    """One line on standard error that does not stop anything."""
    if _rank == 0:
        _err.print(f"warning: {text}", markup=False, soft_wrap=True)


def complain(text: str) -> None:
    """One line on standard error: why nothing more happens."""
    who = f"hardmix: rank {_rank}: " if _rank else "hardmix: "
    _err.print(f"{who}{text}", markup=False, soft_wrap=True)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table; the first column is text, the others are numbers."""
    shown = Table(title=title, title_justify="left")
    for index, name in enumerate(columns):
        shown.add_column(name, justify="left" if index == 0 else "right")
    for row in rows:
        shown.add_row(*row)
    _out.print(shown)


class Meter:
    """A job's progress: a live bar on a terminal, now and then a line elsewhere."""

    def __init__(self, bar: Progress | None, title: str, total: int, done: int) -> None:
        self._bar, self._title, self._total, self._first = bar, title, total, done
        self._task = None if bar is None else bar.add_task(title, total=total, completed=done)
        self._started = self._said = time.monotonic()

    def advance(self, done: int, text: str = "") -> None:
        """So many of the total are done; `text` says how it goes."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, description=f"{self._title} {text}")
            return
        now = time.monotonic()
        if now - self._said >= QUIET_SECONDS and done > self._first:
            left = (now - self._started) / (done - self._first) * (self._total - done)
            say(f"{self._title} {done}/{self._total} {text} ETA {left:.0f} s")
            self._said = now


@contextmanager
def progress(title: str, total: int, done: int = 0) -> Iterator[Meter]:
    """Show the progress of a long job, with the time it will still take."""
    if _rank or not _out.is_terminal:
        yield Meter(None, title, total, done)
        return
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn()
    with Progress(*columns, console=_out, transient=True) as bar:
        yield Meter(bar, title, total, done)
