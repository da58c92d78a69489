"""The documents' code runs as it stands."""

import json
import re
import runpy
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import tyro
from PIL import Image

import hardmix
from doc_commands import DOCS, DOCUMENTS, commands, ways_to_type
from hardmix.commands import main as cli
from hardmix.errors import InputError
from hardmix.runs.folder import Run
from hardmix.runtime.own_code import is_own
from hardmix.settings.recipes import demo
from hardmix.settings.saved import MAY_CHANGE
from places import ROOT

pytestmark = pytest.mark.slow

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.usefixtures("unchecked_types")
def test_the_blocks_of_the_library_page_run_one_after_the_other():
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "library.md").read_text(), re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/library.md", "exec"), names)
    assert len(blocks) == 11
    assert names["query"].grad.isfinite().all()
    assert 0 <= float(names["accuracy"].mixed) <= float(names["accuracy"].real) <= 1
    assert float(names["value"].detach()) > 0


@pytest.mark.usefixtures("unchecked_types")
def test_the_block_of_the_page_on_other_libraries_runs():
    page = (DOCS / "other-libraries.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(block, "docs/other-libraries.md", "exec"), names)
    assert names["value"].isfinite()


@pytest.mark.usefixtures("unchecked_types")
def test_the_blocks_of_the_loops_page_run_one_after_the_other():
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "loop.md").read_text(), re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/loop.md", "exec"), names)
    assert len(blocks) == 3
    assert names["value"].isfinite()
    assert names["encoder"].weight.grad.isfinite().all()


def test_the_block_of_the_explore_page_runs():
    (block,) = re.findall(r"```python\n(.*?)```", (DOCS / "explore.md").read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(block, "docs/explore.md", "exec"), names)
    assert len(names["groups"].centres) == 8
    assert names["near"].indices.shape == (200, 10)


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
        shorter = ["--minutes", "0.1"] if "pretrain photos" in command else []
        with pytest.raises(SystemExit) as ended:
            cli.main([*shlex.split(command)[1:], *shorter])
        assert ended.value.code == 0, (command, capfd.readouterr().err)
    for name in (
        "report.html",
        "explore.html",
        "neighbours.png",
        "features.csv",
        "encoder.safetensors",
    ):
        assert (photos / name).stat().st_size > 1000
    block = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, object] = {}
    exec(block[1], names)
    assert names["features"].shape == (1, 256)


def test_reliability_names_every_setting_that_may_change_on_resume():
    text = (DOCS / "reliability.md").read_text()
    (listed,) = re.findall(r"another run may change \((.*?)\)", text, re.DOTALL)
    assert re.findall(r"`([\w.]+)`", listed) == sorted(MAY_CHANGE)


@pytest.mark.parametrize("file", [*DOCUMENTS, *EXAMPLES], ids=lambda file: file.name)
def test_documents_and_examples_import_from_hardmix_alone(file):
    text = re.sub(r"^New file .*?```python\n.*?```", "", file.read_text(), flags=re.M | re.S)
    blocks = [text] if file.suffix == ".py" else re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    imports = [line for block in blocks for line in block.splitlines() if "import" in line]
    modules = "config|explore|integrations|losses|strategies"  # which export their names
    inside = rf"\s*(from|import) hardmix\.(?!({modules}) import)"
    assert not [line for line in imports if re.match(inside, line)]
    named = re.findall(r"\bhardmix\.(\w+)\(", text)
    assert set(named) <= set(hardmix.__all__)


class ParsedError(Exception):
    """Raised at the point where a command would begin its work."""


@pytest.fixture
def parse_only(tmp_path, monkeypatch):
    """Commands end once their options are read; the runs that the documents name exist."""
    monkeypatch.chdir(tmp_path)
    for name in ("RUN", "runs/photos", "runs/photos-moco", "runs/moco-v2"):
        Run.create(name, demo())
    Path("DIR/configs").mkdir(parents=True)
    Path("DIR/configs/NAME.json").write_bytes(Path("RUN/config.json").read_bytes())
    read = tyro.cli

    def read_and_stop(*arguments, **options):
        read(*arguments, **options)
        raise ParsedError

    monkeypatch.setattr(tyro, "cli", read_and_stop)


def why_refused(name: str, *arguments: str) -> str | None:
    """Return why the command line refuses a command; None if it accepts it."""
    if is_own(name):
        return None  # a function of the page, which test_extending.py evaluates with
    if name not in cli.COMMANDS:
        return "there is no such command"
    try:
        cli.COMMANDS[name](cli.scan_after(name, arguments))
    except ParsedError:
        return None
    except InputError as error:
        return str(error)
    except SystemExit as end:
        return f"exit status {end.code}" if end.code else None
    return "its options were never read"


@pytest.mark.usefixtures("parse_only")
def test_the_command_line_takes_every_command_of_the_documents(capfd):
    taken, refused = [], []
    for command in commands():
        for words in ways_to_type(command.text):
            if "auto" in words:  # --resume auto starts a run: RUN is another recipe's
                words = tuple("NEW" if word == "RUN" else word for word in words)
            reason = why_refused(*words)
            place = f"{command.place}: hardmix {' '.join(words)}"
            taken.append(place) if reason is None else refused.append(f"{place}: {reason}")
    assert not refused, "\n".join([*refused, capfd.readouterr().err])
    assert len(taken) > 100


def test_the_table_of_the_torture_run_is_that_of_its_record(tmp_path):
    script = runpy.run_path(str(ROOT / "benchmarks" / "torture" / "table.py"))
    record = json.loads((ROOT / "benchmarks" / "torture" / "results.json").read_text())
    page = tmp_path / "reliability.md"
    shutil.copy(DOCS / "reliability.md", page)
    script["write_page"](record, page)
    committed = (DOCS / "reliability.md").read_text()
    assert page.read_text() == committed, "python -m benchmarks.torture.table writes it"
    assert script["ROWS"].keys() >= record.keys() - {"of"}
