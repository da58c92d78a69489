"""docs/extending.md: its code runs, its changes work in a copy of the package, its list is true."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file

import hardmix
from hardmix import InputError
from hardmix.commands import main as cli
from hardmix.data.datasets import ImageSet, has_test, open_images
from hardmix.data.image_files import UnreadableImage
from hardmix.report.grouping import measures_of
from hardmix.runs.folder import Run
from hardmix.settings.config import DataConfig, DataName
from hardmix.training.pretrain import pretrain
from places import ROOT
from ranks import tiny

PAGE = (ROOT / "docs" / "extending.md").read_text()

NEW_FILES = re.compile(r"New file `(\S+)`:\n\n```python\n(.*?)```", re.DOTALL)


# In a program of one's own


def test_the_blocks_of_the_page_run_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    without_files = NEW_FILES.sub("", PAGE)  # those run in the copy below
    blocks = re.findall(r"```python\n(.*?)```", without_files, re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/extending.md", "exec"), names)
    assert len(blocks) == 7

    plan = names["half_mixed"](torch.rand(3, 20), num_hardest=8, num_pairs=5, num_with_query=2)
    assert plan.share[:, :5].eq(0.5).all()
    assert not plan.share[:, 5:].eq(0.5).any()
    for name, strategy, data in [
        ("half-mixed", "own", "shapes"),
        ("own-trunk", "mochi", "shapes"),
        ("stripes", "mochi", "own"),
        ("on-demand", "mochi", "own"),
    ]:
        run = Run.open(Path("runs") / name)
        assert (run.config().mix.strategy, run.config().data.name) == (strategy, data)
        assert json.loads(run.status_file.read_text())["state"] == "done"
        assert all(torch.tensor(line.get("loss", 0.0)).isfinite() for line in run.metrics())
    assert any("knn" in line for line in Run.open(Path("runs/stripes")).metrics())
    result = json.loads(Path("runs/half-mixed/results/centroids.json").read_text())
    assert result["top1"] == names["accuracy"].top1
    assert names["features"].features.shape == (96, 32)
    assert names["features"].ids.tolist() == list(range(96))


# As a contribution


def changed_copy(folder: Path) -> Path:
    """The package with every change of the page made to it."""
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for path, text in NEW_FILES.findall(PAGE):
        (folder / path).write_text(text)
    for block in re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL):
        for part in re.split(r"^--- ", block, flags=re.MULTILINE)[1:]:
            path, _, hunks = part.partition("\n")
            for hunk in re.split(r"^@@\n", hunks, flags=re.MULTILINE)[1:]:
                change(folder / path, hunk.splitlines())
    return folder / "src"


def change(file: Path, hunk: list[str]) -> None:
    """Lines that begin with a blank must be there, once and together; + stands for new ones."""
    kept = "".join(f"{line[1:]}\n" for line in hunk if line[:1] != "+")
    text = file.read_text()
    assert text.count(kept) == 1, f"docs/extending.md: {file.name} has no or many\n{kept}"
    file.write_text(text.replace(kept, "".join(f"{line[1:]}\n" for line in hunk)))


CONTRIBUTED = """
import sys
from typing import get_args
from hardmix import STRATEGIES
from hardmix.commands import main as cli
from hardmix.settings import config

assert (*STRATEGIES, "own") == get_args(config.StrategyName)
for words in (["--help"], *(line.split() for line in sys.argv[1:])):
    try:
        cli.main(words)
    except SystemExit as end:
        assert end.code == 0, words
