"""A run, config or encoder of somebody else never makes a command execute what it names."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import hardmix
from hardmix.commands import main as cli
from hardmix.errors import InputError
from hardmix.models.backbones import build_backbone
from hardmix.report.watch import LiveGallery, LivePage
from hardmix.runs.checkpoints import pack, write_checkpoint
from hardmix.runs.folder import Run
from hardmix.runtime.own_code import allowing
from hardmix.settings.recipes import RECIPES
from hardmix.settings.saved import to_json, with_settings

NAME = "downloaded.code:make"
CODE = """
import pathlib
pathlib.Path({marker!r}).write_text("executed")
from torch import nn

def make(channels=3):
    pathlib.Path({marker!r}).write_text("executed")
    return nn.Sequential(nn.Conv2d(channels, 8, 3, stride=4), nn.AdaptiveAvgPool2d(1), nn.Flatten())

def views(image_size=32):
    pathlib.Path({marker!r}).write_text("executed")
    return lambda image: image
"""
SMALL = {
    "data.num_images": 32,
    "train.batch_size": 16,
    "train.queue_size": 32,
    "mix.num_hardest": 16,
    "train.epochs": 1,
    "train.knn_every": 0,
}


def network(channels: int = 3) -> nn.Module:
    layers = nn.Conv2d(channels, 8, 3, stride=4), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers)


def config_naming(name: str = NAME, **changes: object):
    config = with_settings(RECIPES["demo"].build("mochi", False), SMALL)
    return with_settings(config, {"model.backbone": name, **changes})


@pytest.fixture
def marker(tmp_path, monkeypatch) -> Path:
    """The file that exists once a stranger's code has run; commands start beside their run."""
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    yield tmp_path / "executed"
    sys.path[:] = before
    for name in [each for each in sys.modules if each.split(".")[0] == "downloaded"]:
        del sys.modules[name]


@pytest.fixture
def stranger(tmp_path, marker) -> Path:
    """A finished run whose files all ask for the code that lies among them."""
    run = Run.create(tmp_path / "downloaded", config_naming())
    (run.path / "code.py").write_text(CODE.format(marker=str(marker)))
    run.write_encoder(network(), config_naming())
    (run.path / "metrics.jsonl").write_text('{"step": 1, "epoch": 0, "loss": 2.0}\n')
    images = tmp_path / "images"
    images.mkdir()
    for number in range(4):
        Image.new("RGB", (40, 36), (40 * number, 9, 90)).save(images / f"{number}.png")
    return run.path


def command(capfd, *words: str) -> tuple[object, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(words))
    shown = capfd.readouterr()
    assert "Traceback" not in shown.err
    return ended.value.code, (shown.out + shown.err).replace("\n", " ")


COMMANDS = [
    "report downloaded",
    "knn downloaded --k 5",
    "linear downloaded --seeds 1",
    "finetune downloaded",
    "detect downloaded --task voc --data.root images",
    "features downloaded --data.root images --out features.csv",
    "explore downloaded",
    "explore downloaded --data.root images",
    "neighbours downloaded images/1.png --data.root images",
    "analyze downloaded",
    "watch downloaded --port 0",
    "export downloaded --format onnx --out encoder.onnx",
    "import downloaded/encoder.safetensors --out imported",
    "pretrain --out downloaded --resume --train.epochs 2",
    "pretrain --out downloaded --resume auto --train.epochs 2",
    "pretrain --config downloaded/config.json --out other",
    "pretrain demo --model.init downloaded --out other",
    "pretrain demo --model.init downloaded/encoder.safetensors --out other",
]


@pytest.mark.parametrize("words", COMMANDS)
def test_no_command_runs_the_code_that_a_run_names(words, stranger, marker, capfd):
    code, shown = command(capfd, *words.split())
    assert not marker.exists()
    assert code == 2, shown
    if "--model.init" not in words:  # there the backbone differs, which is said first
        assert f"asks for model.backbone='{NAME}'" in shown
        assert f"run hardmix {words} --allow-code {NAME}." in shown
    assert not Path("other").exists()
    assert "downloaded" not in sys.modules


