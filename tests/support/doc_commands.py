"""Every call of hardmix in README.md, docs and the plan of experiments, as words to be typed.

tests/docs/test_docs.py gives each to the command line; test_docs_commands.py beside it runs it.
"""

import re
import shlex
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from places import ROOT

DOCS = ROOT / "docs"
DOCUMENTS = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), ROOT / "experiments" / "plan.md"]
PLACEHOLDERS = {
    "COMMAND": "version",
    "RECIPE": "demo",
    "NAME": "table1",
    "TEXT": "MoCo-v2",
    "N": "1",
    "$IMAGENET": "IMAGENET",
    "$RUN": "RUN",
}
"""Values for words of the documents that name no file."""

WHOLE = ("demo", "recipes", "version")
"""Commands that are complete without options; others named in a sentence are not run."""


class Command(NamedTuple):
    """A call of hardmix in a document, without "hardmix" and without what starts it many times."""

    document: str
    line: int
    text: str
    in_block: bool

    @property
    def place(self) -> str:
        """The place in words."""
        return f"{self.document}:{self.line}"


def commands() -> list[Command]:
    """Return the commands of every document, in order."""
    found = []
    for document in DOCUMENTS:
        text = document.read_text()
        for in_block, collect in ((True, commands_in_blocks), (False, commands_in_sentences)):
            found += [Command(document.name, *each, in_block) for each in collect(text)]
    return found


def commands_in_blocks(text: str) -> Iterator[tuple[int, str]]:
    """Indented or fenced lines that call hardmix, each with its line number."""
    lines, fenced = iter(enumerate(text.splitlines(), start=1)), False
    for number, line in lines:
        if line.startswith("```"):
            fenced = not fenced
        while line.endswith("\\"):
            line = line[:-1] + next(lines)[1]
        called = re.match(
            r" *(?:(?:srun|torchrun) .*?(?:-m hardmix --|hardmix)|hardmix) (.+)", line
        )
        if called and (fenced or line.startswith("    ")):
            yield number, re.sub(r"^(pretrain .*) \.\.\. ", r"\1 --out RUN ", called[1])


def commands_in_sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yield those between backticks, where a command may be cut to its name or its settings.

    What a page's own diff would add ("then works") is left to that page's test.
    """
    prose = re.sub(r"^```.*?^```", lambda it: "\n" * it[0].count("\n"), text, flags=re.M | re.S)
    for found in re.finditer(r"`hardmix (\w[^`]*)`(?! then works)", prose):
        command = found[1]
        if len(command.split()) == 1 and command not in WHOLE:
            command += " --help"
        elif command.startswith("pretrain ") and "--out" not in command:
            command += " --out RUN"
        yield prose.count("\n", 0, found.start()) + 1, command


def ways_to_type(command: str) -> list[tuple[str, ...]]:
    """Return the commands without [optional parts] and with them, and each of one|or|other."""
    ways: dict[tuple[str, ...], None] = {}  # ordered, each once
    for text in (re.sub(r"\[[^]]*\]", "", command), re.sub(r"[][]", "", command)):
        words = [word.removesuffix("...") for word in shlex.split(text, comments=True)]
        choices = [word.split("|") for word in words if word]
        ways |= {tuple(PLACEHOLDERS.get(w, w) for w in way): None for way in product(*choices)}
    return list(ways)
