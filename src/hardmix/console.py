"""What people see: tables and lines. The only file that prints."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

_out = Console(highlight=False)
_err = Console(stderr=True, highlight=False)


def say(text: str) -> None:
    """One line of plain text; nothing in it is taken for markup."""
    _out.print(text, markup=False, soft_wrap=True)


def complain(text: str) -> None:
    """One line on standard error."""
    _err.print(text, markup=False, soft_wrap=True)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table; the first column is text, the others are numbers."""
    shown = Table(title=title, title_justify="left")
    for index, name in enumerate(columns):
        shown.add_column(name, justify="left" if index == 0 else "right")
    for row in rows:
        shown.add_row(*row)
    _out.print(shown)
