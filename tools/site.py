"""Hooks of mkdocs.yml: adds the reference to the site, and settles links that leave docs/.

A page of docs/ may link into the repository (../src/hardmix/mixing/loss.py). On the site there is
no such page, so that the link's text stays and its target is left out.
"""

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))

import reference_pages

LEAVING = re.compile(r"(?<!!)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?:\.\./)+[^)]*\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages of the reference."""
    for path, text in reference_pages.pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Return the page with links that leave docs/ as plain text."""
    generated = page.file.src_uri.startswith("reference/")
    return markdown if generated else LEAVING.sub(lambda link: link["text"], markdown)
