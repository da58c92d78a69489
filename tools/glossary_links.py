"""Links the glossary's terms where a page uses them first, while the site is built.

The pages stay free of these links: whoever reads them in an editor or on GitHub is not disturbed.
"""

import re

TERMS = {
    "momentum-encoder": r"momentum encoder|key encoder",
    "queue": r"queue",
    "hardest-negatives": r"hard(?:est)? negatives",
    "false-negative": r"false negatives?",
    "negative": r"negatives?",
    "synthetic-point": r"synthetic points?|pair points?|points? mixed with the query",
    "embedding": r"embeddings?",
    "temperature": r"temperature",
    "class-oracle": r"(?:class )?oracle",
    "warm-up": r"warm-up",
    "proxy-accuracy": r"proxy accuracy",
    "k-nn-accuracy": r"k-NN(?: accuracy)?",
    "linear-probe": r"(?:linear )?probe",
    "alignment-and-uniformity": r"uniformity|alignment",
    "verdict": r"verdict",
    "pair-of-runs": r"pairs? of runs",
}
"""Headings of docs/glossary.md, and the words that are linked to them. Words of everyday use (view,
key, plan) are not: they also mean other things."""

ASIDE = re.compile(
    r"^```.*?^```|^ {4}.*?$|^#.*?$|`[^`\n]*`|<[^>]*>"
    r"|!?\[(?:[^\[\]]|\[[^\]]*\])*\]\([^)]*\)",
    re.MULTILINE | re.DOTALL,
)
"""Code, headings, links and pictures, which stay as they are."""


def linked(markdown: str, glossary: str) -> str:
    """Return a page whose first use of each term leads to `glossary`, unless the page does so."""
    free = [term for term in TERMS if f"glossary.md#{term})" not in markdown]
    parts, last = [], 0
    for aside in ASIDE.finditer(markdown):
        parts += [_with_links(markdown[last : aside.start()], free, glossary), aside[0]]
        last = aside.end()
    return "".join([*parts, _with_links(markdown[last:], free, glossary)])


def _with_links(text: str, free: list[str], glossary: str) -> str:
    """Return prose with links; the terms that are linked are removed from `free`."""
    named = [f"(?P<t{number}>{TERMS[term]})" for number, term in enumerate(free)]
    words = re.compile(rf"(?<![\w/.-])(?:{'|'.join(named)})(?![\w/-]|\.\w)", re.IGNORECASE)
    done: set[str] = set()

    def link(found: re.Match[str]) -> str:
        term = free[int(str(found.lastgroup)[1:])]
        if term in done:
            return found[0]
        done.add(term)
        return f"[{found[0]}]({glossary}#{term})"

    text = words.sub(link, text) if free else text
    free[:] = [term for term in free if term not in done]
    return text
