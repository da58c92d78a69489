"""The documents' code runs as it stands."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from PIL import Image

from hardmix import cli

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


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """Two hundred coloured images in two folders, where the commands run."""
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(0)
    for number in range(200):
        name = ("cats", "dogs")[number % 2]
        file = tmp_path / "photos" / name / f"{number // 2}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = torch.randint(0, 120, (40, 48, 3), generator=generator, dtype=torch.uint8)
        pixels[..., number % 2] += 100
        Image.fromarray(pixels.numpy()).save(file)
    return tmp_path


def test_the_commands_of_getting_started_run_as_they_stand(photos, capfd):
    text = (DOCS / "getting-started.md").read_text()
    commands = re.findall(r"^    (hardmix .*)$", text, re.MULTILINE)
    assert len(commands) == 12
    for command in commands:
        with pytest.raises(SystemExit) as ended:
            cli.main(shlex.split(command)[1:])
        assert ended.value.code == 0, (command, capfd.readouterr().err)
    for name in ("report.html", "neighbours.png", "features.csv", "encoder.safetensors"):
        assert (photos / name).stat().st_size > 1000
    block = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, object] = {}
    exec(block[1], names)
    assert names["features"].shape == (1, 256)
