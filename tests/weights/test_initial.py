"""Training that starts from weights: files, runs, imported runs; the key equals the query."""

import dataclasses
import re

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import ranks
from foreign_files import lived_in, moco_file
from hardmix.commands import main as cli
from hardmix.errors import InputError
from hardmix.models.backbones import build_backbone
from hardmix.runs.folder import Run
from hardmix.runtime.signals import StopRequest
from hardmix.training.pretrain import pretrain
from hardmix.training.setup import Own, prepare
from hardmix.weights.foreign import adapt_statistics, import_weights

pytestmark = pytest.mark.slow

TIMM = "timm:tf_efficientnet_lite0"


def prepared(tmp_path, name="run", **model):
    config = ranks.tiny(model=model)
    return prepare(config, Run(tmp_path / name), Own(), StopRequest())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    run = pretrain(ranks.tiny(train={"epochs": 1}), tmp_path_factory.mktemp("runs") / "first")
    return run, load_file(run.encoder_file)


@pytest.mark.parametrize("what", ["run", "file"])
def test_query_and_key_start_with_the_weights_and_the_head_is_new(what, trained, tmp_path):
    run, weights = trained
    training = prepared(tmp_path, init=str(run.path if what == "run" else run.encoder_file))
    pair = training.method.pair
    for encoder in (pair.query, pair.key):
        state = encoder.trunk.state_dict()
        assert all(torch.equal(state[name], value) for name, value in weights.items())
    fresh = prepared(tmp_path, "other").method.pair
    assert torch.equal(pair.query.head[0].weight, pair.key.head[0].weight)
    assert pair.query.head[0].weight.shape == fresh.query.head[0].weight.shape


def test_the_trunk_learns_at_a_tenth_of_the_rate_unless_told(trained, tmp_path):
    run, _ = trained
    training = prepared(tmp_path, init=str(run.path))
    head, trunk = training.optimizer.param_groups
    assert trunk["lr_factor"] == 0.1
    assert {id(each) for each in trunk["params"]} == {
        id(each) for each in training.method.trunk.parameters()
    }
    assert len(head["params"]) + len(trunk["params"]) == len(
        list(training.method.pair.query.parameters())
    )
    config = ranks.tiny(model={"init": str(run.path)}, optimizer={"trunk_lr": 1.0})
    training = prepare(config, Run(tmp_path / "whole"), Own(), StopRequest())
    assert len(training.optimizer.param_groups) == 1


def test_a_resumed_run_does_not_need_the_file_again(trained, tmp_path):
    run, weights = trained
    file = tmp_path / "copy.safetensors"
    file.write_bytes(run.encoder_file.read_bytes())
    config = ranks.tiny(model={"init": str(file)}, train={"stop_epoch": 1})
    pretrain(config, tmp_path / "run")
    file.unlink()
    again = ranks.tiny(model={"init": str(file)})
    straight = ranks.tiny(model={"init": str(run.encoder_file)})
    resumed = pretrain(again, tmp_path / "run", resume=True)
    unbroken = pretrain(straight, tmp_path / "straight")
    ours, theirs = load_file(resumed.encoder_file), load_file(unbroken.encoder_file)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert not torch.equal(ours["conv1.weight"], weights["conv1.weight"])


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"init": "FILE", "backbone": "resnet18"}, "set model.backbone to small"),
        ({"init": "/nowhere/weights.pth"}, "cannot be read"),
        ({"init": "timm"}, "it needs timm:NAME"),
        ({"init": "torchvision"}, "it needs one of resnet18"),
    ],
)
def test_what_does_not_fit_is_said_before_any_work(model, words, trained, tmp_path):
    run, _ = trained
    model = {k: str(run.encoder_file) if v == "FILE" else v for k, v in model.items()}
    with pytest.raises(InputError, match=words):
        prepared(tmp_path, **model)
    assert not (tmp_path / "run").exists()


