"""The documents' code runs as it stands."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.usefixtures("unchecked_types")
def test_the_blocks_of_the_library_page_run_one_after_the_other():
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "library.md").read_text(), re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/library.md", "exec"), names)
    assert len(blocks) == 7
    assert names["query"].grad.isfinite().all()
    assert 0 <= float(names["accuracy"].mixed) <= float(names["accuracy"].real) <= 1
    assert float(names["value"].detach()) > 0