def test_an_unfinished_run_runs_no_code_either(stranger, marker, capfd):
    """Its encoder is in a checkpoint, whose config names the code."""
    run = Run(stranger)
    tensors = {f"objective.trunk.{name}": each for name, each in network().state_dict().items()}
    write_checkpoint(run.checkpoints, 1, pack(tensors), {"trunk": "trunk"}, {})
    run.encoder_file.unlink()
    for words in ("report downloaded", "knn downloaded", "explore downloaded"):
        code, shown = command(capfd, *words.split())
        assert (code, marker.exists()) == (2, False), shown
        assert f"--allow-code {NAME}" in shown


@pytest.mark.parametrize(
    "name", ["_pytest.config:main", "torch.distributed.run:main", "downloaded.code:make", "os:exit"]
)
def test_load_encoder_imports_nothing_that_a_file_names(name, tmp_path, marker):
    run = Run.create(tmp_path / "downloaded", config_naming(name))
    (run.path / "code.py").write_text(CODE.format(marker=str(marker)))
    (run.path / "conftest.py").write_text(CODE.format(marker=str(marker)))
    run.write_encoder(network(), config_naming(name))
    for place in (run.path, run.encoder_file):
        with pytest.raises(InputError, match=rf"asks for model\.backbone='{name}'"):
            hardmix.load_encoder(place)
    assert not marker.exists()
    assert str(Path.cwd()) not in sys.path


def test_what_the_user_names_is_run(stranger, marker, capfd):
    assert hardmix.load_encoder(stranger, backbone=network).backbone == NAME
    assert not marker.exists()
    hardmix.load_encoder(stranger, backbone=NAME)
    assert marker.exists()
    with pytest.raises(InputError, match="asks for"):  # only in the call that names it
        hardmix.load_encoder(stranger)
    with allowing():
        hardmix.allow_code(NAME)
        hardmix.load_encoder(stranger)
    for option in ("--allow-code", "--backbone"):
        marker.unlink()
        out = f"imported{option}"
        words = ["import", "downloaded/encoder.safetensors", "--out", out, option, NAME]
        assert command(capfd, *words)[0] == 0
        assert marker.exists()
    joined = f"--allow-code={NAME}"
    assert command(capfd, "export", "downloaded", "--format", "safetensors", "--out", "e", joined)


def test_the_function_of_another_name_is_not_run(stranger, marker, capfd):
    for words in (
        ("--allow-code", "downloaded.code:views"),
        ("--allow-code", "downloaded.code"),
        ("--allow-code", "other:make"),
        ("--data.root", NAME),  # a folder that is called like the function
    ):
        code, _ = command(capfd, "knn", "downloaded", *words)
        assert (code, marker.exists()) == (2, False)
    Path(NAME).mkdir()  # nor one called like the run
    stranger.rename(Path(NAME) / "downloaded")
    code, _ = command(capfd, "knn", f"{NAME}/downloaded")
    assert (code, marker.exists()) == (2, False)
    assert "needs a name" in command(capfd, "knn", "downloaded", "--allow-code")[1]


def test_views_that_a_config_names_are_not_made(stranger, marker, capfd):
    config = config_naming("small", **{"data.views": "downloaded.code:views"})
    Path("stranger.json").write_bytes(to_json(config))
    code, shown = command(capfd, "pretrain", "--config", "stranger.json", "--out", "other")
    assert (code, marker.exists()) == (2, False)
    assert "stranger.json asks for data.views='downloaded.code:views'" in shown
    assert "--out other --allow-code downloaded.code:views." in shown


ROOTS = [
    "pipe:touch executed; cat a.tar",
    "a.tar::pipe:touch executed #.gz",
    "{pipe:touch executed #,b}.tar.gz",
    "{/a,pipe:touch executed #}/b.tar.gz",
    "https://127.0.0.1:1/';touch executed;'.tar",
    "s3://a/$(touch executed).tar",
]