def flat_names(state: dict) -> dict:
    """Return a transcription of EfficientNet-PyTorch's names, the other way round."""
    places = list(dict.fromkeys(re.findall(r"blocks\.(\d+\.\d+)\.", " ".join(state))))
    around = {"conv_stem": "_conv_stem", "bn1": "_bn0", "conv_head": "_conv_head", "bn2": "_bn1"}
    plain = ["_depthwise_conv", "_bn1", "_project_conv", "_bn2"]
    timm_plain = ["conv_dw", "bn1", "conv_pw", "bn2"]
    timm_whole = ["conv_pw", "bn1", "conv_dw", "bn2", "conv_pwl", "bn3"]
    found = {}
    for name, value in state.items():
        block = re.fullmatch(r"blocks\.(\d+\.\d+)\.(\w+)\.(\w+)", name)
        if block is None:
            layer, _, rest = name.partition(".")
            found[f"{around[layer]}.{rest}"] = value
            continue
        place, layer, rest = block.groups()
        whole = f"blocks.{place}.conv_pwl.weight" in state
        names = dict(
            zip(timm_whole, ["_expand_conv", "_bn0", *plain], strict=True)
            if whole
            else zip(timm_plain, plain, strict=True)
        )
        found[f"_blocks.{places.index(place)}.{names[layer]}.{rest}"] = value
    return found


def test_efficientnets_with_the_names_of_efficientnet_pytorch(tmp_path):
    trunk = lived_in(build_backbone(TIMM).trunk)
    classifier = {"_fc.weight": torch.zeros(5, 1280), "_fc.bias": torch.zeros(5)}
    save_file(flat_names(trunk.state_dict()) | classifier, tmp_path / "lite0.safetensors")
    run = import_weights(tmp_path / "lite0.safetensors", tmp_path / "run", image_size=64)
    assert run.config().model.backbone == TIMM
    adapt_statistics(trunk, TIMM, 3, 64)
    taken = load_file(run.encoder_file)
    assert all(torch.equal(taken[name], value) for name, value in trunk.state_dict().items())


@torch.no_grad()
def test_features_of_timms_weights_are_those_of_timms_pixels(capfd):
    torch.manual_seed(0)
    trunk = lived_in(build_backbone(TIMM).trunk)
    pixels = torch.rand(2, 3, 96, 96)
    wanted = trunk((pixels - 0.5) / 0.5)
    adapt_statistics(trunk, TIMM, 3, 96)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    found = trunk((pixels - mean[:, None, None]) / std[:, None, None])
    assert float((found - wanted).norm() / wanted.norm()) < 0.05
    assert "first layer was adapted" in capfd.readouterr().out


def test_pretraining_goes_on_from_an_imported_moco_checkpoint(tmp_path):
    query = moco_file(tmp_path / "moco.pth", dim=16, keys=64)
    run = import_weights(tmp_path / "moco.pth", tmp_path / "run", image_size=32)
    config = run.config()
    data = dataclasses.replace(config.data, name="shapes", num_images=64)
    train = dataclasses.replace(config.train, batch_size=16)
    config = dataclasses.replace(config, data=data, train=train)
    training = prepare(config, run, Own(), StopRequest())
    pair, saved = training.method.pair, query.state_dict()
    written = torch.load(tmp_path / "moco.pth", weights_only=True)["state_dict"]
    keys = {name.removeprefix("module.encoder_k."): each for name, each in written.items()}
    for encoder, state in ((pair.query, saved), (pair.key, keys)):
        assert torch.equal(encoder.trunk.conv1.weight, state["conv1.weight"])
        assert torch.equal(encoder.trunk.bn1.running_mean, state["bn1.running_mean"])
        assert torch.equal(encoder.head[0].weight, state["fc.0.weight"])
    assert not torch.equal(saved["conv1.weight"], keys["conv1.weight"])
    kept = load_file(run.path / "imported.safetensors")["queue"]
    assert torch.allclose(
        training.method.memory.keys, torch.nn.functional.normalize(kept, dim=1), atol=1e-6
    )


def test_resume_of_an_imported_run_trains_it_from_the_command_line(tmp_path, capfd):
    moco_file(tmp_path / "moco.pth", dim=16, keys=64)
    run = import_weights(tmp_path / "moco.pth", tmp_path / "run", image_size=32)
    before = load_file(run.encoder_file)["conv1.weight"]
    images = tmp_path / "images"
    images.mkdir()
    for number in range(32):
        Image.effect_noise((40, 40), 50 + number).convert("RGB").save(images / f"{number}.png")
    words = f"pretrain --out {run.path} --resume --data.root {images} --train.epochs 1"
    with pytest.raises(SystemExit) as end:
        cli.main([*words.split(), "--train.batch-size", "16", "--data.workers", "0"])
    assert end.value.code == 0, capfd.readouterr().err
    assert not torch.equal(load_file(run.encoder_file)["conv1.weight"], before)
    assert "Starting from" in capfd.readouterr().out
