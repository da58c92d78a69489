"""Refuses phrases that nobody would say: `python tools/words.py`.

It reads docstrings, comments and messages of all programs, and the pages. The first line of a
docstring or comment is a sentence or a noun: "Return the shares of each query", not "Of each query,
the shares". Pages speak of the project and of dates, never of how the work was organised.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PROGRAMS = ("src", "tests", "benchmarks", "experiments", "tools", "examples")
PAGES = (ROOT, ROOT / "docs", ROOT / "experiments")
PLAN = ROOT / "experiments" / "plan.md"

OPENING = re.compile(r"(Of|What|Which|Whose|By what|To what|From what)\b(?![^.]*\?)")
"""Openings without a noun, of docstrings and comments. A question may begin like this."""
DOCSTRING = re.compile(
    r"(As|Else|Neither|Nor|Within|Whatever|Would|Does|Over|Inside|So|By|Also where|Also if)\b"
    r"(?![^.]*\?)"
)
"""Openings of docstrings that lean on a name outside of them."""

PHRASES = (
    r"knows? (them|it|him|one) not",
    r"(is|are|was|were) warned (of|about)",
    r"told apart from (nothing|zero)",
    r"(can|could)(not)?( hardly)? be told (from|by)",
    r"hears? of (each|it|them)",
    r"has it so",
    r"of all alike",
    r"which (ones )?are not is said",
    r"has its name afterwards",
    r"goes? on with",
    r"a number that is none",
    r"a defect of ours",
    r"(?<![Tt]here )are no (negatives|tensors|samples|buffers|fractions)\b",
    r"[Kk]ept are",
    r"\bshall\b",
    r"\bwhom\b (it|one|reading|nobody)",
)
NOT_IN_A_WHEEL = re.compile(r"\b(docs|experiments|tools|benchmarks)/[\w-]+\.")
"""Files that a message of the package must not point at, because a wheel does not contain them."""

ORGANISATION = r"\b(helpers?|sub-?agents?|our (last|next|previous) session)\b"
"""How the work was organised; the word session has other meanings, so it is listed with care."""


class Passage(NamedTuple):
    """A piece of prose, and where it begins."""

    file: Path
    line: int
    text: str
    kind: str
    """docstring, comment, continued, string or page; openings of the first two count."""


def main() -> None:
    """Report what is refused, and end with status 1."""
    wrong = [sentence for passage in passages() for sentence in refused(passage)]
    if wrong:
        sys.exit("\n".join([*wrong, f"{len(wrong)} passages to rewrite: tools/words.py"]))


def passages() -> Iterator[Passage]:
    """Yield the prose of all programs and pages, but for this file's."""
    for folder in PROGRAMS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            if file != Path(__file__):
                yield from prose_of(file)
    for folder in PAGES:
        for page in sorted(folder.glob("*.md")):
            for number, line in enumerate(page.read_text().splitlines(), start=1):
                yield Passage(page, number, line, "page")


def prose_of(file: Path) -> Iterator[Passage]:
    """Yield docstrings, other strings and comments of a program."""
    source = file.read_text()
    tree = ast.parse(source)
    docstrings = {
        node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)
    }  # of modules, classes and functions, and those below a setting
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield Passage(
                file, node.lineno, node.value, "docstring" if node in docstrings else "string"
            )
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line = token.start[0]
            kind = "comment" if line != last + 1 else "continued"  # only the first line opens it
            yield Passage(file, line, token.string.lstrip("#: "), kind)
            last = line


def refused(passage: Passage) -> Iterator[str]:
    """Yield a sentence for every phrase that a passage should not have."""
    where = f"{passage.file.relative_to(ROOT)}:{passage.line}"
    openings = {"docstring": (OPENING, DOCSTRING), "comment": (OPENING,)}.get(passage.kind, ())
    if any(opening.match(passage.text) for opening in openings):
        yield f'{where}: begins without a noun: "{passage.text.splitlines()[0]}"'
    if passage.kind == "string" and passage.file.is_relative_to(ROOT / "src"):
        for found in NOT_IN_A_WHEEL.finditer(passage.text):
            yield f'{where}: a message points at "{found[0]}", which a wheel does not contain'
    phrases = "|".join(PHRASES)
    if passage.kind == "page" and passage.file != PLAN:
        phrases += f"|{ORGANISATION}"
    for found in re.finditer(phrases, passage.text):
        yield f'{where}: nobody says "{found[0]}"'


if __name__ == "__main__":
    main()
