"""docs/reproduce.md: every command of the page, in its order and in one folder, made small.

Two processes of the CPU stand for the GPUs, drawn images for ImageNet, and a few tiny ones for VOC
and COCO. What is trained for one table is used by the next, as on the page.
"""

import json
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from doc_commands import DOCS, commands
from doc_things import make_coco, make_devkit, make_imagenet
from foreign_files import moco_file
from hardmix.commands import main as cli
from hardmix.models.backbones import build_backbone
from hardmix.runs.folder import Run
from hardmix.runtime.signals import StopRequest
from hardmix.sweep import sweeping
from hardmix.sweep.gpus import run_by_torchrun
from hardmix.sweep.planning import SMALL_DETECTOR

pytestmark = pytest.mark.slow

PAGE = DOCS / "reproduce.md"
SWEEP = "--scale shapes --epochs 1 --num-images 130 --seeds 1 --device cpu --data.workers 0"
DETECT = "--schedule short --iterations 2 --trials 2 --warm-up 1 --batch-size 2 --sides 48 64"
DETECT += " --milestones 1 --test-side 64 --regions 8 --proposals 10 --precise-bn 1 --test-every 0"
DETECT += " --data.workers 0 --device cpu"


class Typed(NamedTuple):
    """A command of the page, and whether torchrun starts it."""

    line: int
    words: list[str]
    by_torchrun: bool


def commands_of_page() -> list[Typed]:
    source = PAGE.read_text().splitlines()
    return [
        Typed(
            each.line,
            shlex.split(each.text, comments=True),
            source[each.line - 1].lstrip().startswith("torchrun"),
        )
        for each in commands()
        if each.document == PAGE.name and each.in_block
    ]


def small(words: list[str], name: str) -> list[str]:
    """Return a command with the same meaning that takes seconds."""
    words = [word.replace("NAME", name) for word in words]
    match words[0]:
        case "sweep":
            return small_sweep(words)
        case "check-data":
            return [*words, "--any-counts"]
        case "linear":
            return [*words, "--epochs", "1", "--batch-size", "16", "--data.workers", "0"]
        case "detect":
            return [*words, *DETECT.split()]
    return words


def small_sweep(words: list[str]) -> list[str]:
    text = " ".join(shlex.quote(word) for word in words)
    text = re.sub(r" --only .*?(?= --|$)", "", text)
    text = text.replace(" --data.root IMAGENET", "").replace("--gpus-per-run 8", "--gpus-per-run 2")
    if "--voc-root" in words or "--coco-root" in words:
        return shlex.split(f"{text} {SWEEP} --detector-iterations 2 --only MoCo-v2 Supervised")
    return shlex.split(f"{text} {SWEEP} --only MoCo-v2")


def name_of_run(folder: Path) -> str:
    """Return the name of the run in DIR that can become a detector; before there is one, NAME."""
    for file in sorted((folder / "configs").glob("*.json")):
        if json.loads(file.read_text())["model"]["backbone"] == SMALL_DETECTOR:
            return file.stem
    return "NAME"


@pytest.fixture
def _folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    drawn = set()

    def draw_once(plan, runs):
        """Draw the figures and the report of each table in DIR once: they take seconds."""
        table = str(plan.options.out), plan.options.grid
        if table[0] == "DIR" and table not in drawn and table[1] in ("table1", "table2", "table3"):
            drawn.add(table)
            draw(plan, runs)

    draw = sweeping.draw
    monkeypatch.setattr(sweeping, "draw", draw_once)
    make_imagenet(Path("IMAGENET"))
    make_devkit(Path("VOC"))
    make_coco(Path("COCO"))
    moco_file(Path("moco_v2_200ep_pretrain.pth.tar"))
    torch.save(build_backbone(SMALL_DETECTOR).trunk.state_dict(), "resnet50-0676ba61.pth")


@pytest.mark.usefixtures("_folders")
def test_the_commands_of_the_page_lead_from_images_to_the_tables(capfd):
    page = commands_of_page()
    assert len(page) > 20
    for command in page:
        words = small(command.words, name_of_run(Path("DIR")))
        if command.by_torchrun:
            status: object = run_by_torchrun(words, 2, StopRequest())
        else:
            with pytest.raises(SystemExit) as ended:
                cli.main(words)
            status = ended.value.code
        shown = capfd.readouterr()
        assert status == 0, f"{PAGE.name}:{command.line} {shlex.join(words)}\n{shown.err}"
    folder = Path("DIR")
    for table, columns in {
        "table1": "Method & top-1 & diff",
        "table2": "Method & top-1 & VOC AP50 & VOC AP & VOC AP75",
        "table3": "Method & COCO APbb & COCO APbb50 & COCO APbb75 & COCO APmk",
    }.items():
        assert columns in (folder / f"{table}.tex").read_text()
        assert (folder / f"{table}.html").exists()
        assert (folder / f"{table}-beside.tex").exists()
    assert "images per second" in (folder / "table1-cost.tex").read_text()
    assert "images per second" not in (folder / "table1.tex").read_text()
    rows = {row["label"]: row for row in json.loads((folder / "table2.json").read_text())["rows"]}
    read = rows["Supervised"]["results"]["detection-voc-short/VOC07 11-point/ap"]
    assert read["paper"] == 53.5
    assert list(read["values"]) == ["0"], "detect --from supervised was not read"
    trained = [Run(path) for path in (folder / "runs").iterdir()]
    assert len(trained) == 2, "Tables 2 and 3 share a run"
    assert len((folder / "claims.md").read_text().splitlines()) > 30
    assert {path.stem for path in Path("runs/moco-v2/results").iterdir()} >= {
        *("linear", "detection-voc-short", "detection-coco-short")
    }
