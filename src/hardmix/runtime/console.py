"""Everything that is printed: lines, tables and progress. No other file prints.

File names may contain anything. Characters that would move the cursor, clear the screen or start a
new line are printed as escapes (`visible`), and nothing is interpreted as markup.
"""

import html
import io
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

QUIET_SECONDS = 20.0
"""Least time between two lines of progress where there is no terminal."""
NOTEBOOK_SECONDS = 0.2
"""Least time between two changes of the bar in a notebook: each is a message to the browser."""

BAR, ETA = 21, 9
"""Columns of a terminal that the bar and the remaining time take, each with a space before it."""

# In a notebook lines are plain text, too: as HTML, each would be an output of its own.
_out = Console(highlight=False, markup=False, emoji=False, force_jupyter=False)
_err = Console(stderr=True, highlight=False, markup=False, emoji=False, force_jupyter=False)
_rank = 0

_HIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, line breaks, changes of the writing direction, bytes that are not UTF-8."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def visible(text: str) -> str:
    r"""Return a text as one harmless line: an escape becomes \x1b, a line break \n."""
    return _HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def speak_as(rank: int) -> None:
    """Let only rank 0 print; other ranks print only why they stop, with their rank."""
    global _rank
    _rank = rank
    _out.quiet = rank > 0


@contextmanager
def silent() -> Iterator[None]:
    """Print nothing within the context, not even warnings: the same will be done again."""
    before = _out.quiet, _err.quiet
    _out.quiet = _err.quiet = True
    try:
        yield
    finally:
        _out.quiet, _err.quiet = before


def say(text: str) -> None:
    """Print one line of plain text."""
    _out.print(visible(text), soft_wrap=True)


def warn(text: str) -> None:
    """Print a warning, one line on standard error."""
    if _rank == 0:
        _err.print(f"warning: {visible(text)}", soft_wrap=True)


def complain(text: str) -> None:
    """Print why the program stops, one line on standard error."""
    who = f"hardmix: rank {_rank}: " if _rank else "hardmix: "
    _err.print(f"{who}{visible(text)}", soft_wrap=True)


def complain_at_length(text: str) -> None:
    """Print several lines on standard error, such as a traceback."""
    for line in text.splitlines():
        _err.print(visible(line), soft_wrap=True)


@contextmanager
def shielded(words: Sequence[str]) -> Iterator[None]:
    """Make what other code prints within the context harmless too.

    `words` is text from the user that this code may repeat. On a terminal its colours are kept,
    unless the words themselves could contain some.
    """
    harmless = all(visible(word) == word for word in words)
    out, err = (_Shield(stream, harmless) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(out), redirect_stderr(err):
        yield


class _Shield(io.TextIOBase):
    """A stream that writes only visible characters to another one."""

    def __init__(self, stream: TextIO, colours: bool) -> None:
        self._stream, self._colours = stream, colours and stream.isatty()

    def write(self, text: str) -> int:
        """Write line by line; return the length of the text."""
        for line in text.splitlines(keepends=True):
            end = "\n" * line.endswith("\n")
            self._stream.write(self._shown(line.removesuffix("\n")) + end)
        return len(text)

    def _shown(self, text: str) -> str:
        if not self._colours:
            return visible(text)
        pieces = zip(_COLOUR.split(text), [*_COLOUR.findall(text), ""], strict=True)
        return "".join(visible(words) + colour for words, colour in pieces)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the other stream."""
        return self._stream.encoding

    def isatty(self) -> bool:
        """Return whether colours may be used."""
        return self._colours

    def flush(self) -> None:
        """Flush the other stream."""
        self._stream.flush()


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], text: Sequence[int] = (0,)
) -> None:
    """Print a table; columns whose index is in `text` hold text, all others numbers."""
    shown = Table(title=visible(title), title_justify="left")
    for index, name in enumerate(columns):
        shown.add_column(visible(name), justify="left" if index in text else "right")
    for row in rows:
        shown.add_row(*(Text(visible(cell)) for cell in row))
    _out.print(shown)


def duration(seconds: float) -> str:
    """Return a duration in at most two units, such as 3 h 20 min."""
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if seconds < 60:
        return f"{seconds:.0f} s"
    if hours < 1:
        return f"{minutes} min"
    if hours < 48:
        return f"{hours} h {minutes % 60} min"
    return f"{hours // 24} days {hours % 24} h"


class Meter:
    """The progress of a job: a live bar on a terminal or in a notebook, elsewhere lines."""

    def __init__(
        self, title: str, total: int, done: int, bar: Progress | None = None, cell: Any = None
    ) -> None:
        self._bar, self._title, self._total, self._first = bar, title, total, done
        self._task = None if bar is None else bar.add_task(title, total=total, completed=done)
        self._cell = cell
        self._started = self._said = time.monotonic()
        self._place: str | None = None
        self._state: tuple[str, ...] = ()

    def advance(self, done: int, place: str | None = None, *state: str) -> None:
        """Show how many of the total are done.

        `place` says how far that is, such as "epoch 10 of 400", and `state` how it goes, the most
        important first: a terminal shows what it has room for. Without both, the last are repeated.
        """
        if place is not None or state:
            self._place, self._state = place, state
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, description=self._shown(done))
            return
        now = time.monotonic()
        pause = QUIET_SECONDS if self._cell is None else NOTEBOOK_SECONDS
        if now - self._said < pause or done <= self._first:
            return
        self._said = now
        left = (now - self._started) / (done - self._first) * (self._total - done)
        words = "; ".join([f"{self._where(done)}, {duration(left)} left", *self._state])
        if self._cell is None:
            say(words)
        else:
            self._cell.update(_bundle(words, done / self._total), raw=True)

    def _where(self, done: int) -> str:
        place = self._place or f"{done:,} of {self._total:,}"
        return f"{self._title}: {place}" if self._title else place

    def _shown(self, done: int) -> str:
        """Return place and state, cut to the room that the bar and the time leave."""
        room = max(0, _out.width - BAR - ETA)
        text = self._where(done)
        for each in self._state:
            if len(text) + len(each) + 2 <= room:
                text = f"{text}; {each}"
        return visible(text)[:room]


@contextmanager
def progress(title: str, total: int, done: int = 0) -> Iterator[Meter]:
    """Show the progress of a long job, with the time it will still take."""
    if _rank == 0 and not _out.quiet and (display := _notebook()) is not None:
        cell = display(_bundle(title, done / max(1, total)), raw=True, display_id=True)
        try:
            yield Meter(title, total, done, cell=cell)
        finally:
            cell.update({"text/plain": "", "text/html": ""}, raw=True)
        return
    if _rank or not _out.is_terminal:
        yield Meter(title, total, done)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=BAR - 1),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=_out, transient=True) as bar:
        yield Meter(title, total, done, bar)


def in_notebook() -> bool:
    """Return whether the program is a notebook's kernel."""
    return _notebook() is not None


def _notebook() -> Callable[..., Any] | None:
    """Return what shows an output in a cell, if the program is a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    if ipython is None or not hasattr(ipython.get_ipython(), "kernel"):
        return None
    return ipython.display.display  # type: ignore[no-any-return]


def _bundle(words: str, share: float) -> dict[str, str]:
    """Return a bar with words next to it, as a notebook shows it and as plain text."""
    plain = visible(words)
    bar = f'<progress value="{share:.4f}" style="width: 12em"></progress>'
    return {"text/plain": plain, "text/html": f"{bar} {html.escape(plain)}"}
