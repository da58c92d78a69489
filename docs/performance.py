"""Keeps the tables of docs/performance.md those that `hardmix bench` wrote in benchmarks/.

`python docs/performance.py [--check]` writes between <!-- FILE.json NAME --> and <!-- end --> what
FILE says of NAME: circumstances, limits, or a part.
"""

import json
import re
import sys
from pathlib import Path

from hardmix.bench.speed_tables import sections_of

PAGE = Path(__file__).parent / "performance.md"
REPORTS = Path(__file__).parent.parent / "benchmarks"
BLOCK = re.compile(
    r"(?P<begin><!-- (?P<file>\S+\.json) (?P<name>\S+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL
)


def current(page: str) -> str:
    """The page with every table as it was measured."""

    def block(match: re.Match[str]) -> str:
        sections = sections_of(json.loads((REPORTS / match["file"]).read_text()))
        return f"{match['begin']}{sections[match['name']]}\n{match['end']}"

    return BLOCK.sub(block, page)


def main() -> None:
    """Rewrite the page, or with --check say that it is stale."""
    page = PAGE.read_text()
    if "--check" not in sys.argv:
        PAGE.write_text(current(page))
    elif current(page) != page:
        sys.exit(f"{PAGE.name} has old tables: run `make docs`.")


if __name__ == "__main__":
    main()
