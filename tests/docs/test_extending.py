"""docs/extending.md: its code runs, its changes work in a copy of the package, its list is true."""

import dataclasses
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file

import hardmix
from hardmix import QUERY, InputError, hardest_negatives, materialize
from hardmix.commands import main as cli
from hardmix.data.image_files import UnreadableImage
from hardmix.data.image_set import ImageSet
from hardmix.data.sources import has_test, open_images
from hardmix.losses import Embeddings
from hardmix.models.backbones import BACKBONES
from hardmix.runs.folder import Run
from hardmix.runtime.own_code import allowing
from hardmix.settings.config import DataConfig
from hardmix.settings.methods import METHOD_FACTS
from hardmix.settings.named_choices import DataName, OptimizerName
from hardmix.settings.saved import settings
from hardmix.strategies import Candidates, plan_points
from hardmix.training.pretrain import pretrain
from places import ROOT
from ranks import state_of, tiny
from reference import unit

pytestmark = pytest.mark.slow

PAGE = "\n".join(
    (ROOT / "docs" / name).read_text() for name in ("extending.md", "extending-methods.md")
)
SMALL = (ROOT / "tests" / "support" / "small_contributions.diff").read_text()
"""Changes of a few lines that the page describes in a sentence: a strategy, a backbone, a data set
and an optimizer."""

OWN_FILES = re.compile(r"File `(\w+\.py)`[^:]*:\n\n```python\n(.*?)```", re.DOTALL)
NEW_FILES = re.compile(r"New file `(\S+)`:\n\n```python\n(.*?)```", re.DOTALL)


# In a program of one's own


