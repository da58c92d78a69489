"""Keeps the line numbers in docs/paper-to-code.md true: `python docs/lines.py [--check]`.

A link [`name`](../src/hardmix/file.py#L12) must lead to the line that defines `name`.
"""

import re
import sys
from pathlib import Path

PAGE = Path(__file__).parent / "paper-to-code.md"
LINK = re.compile(r"\[`(?P<name>[\w.]+)`\]\((?P<file>[^)#]+)#L\d+\)")


def defining_line(file: Path, name: str) -> int:
    """The line on which a function, class, method or constant begins."""
    pattern = re.compile(rf"\s*(def|class) {name.split('.')[-1]}\b|{name}\b.*=")
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        if pattern.match(line):
            return number
    sys.exit(f"{PAGE.name}: {file.name} does not define {name}; correct the page.")


def current(page: str) -> str:
    """The page with every line number as it is now."""

    def link(match: re.Match[str]) -> str:
        file = match["file"]
        return f"[`{match['name']}`]({file}#L{defining_line(PAGE.parent / file, match['name'])})"

    return LINK.sub(link, page)


def main() -> None:
    """Rewrite the page, or with --check say that it is stale."""
    page = PAGE.read_text()
    if "--check" not in sys.argv:
        PAGE.write_text(current(page))
    elif current(page) != page:
        sys.exit(f"{PAGE.name} names old lines: run `make docs`.")


if __name__ == "__main__":
    main()
