"""The notebooks of examples/notebooks: `python tools/notebook_pages.py` executes them all.

Their outputs are kept in the files, so that GitHub and the site show them; tests/docs executes them
again. The site shows them as pages (`pages`), which tools/site.py adds.
"""

import html
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbclient
import nbformat

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples" / "notebooks"
SECONDS = 300
"""Longest time of a cell."""
MOST_LINES = 24
"""Lines of text that a page shows of an output; a notebook has all of them."""
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def main() -> None:
    """Execute every notebook in a folder of its own, and keep what its cells show."""
    os.environ["PYTHONPATH"] = str(ROOT / "src")
    for file in notebooks():
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(executed(file, Path(folder)), file)
        sys.stdout.write(f"{file.name}\n")


def notebooks() -> list[Path]:
    """Return the files, in the order of the site."""
    return [FOLDER / f"{name}.ipynb" for name in ("loss", "folder", "run")]


def executed(file: Path, folder: Path) -> Any:
    """Return a notebook with the outputs of its cells, executed in a folder."""
    notebook = nbformat.read(file, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    client = nbclient.NotebookClient(
        notebook, timeout=SECONDS, record_timing=False, resources=resources
    )
    client.execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = settled(cell.outputs, folder)
            cell.execution_count = None
    return notebook


def settled(outputs: list[Any], folder: Path) -> list[Any]:
    """Return outputs as they are kept: text in one piece, no colours, ended bars and folders."""
    kept: list[Any] = []
    for output in outputs:
        if output.output_type == "stream":
            output.text = COLOUR.sub("", output.text).replace(f"{folder}/", " " * len(f"{folder}/"))
            if kept and kept[-1].get("name") == output.name:
                kept[-1].text += output.text
                continue
        elif not output.data.get("text/plain"):
            continue
        if "execution_count" in output:
            output.execution_count = None
        kept.append(output)
    return kept


def pages() -> dict[str, str]:
    """Return the notebooks as pages of the site, by their path inside docs/."""
    return {f"notebooks/{file.stem}.md": page(file) for file in notebooks()}


def page(file: Path) -> str:
    """Return a notebook as Markdown; links to docs/ are links between pages of the site."""
    parts = []
    for cell in nbformat.read(file, as_version=4).cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source.replace("](../../docs/", "](../"))
        else:
            parts.append(f"```python\n{cell.source}\n```")
            parts += [shown(output) for output in cell.outputs]
    note = f"*This page is the notebook `examples/notebooks/{file.name}`, as it was executed.*"
    return "\n\n".join([parts[0], note, *parts[1:]]) + "\n"


def shown(output: Any) -> str:
    """Return an output as a block of HTML, which has no empty line."""
    if output.output_type == "stream":
        inside = as_text(output.text)
    elif "image/png" in output.data:
        picture = output.data["image/png"].replace("\n", "")
        inside = f'<img src="data:image/png;base64,{picture}" alt="a figure">'
    elif "text/html" in output.data:
        inside = re.sub(r"\n\s*", " ", output.data["text/html"])
    else:
        inside = as_text(output.data["text/plain"])
    return f'<div class="output">{inside}</div>'


def as_text(text: str) -> str:
    """Return the first lines of a text as they are."""
    lines = text.rstrip().splitlines()
    more = [f"... {len(lines) - MOST_LINES} more lines"] if len(lines) > MOST_LINES else []
    return f"<pre>{'&#10;'.join(html.escape(line) for line in lines[:MOST_LINES] + more)}</pre>"


if __name__ == "__main__":
    main()