@pytest.fixture
def program(tmp_path, monkeypatch):
    """The page's own files in the folder where its blocks run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    files = OWN_FILES.findall(PAGE)
    for name, text in files:
        Path(name).write_text(text)
    yield
    for name, _ in files:
        sys.modules.pop(name.removesuffix(".py"), None)


@pytest.mark.usefixtures("program")
def test_the_blocks_of_the_page_run_one_after_the_other(capfd):
    others = OWN_FILES.sub("", NEW_FILES.sub("", PAGE))  # new files run in the copy below
    blocks = re.findall(r"```python\n(.*?)```", others, re.DOTALL)
    names: dict[str, object] = {}
    with allowing():  # what the blocks allow stays with them
        for block in blocks:
            exec(compile(block, "docs/extending.md", "exec"), names)
    assert len(blocks) == 10

    strategies_are_what_they_say(names)
    parts_of_the_loss_are_what_they_say(names)
    own_loss = {"loss.weights": "own", "loss.denominator": "own", "loss.filter": "own"}
    for name, own in {
        "evaluated": {},
        "half-mixed": {"mix.strategy": "own"},
        "own-loss": own_loss,
        "my-net": {"model.backbone": "my_net:make_net"},
        "own-trunk": {},
        "stripes": {"data.name": "own"},
        "on-demand": {"data.name": "own"},
        "own-views": {"data.views": "own"},
        "named-views": {"data.views": "my_views:make_views"},
        "logged": {},
    }.items():
        run = Run.open(Path("runs") / name)
        expected = settings(names["config"]) | own
        assert {**settings(run.config()), "data.root": None} == {**expected, "data.root": None}
        assert json.loads(run.status_file.read_text())["state"] == "done"
        assert all(torch.tensor(line.get("loss", 0.0)).isfinite() for line in run.metrics())
    assert names["seen"] == Run.open(Path("runs/logged")).metrics()
    assert any("knn" in line for line in Run.open(Path("runs/stripes")).metrics())
    result = json.loads(Path("runs/evaluated/results/centroids.json").read_text())
    assert result["top1"] == names["accuracy"].top1
    assert names["features"].features.shape == (96, 32)
    assert names["features"].ids.tolist() == list(range(96))
    images = torch.rand(2, 3, 32, 32)
    assert names["encoder"](images).shape == (2, 32)
    opened_by_commands(capfd)


def candidates_of(vectors: Embeddings, **options) -> Candidates:
    counts = {"num_hardest": 8, "num_pairs": 5, "num_with_query": 2}
    similarity = vectors.query @ vectors.negatives.T
    return Candidates(logits=similarity, embeddings=vectors, **counts | options)


def strategies_are_what_they_say(names):
    more = SimpleNamespace(**runpy.run_path(str(ROOT / "examples" / "more_strategies.py")))
    vectors = Embeddings(unit(3, 6), unit(3, 6), unit(20, 6))
    candidates = candidates_of(vectors)
    plan = names["half_mixed"](candidates)
    assert plan.share[:, :5].eq(0.5).all()
    assert not plan.share[:, 5:].eq(0.5).any()

    for progress, number in ((0.0, 20), (0.5, 14), (1.0, 8)):
        at = candidates_of(vectors, num_pairs=2000, progress=torch.tensor(progress))
        plan, hardest = more.narrowing(at), hardest_negatives(at.similarity, number)
        assert [row.unique().tolist() for row in plan.base] == hardest.positions.tolist()

    seeds = [torch.Generator().manual_seed(4) for _ in range(2)]
    straight = plan_points(candidates_of(vectors, generator=seeds[0]))
    plan = more.slerp(candidates_of(vectors, generator=seeds[1]))
    base = vectors.negatives[plan.base]
    partner = torch.where(
        (plan.partner == QUERY).unsqueeze(2),
        vectors.query.unsqueeze(1),
        vectors.negatives[plan.partner.clamp(min=0)],
    )
    angle, t = (base * partner).sum(dim=2, keepdim=True).acos(), straight.share.unsqueeze(2)
    arc = (((1 - t) * angle).sin() * base + (t * angle).sin() * partner) / angle.sin()
    torch.testing.assert_close(materialize(plan, *vectors[:3]), arc)

    plan = more.three_way(candidates)
    for row, hardest in enumerate(candidates.hardest.positions.tolist()):
        assert set(plan.base[row].tolist()) <= set(hardest)
        for point in materialize(plan, *vectors[:3])[row]:
            misfits = []
            for parents in combinations(hardest, 3):
                matrix = vectors.negatives[list(parents)].T
                shares = torch.linalg.lstsq(matrix, point.unsqueeze(1)).solution
                misfit = float((matrix @ shares - point.unsqueeze(1)).norm())
                misfits.append(misfit if (shares > -1e-9).all() else 1.0)
            assert min(misfits) < 1e-9  # a positive mix of three of the hardest
    value = hardmix.MochiLoss(8, 5, 2, strategy=more.three_way)(*vectors[:3])
    assert value.isfinite()


def parts_of_the_loss_are_what_they_say(names):
    vectors = Embeddings(unit(3, 6), unit(3, 6), unit(20, 6))
    similarity, positive = vectors.query @ vectors.negatives.T, (vectors[0] * vectors[1]).sum(dim=1)

    def loss(**parts):
        module = hardmix.MochiLoss(8, 0, 0, temperature=0.5, **parts)
        return module(*vectors[:3], reduction="none")

    ranked = similarity.sort(dim=1, descending=True).values
    weighted = ((ranked / 0.5).exp() / torch.arange(1, 21)).sum(dim=1)
    expected = torch.log1p(weighted / (positive / 0.5).exp())
    torch.testing.assert_close(loss(weights=names["rank_weights"]), expected)
    plain = loss()
    focal = (1 - (-plain).exp()) ** 2 * plain
    torch.testing.assert_close(loss(denominator=names["focal"]), focal)
    similar = vectors.negatives.clone()
    similar[:3] = vectors.query
    among = hardmix.MochiLoss(8, 0, 0, filter_negatives=names["nearly_the_same"])
    outcome, _ = among.contrast(vectors.query, vectors.key, similar)
    assert torch.equal(outcome.exclude, vectors.query @ similar.T > 0.95)
    assert outcome.exclude[:, :3].diagonal().all()


def opened_by_commands(capfd):
    """Check that every command can build a network by name, but not one that is an object."""
    for words in (
        "knn runs/my-net --baseline untrained",
        "linear runs/my-net --seeds 1",
        "finetune runs/my-net --epochs 1 --batch-size 16",
        "features runs/my-net --out features.npy",
        "export runs/my-net --format onnx --out encoder.onnx",
        "pretrain --out runs/my-net --resume --train.epochs 3",
    ):
        named = f"{words} --allow-code my_net:make_net"
        assert status_of(named) == 0, (words, capfd.readouterr().err)
    assert status_of("knn runs/own-trunk") == 2
    assert "model.backbone=mypackage:make_net" in capfd.readouterr().err.replace("\n", " ")


def status_of(words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(words.split())
    return ended.value.code


# As a contribution


def changed_copy(folder: Path) -> Path:
    """Copy the package, with every change of the page and the small ones."""
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for path, text in NEW_FILES.findall(PAGE):
        (folder / path).write_text(text)
    for block in [SMALL, *re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)]:
        for part in re.split(r"^--- ", block, flags=re.MULTILINE)[1:]:
            path, _, hunks = part.partition("\n")
            for hunk in re.split(r"^@@\n", hunks, flags=re.MULTILINE)[1:]:
                change(folder / path, hunk.splitlines())
    return folder / "src"


def change(file: Path, hunk: list[str]) -> None:
    """Lines that begin with a blank or - must be there, once and together; + are new, - go."""
    before = "".join(f"{line[1:]}\n" for line in hunk if line[:1] != "+")
    after = "".join(f"{line[1:]}\n" for line in hunk if line[:1] != "-")
    text = file.read_text()
    assert text.count(before) == 1, f"docs/extending.md: {file.name} has no or many\n{before}"
    file.write_text(text.replace(before, after))


CONTRIBUTED = """
import sys
from typing import get_args
from hardmix.strategies import STRATEGIES
from hardmix.commands import main as cli
from hardmix.settings import named_choices

for words in (["--help"], *(line.split() for line in sys.argv[1:])):
    try:
        cli.main(words)
    except SystemExit as end:
        assert end.code == 0, words
