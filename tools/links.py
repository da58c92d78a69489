"""Checks every link from the docs into the source: `python tools/links.py`.

A link [`name`](../src/hardmix/file.py) must lead to the file that defines `name`: a function, a
class, a method as Class.method, or a constant. Lines are not named: they move with every change.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
LINK = re.compile(
    r"\[`(?P<name>[\w.]+)`\]\((?P<file>[^)]*src/hardmix/[^)#]+\.py)(?P<line>#[^)]*)?\)"
)


def main() -> None:
    """Report wrong links, and end with status 1."""
    folders = (ROOT, ROOT / "docs", ROOT / "experiments")
    pages = [page for folder in folders for page in sorted(folder.glob("*.md"))]
    wrong = [sentence for page in pages for sentence in wrong_links(page)]
    if wrong:
        sys.exit("\n".join(wrong))


def wrong_links(page: Path) -> list[str]:
    """Return the links of a page that lead to no such symbol, in sentences."""
    found = []
    for link in LINK.finditer(page.read_text()):
        file = page.parent / link["file"]
        if link["line"]:
            found.append(f"{page.name}: {link[0]} names a line; link the symbol alone.")
        elif not file.exists():
            found.append(f"{page.name}: {link['file']} does not exist.")
        elif link["name"] not in symbols_of(file):
            found.append(f"{page.name}: {file.name} does not define {link['name']}.")
    return found


def symbols_of(file: Path) -> set[str]:
    """Return the names that a file defines; methods also without their class."""
    names: set[str] = {file.name}
    for node in ast.parse(file.read_text()).body:
        names |= _defined(node)
        if isinstance(node, ast.ClassDef):
            inside = {name for each in node.body for name in _defined(each)}
            names |= inside | {f"{node.name}.{name}" for name in inside}
    return names


def _defined(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
    return {target.id for target in targets if isinstance(target, ast.Name)}


if __name__ == "__main__":
    main()