@pytest.mark.parametrize("root", ROOTS)
def test_no_command_that_a_config_names_is_run(root, marker, capfd):
    pytest.importorskip("webdataset")
    config = config_naming("small", **{"data.root": root, "data.name": "shards"})
    Path("stranger.json").write_bytes(to_json(config))
    for words in ("--config stranger.json --out other", "--out downloaded --resume"):
        if "downloaded" in words:
            Run.create("downloaded", config)
        code, shown = command(capfd, "pretrain", *words.split())
        assert (code, marker.exists()) == (2, False), shown
        assert "asks for data.root=" in shown


def test_a_command_that_the_user_types_is_run(marker, capfd):
    pytest.importorskip("webdataset")
    root = "pipe:touch executed; cat a.tar"
    config = config_naming("small", **{"data.root": root, "data.name": "shards"})
    Path("own.json").write_bytes(to_json(config))
    for option in ("--allow-code", "--data.root"):
        marker.unlink(missing_ok=True)
        words = ["pretrain", "--config", "own.json", "--out", f"run{option}", option, root]
        assert command(capfd, *words)[0] == 2  # there is no a.tar
        assert marker.exists()


GRID = """
recipe = "demo"
[settings.model]
backbone = "downloaded.code:make"
[[row]]
id = "a"
method = "moco-v2"
"""


def test_a_grid_runs_no_code_unless_it_is_named(stranger, marker, capfd):
    Path("grid.toml").write_text(GRID)
    words = ["sweep", "grid.toml", "--out", "sweep", "--seeds", "1"]
    code, shown = command(capfd, *words)
    assert (code, marker.exists(), Path("sweep").exists()) == (2, False, False)
    assert f"grid.toml asks for model.backbone='{NAME}'" in shown
    for how in ("--collect", "--dry-run"):
        assert command(capfd, *words, how)[0] in (0, 2)
        assert not marker.exists()
    assert command(capfd, *words, "--job-only", "--allow-code", NAME)[0] == 0
    assert f"--allow-code {NAME}" in Path("sweep/job.sh").read_text()


@pytest.fixture
def inside(tmp_path, marker, monkeypatch) -> Path:
    """A run in the current folder, with files named as modules that hardmix and others import."""
    config = config_naming("small")
    run = Run.create(tmp_path / "run", config)
    run.write_encoder(build_backbone("small").trunk, config)
    run.checkpoints.mkdir()
    (run.checkpoints / "step-1.json").write_text("{}")
    code = f"import pathlib; pathlib.Path({str(marker)!r}).write_text(__file__)\n"
    for name in ("hardmix", "torch", "sitecustomize", "timm", "webdataset", "matplotlib", "json"):
        (run.path / f"{name}.py").write_text(code)
    monkeypatch.chdir(run.path)
    return run.path


@pytest.mark.parametrize("words", ["report .", "knn . --k 5"])
def test_a_module_in_the_current_folder_is_not_imported(words, inside, marker):
    program = Path(sys.executable).with_name("hardmix")
    ended = subprocess.run([program, *words.split()], capture_output=True, text=True)
    assert "Traceback" not in ended.stderr
    assert not marker.exists(), marker.read_text()


def test_the_children_of_watch_import_nothing_from_the_current_folder(inside, marker):
    gallery = LiveGallery(Path("."))
    gallery.follow()
    gallery._process.wait()
    assert not marker.exists(), marker.read_text()
    assert LivePage(Path(".")).content().status == 200
    assert not marker.exists(), marker.read_text()


def test_encoders_of_odd_sizes_are_one_sentence(tmp_path):
    facts = {"format": "hardmix-encoder-1", "backbone": "small"}
    for odd in ({}, {"channels": "3"}, {"channels": "x", "image_size": "32"}):
        file = tmp_path / "encoder.safetensors"
        save_file({"a": torch.zeros(1)}, file, facts | odd)
        with pytest.raises(InputError, match="must name its backbone"):
            hardmix.load_encoder(file)
    save_file({"a": torch.zeros(1)}, file, facts | {"channels": "3", "image_size": str(2**31)})
    with pytest.raises(InputError, match="8 to 4096 pixels"):
        hardmix.load_encoder(file)


def test_a_message_of_the_library_names_the_function_that_allows_it(stranger):
    with pytest.raises(InputError, match=r"call hardmix\.allow_code\('downloaded\.code:make'\)"):
        hardmix.pretrain(Run(stranger).config(), "other")
