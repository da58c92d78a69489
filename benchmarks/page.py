"""Writes the tables of docs/performance.md from the results of `python -m benchmarks`.

`python -m benchmarks.page [--check]` writes between <!-- FILE.json NAME --> and <!-- end --> what
benchmarks/results/FILE.json says about NAME: circumstances, limits, or a part.
"""

import json
import re
import sys
from pathlib import Path

from benchmarks.tables import sections_of

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
BLOCK = re.compile(
    r"(?P<begin><!-- (?P<file>\S+\.json) (?P<name>\S+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL
)


def filled(page: str) -> str:
    """Return the page with every table as it was measured."""

    def block(match: re.Match[str]) -> str:
        sections = sections_of(json.loads((RESULTS / match["file"]).read_text()))
        return f"{match['begin']}{sections[match['name']]}\n{match['end']}"

    return BLOCK.sub(block, page)


def main() -> None:
    """Rewrite the page, or with --check report that it is stale."""
    page = PAGE.read_text()
    if "--check" not in sys.argv:
        PAGE.write_text(filled(page))
    elif filled(page) != page:
        sys.exit(f"{PAGE.name} has old tables: run `make tables`.")


if __name__ == "__main__":
    main()
