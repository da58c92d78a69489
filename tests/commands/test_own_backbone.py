"""--model.backbone mypackage:make_net: trained by one command, built again by every later one."""

import csv
import os
import subprocess
import sys

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import hardmix
from hardmix.commands import main as cli
from hardmix.errors import InputError
from hardmix.models.backbones import build_backbone, parse_timm
from hardmix.runs.folder import Run

pytestmark = pytest.mark.slow

PACKAGE = {
    "my_package/__init__.py": "from my_package.nets import make_net\n",
    "my_package/nets.py": """
import os
import torch
from torch import nn

def make_net(channels):
    return nn.Sequential(
        nn.Conv2d(channels, 12, 3, stride=4), nn.BatchNorm2d(12), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(3 * 32 * 32, 5))

def no_net():
    return "a net"

def with_maps():
    return nn.Conv2d(3, 4, 3)

def breaks(channels):
    raise ValueError("no weights today")

SIZE = 3
""",
    "broken.py": "import a_module_that_is_not_there\n",
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package in the folder where commands are started."""
    for name, text in PACKAGE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    yield tmp_path
    sys.path[:] = before
    for name in [name for name in sys.modules if name.split(".")[0] in ("my_package", "broken")]:
        del sys.modules[name]


SMALL = "--data.num-images 48 --train.batch-size 16 --train.queue-size 32 --mix.num-hardest 16"
SMALL += " --train.knn-every 0 --train.epochs 1"


def command(capfd, words):
    with pytest.raises(SystemExit) as ended:
        cli.main(words.split())
    shown = capfd.readouterr()
    assert "Traceback" not in shown.err
    return ended.value.code, (shown.out + shown.err).replace("\n", " ")


def test_a_run_with_an_own_network_is_opened_again_by_every_command(package, capfd):
    (package / "images").mkdir()
    for number in range(6):
        Image.new("RGB", (40, 36), (40 * number, 9, 90)).save(package / f"images/{number}.png")
    run = Run(package / "run")
    small = "--data.num-images 48"
    for words in (
        f"pretrain demo --model.backbone my_package:make_net {SMALL} --out run",
        "pretrain --out run --resume --train.epochs 2 --model.backbone my_package:make_net",
        f"knn run --k 5 --baseline untrained {small}",
        f"linear run --seeds 1 {small}",
        "features run --data.root images --data.workers 0 --out features.csv",
        "neighbours run images/3.png --data.root images --data.workers 0 --number 2",
        "export run --format safetensors --out encoder.safetensors",
        "export run --format onnx --out encoder.onnx",
        "analyze run",
        "report run --out report.html",
    ):
        named = "" if words.startswith("pretrain") else " --allow-code my_package:make_net"
        code, shown = command(capfd, words + named)
        assert code == 0, (words, shown)
    assert run.config().model.backbone == "my_package:make_net"
    assert {"knn.json", "linear-cached.json"} <= {file.name for file in run.results.iterdir()}
    with (package / "features.csv").open() as file:
        assert len(next(iter(list(csv.reader(file))[1:]))) == 3 + 12  # name, label, class
    name = "my_package:make_net"
    encoder = hardmix.load_encoder(package / "encoder.safetensors", backbone=name)
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(encoder(images), hardmix.load_encoder(run.path, backbone=name)(images))
    assert (run.figures / "gallery.json").exists()  # which restores the whole method
    assert "my_package:make_net" in (package / "report.html").read_text()


def test_the_package_may_be_anywhere_on_the_path(package, tmp_path):
    """The installed command finds the function from another folder with PYTHONPATH, not without."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    start = [sys.executable, "-c", "import sys; from hardmix.commands.main import main; main()"]
    words = f"pretrain demo --model.backbone my_package.nets:Net {SMALL} --out run".split()
    known = [*os.environ.get("PYTHONPATH", "").split(os.pathsep), str(package)]
    path = os.pathsep.join(filter(None, known))
    ended = subprocess.run(
        [*start, *words],
        cwd=elsewhere,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    assert set(load_file(elsewhere / "run/encoder.safetensors")) == {"1.weight", "1.bias"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_package:make_net", ["no_such_package cannot be imported", "ModuleNotFoundError"]),
        ("broken:make_net", ["broken cannot be imported", "a_module_that_is_not_there"]),
        ("my_package:make_nets", ["defines no function 'make_nets'", "make_net"]),
        ("my_package.nets:SIZE", ["defines no function 'SIZE'", "make_net, no_net"]),
        ("my_package.nets:no_net", ["returns a str", "torch.nn.Module"]),
        ("my_package.nets:with_maps", ["Conv2d turns 2 images into (2, 4, 30, 30)", "(2, width)"]),
        ("my_package.nets:breaks", ["breaks failed with ValueError: no weights today"]),
        ("os:getcwd", ["standard library"]),
        ("my_package.nets:torch", ["defines no function 'torch'"]),
    ],
)
def test_what_is_no_network_is_one_sentence_and_status_2(name, words, package, capfd):
    code, shown = command(capfd, f"pretrain demo --model.backbone {name} {SMALL} --out run")
    assert code == 2
    assert all(word in shown for word in words), shown
    assert not (package / "run").exists()


def test_a_run_whose_package_is_gone_says_so(package, capfd):
    code, _ = command(
        capfd, f"pretrain demo --model.backbone my_package:make_net {SMALL} --out run"
    )
    assert code == 0
    for name in [name for name in sys.modules if name.split(".")[0] == "my_package"]:
        del sys.modules[name]
    (package / "my_package").rename(package / "moved")
    for words in ("knn run", "export run --format safetensors --out e.safetensors"):
        code, shown = command(capfd, f"{words} --allow-code my_package:make_net")
        assert code == 2
        assert "model.backbone='my_package:make_net': my_package cannot be imported" in shown
        assert "start the command in the folder of my_package" in shown


# Networks of timm with options


@pytest.fixture
def timm():
    return pytest.importorskip("timm", reason="timm is not installed: pip install 'hardmix[timm]'")


def test_options_of_timm_are_read_as_python_values():
    name, options = parse_timm("timm:vit_tiny_patch16_224?img_size=96&drop_rate=0.1&act_layer=gelu")
    assert name == "vit_tiny_patch16_224"
    assert options == {"img_size": 96, "drop_rate": 0.1, "act_layer": "gelu"}
    assert parse_timm("timm:resnet10t") == ("resnet10t", {})


def test_a_network_of_timm_takes_its_options(timm):
    trunk, width = build_backbone("timm:test_vit?img_size=32&num_heads=4", image_size=32)
    assert trunk(torch.rand(2, 3, 32, 32)).shape == (2, width)
    assert trunk.patch_embed.img_size == (32, 32)
    assert trunk.blocks[0].attn.num_heads == 4
    with pytest.raises(InputError, match=r"fails on images of shape \(2, 3, 64, 64\)"):
        build_backbone("timm:vit_tiny_patch16_224?img_size=32", image_size=64)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("wheels=4", ["does not accept these options", "wheels"]),
        ("num_classes=10", ["num_classes cannot be set", "classifier is removed"]),
        ("in_chans=1", ["in_chans cannot be set", "data.channels"]),
        ("pretrained=True", ["pretrained cannot be set", "hardmix import"]),
        ("img_size", ["img_size needs a value"]),
        ("img_size=wide", ["does not accept these options"]),
    ],
)
def test_wrong_options_of_timm_are_refused_in_words(timm, options, words):
    with pytest.raises(InputError) as refusal:
        build_backbone(f"timm:test_vit?{options}", image_size=32)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def test_a_run_with_options_of_timm_is_opened_again(timm, package, capfd):
    name = "timm:test_vit?img_size=32"
    for words in (
        f"pretrain demo --model.backbone {name} {SMALL} --out run",
        "knn run --k 5 --data.num-images 48",
        "export run --format timm --out encoder.safetensors",
    ):
        code, shown = command(capfd, words)
        assert code == 0, (words, shown)
    assert 'timm.create_model("test_vit", img_size=32, num_classes=0)' in shown
    model = timm.create_model("test_vit", img_size=32, num_classes=0)
    model.load_state_dict(load_file(package / "encoder.safetensors"))
