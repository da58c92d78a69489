"""Hooks of mkdocs.yml: adds pages made from the source, and settles the links of all pages.

A page of docs/ may link into the repository (../src/hardmix/mixing/loss.py). On the site there is
no such page, so that the link's text stays and its target is left out.
"""

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))

import glossary_links
import notebook_pages
import reference_pages

LEAVING = re.compile(r"(?<!!)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?:\.\./)+[^)]*\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages of the reference, and the notebooks."""
    for path, text in (reference_pages.pages() | notebook_pages.pages()).items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Return the page with links that leave docs/ as plain text, and with links to the glossary."""
    place = page.file.src_uri
    if place.startswith("reference/") or place == "glossary.md":
        return markdown
    settled = LEAVING.sub(lambda link: link["text"], markdown)
    return glossary_links.linked(settled, "../" * place.count("/") + "glossary.md")