"""


def test_the_changes_of_the_page_give_four_new_names(tmp_path):
    source = changed_copy(tmp_path)
    training = (
        "pretrain demo --data.name stripes --model.backbone tiny --mix.strategy half-mixed"
        " --mix.num-hardest 16 --mix.num-pairs 8 --mix.num-with-query 4 --mix.warm-up-epochs 1"
        " --data.num-images 96 --train.batch-size 16 --train.queue-size 64 --train.epochs 3"
        " --out run"
    )
    done = subprocess.run(
        [sys.executable, "-c", CONTRIBUTED, training, "centroids run"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "centroids    Accuracy of the nearest class mean." in done.stdout
    run = Run.open(tmp_path / "run")
    settings = json.loads(run.config_file.read_text())
    assert settings["mix"]["strategy"] == "half-mixed"
    assert settings["data"]["name"] == "stripes"
    assert load_file(run.encoder_file)["3.weight"].shape == (32, 16, 3, 3)
    mixed = [line for line in run.metrics() if "synthetic_both_false" in line]
    assert mixed
    assert all(line["loss"] > 0 for line in mixed)
    result = json.loads((run.results / "centroids.json").read_text())
    assert result["test"] == 96
    assert result["top1"] > 0.7  # of two classes
    assert [measure.title for measure in measures_of("centroids", result)] == ["centroids"]


def test_what_the_page_changes_is_not_there_yet():
    names = (*hardmix.STRATEGIES, *get_args(DataName), *cli.COMMANDS)
    assert not {"half-mixed", "stripes", "centroids"} & set(names)


# The layers


def test_the_layers_are_those_of_pyproject():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    shown = ""
    for contract in contracts["contracts"]:
        names = ", ".join(f"`{name}`" for name in contract["containers"])
        shown += f"In {names}:\n\n" + "".join(f"    {line}\n" for line in contract["layers"]) + "\n"
    section = PAGE.partition("## Who may import whom")[2].partition("\n## ")[0]
    found = section[section.find("In `") :].rstrip("\n")
    same = found == shown.rstrip("\n")
    assert same, f"docs/extending.md must say:\n\n{shown}"  # all of it: pytest cuts a comparison


# Images of one's own


def noise(number=96, **options):
    pixels = torch.randint(0, 256, (number, 3, 32, 32), dtype=torch.uint8)
    return ImageSet("noise", None, None, **{"tensor": pixels} | options)


def test_own_images_train_as_the_same_images_by_name(tmp_path):
    config = tiny(data={"num_images": 64})
    by_name = pretrain(config, tmp_path / "name")
    images = open_images(config.data)
    own = pretrain(config, tmp_path / "own", images=images)
    first, second = (load_file(run.encoder_file) for run in (by_name, own))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_own_images_are_asked_for_again_and_others_are_noticed(tmp_path, capfd):
    images = noise()
    run = pretrain(tiny(train={"stop_epoch": 1}), tmp_path / "run", images=images)
    longer = dataclasses.replace(run.config(), train=tiny().train)
    with pytest.raises(InputError, match=r"data\.name=own .* give them again"):
        pretrain(longer, run.path, resume=True)
    with pytest.raises(InputError, match="the images have changed"):
        pretrain(longer, run.path, resume=True, images=noise())
    pretrain(longer, run.path, resume=True, images=images)
    assert run.metrics()[-1]["epoch"] == 1
    with pytest.raises(SystemExit) as ended:
        cli.main(["knn", str(run.path)])
    assert ended.value.code == 2
    assert "set data.root to a folder of others" in capfd.readouterr().err
    assert not has_test(DataConfig(name="own"))


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("images", "words"),
    [
        (lambda: noise(channels=1), r"data\.channels=3, but noise has channels=1"),
        (lambda: noise(tensor=torch.rand(96, 3, 32, 32)), r"noise\[0\] is torch\.float32"),
        (lambda: noise(tensor=torch.zeros(96, 1, 32, 32, dtype=torch.uint8)), r"\(1, 32, 32\)"),
        (lambda: noise(1), "noise has 1 image"),
        (lambda: ImageSet("few", torch.arange(3), ("a",), noise().tensor), "3 labels for 96"),
        (lambda: ImageSet("a", torch.arange(96), ("b",), noise().tensor), "label 95 and 1 classes"),
    ],
)
def test_images_that_cannot_be_right_are_refused_before_anything_is_written(
    images, words, tmp_path
):
    with pytest.raises(InputError, match=words):
        pretrain(tiny(), tmp_path / "run", images=images())
    assert not (tmp_path / "run").exists()


def test_a_reader_of_ones_own_may_refuse_an_image(tmp_path):
    def read(name, channels, max_pixels):
        if name == "7":
            raise UnreadableImage("7: lost")
        return torch.full((channels, 32, 32), int(name), dtype=torch.uint8)

    images = ImageSet("mine", None, None, files=tuple(map(str, range(96))), read=read)
    assert images.image(5).unique().tolist() == [5]
    assert images.name_of(5) == "5"
    config = tiny(data={"workers": 0}, train={"epochs": 1})
    run = pretrain(config, tmp_path / "run", images=images)
    result = json.loads((run.results / "pretrain.json").read_text())
    assert result["unreadable"] == ["7: lost"]
