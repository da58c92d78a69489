"""The page of a run that is still training, drawn by a process of its own for `hardmix watch`.

The server stays small and alive whatever the run's files hold.
"""

import os
import sys
from pathlib import Path

from markupsafe import Markup

from hardmix.errors import InputError
from hardmix.report.live_status import live_status
from hardmix.report.page import environment, part, render
from hardmix.report.run_state import state_of
from hardmix.runs.reading import read_runs

NO_PAGE = 3
"""Exit status of a process that wrote a sentence in place of a page."""


def draw_page(path: Path) -> bytes:
    """Return the page; raises InputError if there is nothing to show."""
    (record,) = read_runs([path])
    if record.is_empty:
        raise InputError(" ".join(record.missing))
    if state_of(path) == "running":  # a resumed run's verdict is of its earlier encoder
        record.results.pop("verdict", None)
    script = part("watch.js")
    template = environment().get_template("live.html")
    live = template.render(live=live_status(record), script=Markup(script))
    missing = list(record.missing)
    page = render([record], missing, Path("report.html"), live=Markup(live), script=script)
    return page.encode(errors="backslashreplace")


def main(path: str) -> None:
    """Write the page to standard output, or a sentence about what is wrong; never a traceback."""
    if hasattr(os, "nice"):
        os.nice(10)  # the training comes first
    status = 0
    try:
        content = draw_page(Path(path))
    except Exception as error:  # whatever the files of a stranger lead to
        said = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
        content, status = said.encode(errors="backslashreplace"), NO_PAGE
    sys.stdout.buffer.write(content)
    sys.stdout.flush()
    sys.exit(status)