from hardmix.methods.base import method_class
from hardmix.settings.evaluations import EVALUATIONS
from hardmix.settings.methods import METHOD_FACTS
from hardmix.training.optimizers import OPTIMIZERS

assert (*STRATEGIES, "own") == get_args(named_choices.StrategyName)
assert tuple(OPTIMIZERS) == get_args(named_choices.OptimizerName)
for name, facts in METHOD_FACTS.items():
    assert method_class(name).__annotations__.get("options") is facts.options
assert EVALUATIONS["centroids"].title == "Nearest class mean"
"""


@pytest.fixture(scope="module")
def contributed(tmp_path_factory):
    """Runs of the changed package: what it said, and the folder."""
    folder = tmp_path_factory.mktemp("contributed")
    small = (
        " --data.num-images 96 --data.name stripes --model.backbone tiny --optimizer.name nadam"
        " --optimizer.lr 0.01 --train.batch-size 16 --train.queue-size 64 --train.log-every 2"
        " --train.knn-every 1"
    )
    mixing = (
        " --mix.strategy half-mixed --mix.num-hardest 16 --mix.num-pairs 8 --mix.num-with-query 4"
        " --mix.warm-up-epochs 1"
    )
    method = f"pretrain demo --method align-uniform --align-uniform.weight 2 {small}"
    commands = [
        "pretrain --help --method align-uniform",
        f"pretrain demo {small} {mixing} --train.epochs 3 --out run",
        "centroids run --power 1",
        f"{method} --train.epochs 3 --out whole",
        f"{method} --train.epochs 3 --train.stop-epoch 1 --out parts",
        "pretrain --out parts --resume --train.stop-epoch 3",
        "knn whole",
        "centroids whole",
        "report run whole --out report.html",
    ]
    done = subprocess.run(
        [sys.executable, "-c", CONTRIBUTED, *commands],
        cwd=folder,
        env=os.environ
        | {"PYTHONPATH": str(changed_copy(folder)), "OMP_NUM_THREADS": "1", "COLUMNS": "400"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_the_changes_of_the_page_give_new_names(contributed):
    folder, said = contributed
    assert "centroids    Accuracy of the nearest class mean: nothing is trained." in said
    run = Run.open(folder / "run")
    values = json.loads(run.config_file.read_text())
    assert values["mix"]["strategy"] == "half-mixed"
    assert values["data"]["name"] == "stripes"
    assert values["optimizer"]["name"] == "nadam"
    assert load_file(run.encoder_file)["3.weight"].shape == (32, 16, 3, 3)
    mixed = [line for line in run.metrics() if "synthetic_both_false" in line]
    assert mixed
    assert all(line["loss"] > 0 for line in mixed)
    result = json.loads((run.results / "centroids.json").read_text())
    assert (result["test"], result["power"]) == (96, 1.0)
    assert result["top1"] > 0.7  # of two classes
    assert "Nearest class mean" in (folder / "report.html").read_text()


def test_the_method_of_the_page_trains_resumes_and_is_evaluated(contributed):
    folder, said = contributed
    assert "--align-uniform.weight" in said
    assert "--mix.num-hardest" not in said.partition("usage: hardmix pretrain")[2]
    whole = Run.open(folder / "whole")
    assert json.loads(whole.config_file.read_text())["options"] == {"weight": 2.0}
    first, *_, last = (line for line in whole.metrics() if "alignment" in line)
    assert last["loss"] == pytest.approx(last["alignment"] + 2 * last["uniformity"], abs=0.3)
    assert last["loss"] < first["loss"]
    for name in ("knn", "centroids"):
        assert json.loads((whole.results / f"{name}.json").read_text())["top1"] > 0.7
    assert state_of(folder / "whole") == state_of(folder / "parts")
    assert "Align + Uniform" in (folder / "report.html").read_text()


def test_what_the_page_changes_is_not_there_yet():
    names = {*hardmix.strategies.STRATEGIES, *get_args(DataName), *get_args(OptimizerName)}
    names |= {*cli.COMMANDS, *METHOD_FACTS, *BACKBONES}
    assert not {"half-mixed", "stripes", "centroids", "nadam", "align-uniform", "tiny"} & names


# The tree


def test_the_tree_and_the_contract_are_the_real_ones():
    page = "CONTRIBUTING.md"
    blocks = re.findall(r"(?:^    .*\n)+", (ROOT / page).read_text(), re.MULTILINE)
    (tree,) = (block for block in blocks if block.startswith("    settings/"))
    rooms = {file.parent.name for file in (ROOT / "src" / "hardmix").glob("*/__init__.py")}
    assert set(re.findall(r"(\w+)/ ", tree)) == rooms
    assert len(tree.splitlines()) == 11
    (contract,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    shown = "".join(f"    {line}\n" for line in contract["layers"])
    assert shown in blocks, f"{page} must say:\n\n{shown}"


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
    with pytest.raises(InputError, match=r"data\.name=own .* pass them again"):
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
        (lambda: ImageSet("a", torch.arange(96), ("b",), noise().tensor), "label 95 but 1 classes"),
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
