"""Weights of other programs become runs; bad files are refused, and none of their code runs."""

import argparse
import os
import warnings
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from foreign_files import lived_in, moco_file, prefixed, resnet
from hardmix.data.colours import channel_statistics, normalise
from hardmix.errors import InputError
from hardmix.evaluation.trained_encoder import load_encoder
from hardmix.models.backbones import BACKBONES, build_backbone
from hardmix.runs.folder import Run
from hardmix.runs.weight_files import SavedWeights
from hardmix.settings.config import PretrainConfig
from hardmix.settings.recipes import RECIPES
from hardmix.weights.foreign import import_weights
from hardmix.weights.recognition import recognise

pytestmark = pytest.mark.slow

IMAGES = torch.rand(2, 3, 48, 48, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def features(model: nn.Module, images: torch.Tensor = IMAGES) -> torch.Tensor:
    """Return the features of a torchvision model, without its classifier."""
    model.fc = nn.Identity()
    return model.eval()(images)


def same_features(run: Run, model: nn.Module, images: torch.Tensor = IMAGES) -> bool:
    with torch.no_grad():
        return torch.equal(load_encoder(run.path)(images), features(model, images))


@pytest.mark.parametrize(
    ("name", "head", "method", "zipped"),
    [("resnet50", "mlp", "moco-v2", True), ("resnet18", "linear", "moco-v1", False)],
)
def test_official_moco_with_head_and_queue(name, head, method, zipped, tmp_path, capfd):
    file, out = tmp_path / "moco.pth.tar", tmp_path / "run"
    query = moco_file(file, name, head, zipped=zipped)
    run = import_weights(file, out)
    kept, state = load_file(out / "imported.safetensors"), query.state_dict()
    written = torch.load(file, weights_only=True)["state_dict"]
    heads = {name: value for name, value in state.items() if name.startswith("fc.")}
    key = {name: each for name, each in kept.items() if name.startswith("key.")}
    assert {*kept} - {*key} == {n.replace("fc", "head") for n in heads} | {"queue", "queue_ptr"}
    assert {name.replace("key.trunk.", "").replace("key.head", "fc") for name in key} == {*state}
    assert torch.equal(key["key.trunk.conv1.weight"], written["module.encoder_k.conv1.weight"])
    assert all(torch.equal(kept[n.replace("fc", "head")], value) for n, value in heads.items())
    assert torch.equal(kept["queue"], written["module.queue"].T)
    assert torch.equal(kept["queue_ptr"], torch.tensor([32]))
    config = run.config()
    assert (config.recipe, config.method, config.model.backbone) == ("imported", method, name)
    assert (config.model.head, config.model.dim, config.train.queue_size) == (head, 16, 64)
    assert (config.data.image_size, config.data.augmentation) == (224, method)
    assert same_features(run, query)
    shown = capfd.readouterr().out
    words = ["MoCo, under module.encoder_q.", "64 keys", f"{head}, 16 dimensions", "200"]
    words += ["has the head, the queue, the key encoder", f"hardmix detect {out} --task voc"]
    words += [
        f"hardmix linear {out} --data.root DIR --preset imagenet1k",
        f"hardmix knn {out} --data.root DIR",
    ]
    assert all(word in shown for word in words)


def test_a_queue_of_another_dimension_and_an_unknown_head_are_left_out(tmp_path):
    file = tmp_path / "moco.pth.tar"
    moco_file(file)
    content = torch.load(file, weights_only=True)
    content["state_dict"]["module.queue"] = torch.randn(5, 64)
    torch.save(content, file)
    run = import_weights(file, tmp_path / "a")
    assert not {"queue", "queue_ptr"} & load_file(run.path / "imported.safetensors").keys()
    assert run.config().train.queue_size == 65536
    content["state_dict"]["module.encoder_q.fc.3.weight"] = torch.randn(5)
    torch.save(content, file)
    run = import_weights(file, tmp_path / "b")
    assert not (run.path / "imported.safetensors").exists()
    assert (run.config().model.head, run.config().model.dim) == ("mlp", 128)


def lightly(model: nn.Module) -> nn.Module:
    return nn.Sequential(*list(model.children())[:-1])


def old(state: dict) -> dict:
    return {name: v for name, v in state.items() if not name.endswith("num_batches_tracked")}


PROJECTOR = {"0.weight": torch.zeros(3, 3), "1.running_mean": torch.zeros(3)}
LAYOUTS = {
    "torchvision": lambda m: m.state_dict(),
    "without-fc": lambda m: {n: v for n, v in m.state_dict().items() if not n.startswith("fc.")},
    "without-counters": lambda m: old(m.state_dict()),
    "data-parallel": lambda m: prefixed("module.", m.state_dict()),
    "compiled": lambda m: prefixed("_orig_mod.module.", m.state_dict()),
    "moco-lincls": lambda m: {
        "epoch": 100,
        "arch": "resnet18",
        "state_dict": prefixed("module.", m.state_dict()),
        "best_acc1": torch.tensor(60.8),
        "optimizer": {"state": {}, "param_groups": [{"lr": 30.0, "params": [0, 1]}]},
    },
    "swav": lambda m: {
        **prefixed("module.", m.state_dict()),
        **prefixed("module.projection_head.", PROJECTOR),
        "module.prototypes.weight": torch.zeros(3, 3),
    },
    "simsiam": lambda m: {
        "state_dict": {
            **prefixed("module.encoder.", m.state_dict()),
            **prefixed("module.predictor.", PROJECTOR),
        }
    },
    "lightly": lambda m: {
        **prefixed("backbone.", lightly(m).state_dict()),
        **prefixed("backbone_momentum.", lightly(resnet()).state_dict()),
        **prefixed("projection_head.layers.", PROJECTOR),
        **prefixed("projection_head_momentum.layers.", PROJECTOR),
    },
    "lightly-backbone": lambda m: lightly(m).state_dict(),
    "lightly-tutorial": lambda m: {"resnet18_parameters": m.state_dict()},
    "lightning": lambda m: {
        "epoch": 9,
        "global_step": 90,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": {
            **prefixed("model.backbone.", lightly(m).state_dict()),
            **prefixed("model.projection_head.", PROJECTOR),
            "criterion.memory_bank.bank": torch.zeros(3, 3),
        },
        "optimizer_states": [],
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_others_give_the_same_features(layout, tmp_path):
    model = resnet()
    torch.save(LAYOUTS[layout](model), tmp_path / "weights.pth")
    run = import_weights(tmp_path / "weights.pth", tmp_path / "run")
    config = run.config()
    assert isinstance(config, PretrainConfig)
    assert (config.recipe, config.model.backbone) == ("imported", "resnet18")
    assert not (run.path / "imported.safetensors").exists()
    assert same_features(run, model)


def test_lightlys_own_model(tmp_path):
    heads = pytest.importorskip("lightly.models.modules.heads")
    model = resnet()
    whole = nn.Module()
    whole.backbone, whole.projection_head = lightly(model), heads.MoCoProjectionHead(512, 512, 128)
    torch.save(whole.state_dict(), tmp_path / "lightly.ckpt")
    assert same_features(import_weights(tmp_path / "lightly.ckpt", tmp_path / "run"), model)


@pytest.mark.parametrize("name", BACKBONES)
def test_every_architecture_is_told_from_the_others(name, tmp_path):
    channels = 3 if name.startswith("lab-") else 4
    with torch.device("meta"):
        state = build_backbone(name, channels=channels).trunk.state_dict()
    fit = recognise(tmp_path, SavedWeights(prefixed("module.", state), {}, None), None)
    assert (fit.backbone, fit.channels) == (name, channels)


def test_safetensors_and_an_image_size(tmp_path):
    model = resnet()
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    run = import_weights(tmp_path / "weights.safetensors", tmp_path / "run", image_size=96)
    assert same_features(run, model)
    assert run.config().data.image_size == load_encoder(run.path).image_size == 96


def test_safetensors_in_half_precision(tmp_path):
    model = resnet().half()
    save_file(model.state_dict(), tmp_path / "any.bin")
    run = import_weights(tmp_path / "any.bin", tmp_path / "run")
    assert same_features(run, model.float())


def test_channels_come_from_the_file(tmp_path):
    model = resnet()
    model.conv1 = nn.Conv2d(5, 64, 7, stride=2, padding=3, bias=False)
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    run = import_weights(tmp_path / "weights.pth", tmp_path / "run")
    assert run.config().data.channels == 5
    assert same_features(run, model, torch.rand(2, 5, 48, 48))


@pytest.mark.parametrize("backbone", ["small", "resnet18-cifar"])
def test_our_own_encoders_come_back(backbone, tmp_path):
    trunk = lived_in(build_backbone(backbone).trunk)
    torch.save(trunk.state_dict(), tmp_path / "weights.pth")
    first = import_weights(tmp_path / "weights.pth", tmp_path / "a")
    assert first.config().data.image_size == 32
    again = import_weights(tmp_path / "weights.pth", tmp_path / "b", image_size=40)
    last = import_weights(again.encoder_file, tmp_path / "c")
    assert last.config() == again.config()
    assert last.config().data.image_size == 40
    weights = load_file(last.encoder_file)
    assert all(torch.equal(weights[name], value) for name, value in trunk.state_dict().items())


def test_an_encoder_around_ones_own_network_is_recognised_by_its_names(tmp_path):
    model = resnet()
    facts = {"format": "hardmix-encoder-1", "backbone": "own", "channels": "3"}
    save_file(model.state_dict(), tmp_path / "encoder.safetensors", facts)
    run = import_weights(tmp_path / "encoder.safetensors", tmp_path / "run")
    assert run.config().model.backbone == "resnet18"


@pytest.mark.parametrize("named", [False, True])
def test_timm_resnets(named, tmp_path, capfd):
    timm = pytest.importorskip("timm")
    model = lived_in(timm.create_model("resnet18", num_classes=10))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    backbone = "timm:resnet18" if named else None
    run = import_weights(tmp_path / "model.safetensors", tmp_path / "run", backbone=backbone)
    assert run.config().model.backbone == (backbone or "resnet18")
    assert same_features(run, model)
    assert "warning" not in capfd.readouterr().err


def test_other_models_of_timm_by_name_with_a_word_on_their_normalisation(tmp_path, capfd):
    timm = pytest.importorskip("timm")
    name = "vit_tiny_patch16_224"
    model = timm.create_model(name, num_classes=10).eval()
    file = tmp_path / "vit.pth"
    torch.save({"state_dict": prefixed("module.", model.state_dict())}, file)
    run = import_weights(file, tmp_path / "run", backbone=f"timm:{name}")
    pixels = torch.rand(2, 3, 224, 224)
    with torch.no_grad():
        theirs = (pixels - 0.5) / 0.5
        wanted = model.forward_head(model.forward_features(theirs), pre_logits=True)
        ours = normalise(pixels.clone(), *channel_statistics(3))
        assert torch.allclose(load_encoder(run.path)(ours), wanted, atol=1e-4)
    assert "its first layer was adapted" in capfd.readouterr().out
    with pytest.raises(InputError, match=r"fails on images of shape \(2, 3, 96, 96\)"):
        import_weights(file, tmp_path / "b", backbone=f"timm:{name}", image_size=96)
    assert not (tmp_path / "b").exists()


def refused(file, tmp_path, **more) -> str:
    """Return the message of the refusal, and check that nothing is written."""
    with pytest.raises(InputError) as caught:
        import_weights(file, tmp_path / "run", **more)
    assert not (tmp_path / "run").exists()
    return str(caught.value)


class Malicious:
    def __init__(self, file) -> None:
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("forced", [True, False])
def test_code_in_a_file_never_runs(zipped, forced, tmp_path, monkeypatch):
    if forced:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    file, harm = tmp_path / "weights.pth", tmp_path / "harm"
    content = {**resnet().state_dict(), "extra": Malicious(harm)}
    torch.save(content, file, _use_new_zipfile_serialization=zipped)
    words = refused(file, tmp_path)
    assert not harm.exists()
    assert "mkdir, but hardmix executes no code from a file" in words
    assert "save_file(" in words


class Script(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def script(file) -> None:
    with warnings.catch_warnings(action="ignore"):
        torch.jit.save(torch.jit.script(Script()), file)


@pytest.mark.parametrize(
    ("write", "needs"),
    [
        (lambda file: torch.save(resnet(), file), "torchvision.models.resnet.ResNet"),
        (lambda file: torch.save({"args": argparse.Namespace()}, file), "argparse.Namespace"),
        (lambda file: torch.save({"best": np.float64(1)}, file), "multiarray.scalar"),
        (script, "TorchScript"),
    ],
)
def test_what_a_file_needs_beyond_tensors_is_named(write, needs, tmp_path):
    write(tmp_path / "weights.pth")
    words = refused(tmp_path / "weights.pth", tmp_path)
    assert f"{needs}, but hardmix executes no code" in words
    assert "safetensors" in words


def cut(file, data: bytes, share: float = 0.5) -> None:
    file.write_bytes(data[: int(len(data) * share)])


def written(tmp_path, save) -> bytes:
    save(tmp_path / "whole")
    return (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize("kind", ["text", "json", "empty", "zip", "legacy", "safetensors", "bytes"])
def test_files_that_are_no_whole_weights_file(kind, tmp_path):
    tensors, file = {"a": torch.randn(999)}, tmp_path / "weights.pth"
    saves = {
        "zip": lambda f: torch.save(tensors, f),
        "legacy": lambda f: torch.save(tensors, f, _use_new_zipfile_serialization=False),
        "safetensors": lambda f: save_file(tensors, f),
    }
    data = {"text": b"hello world, this is text\n", "json": b'{"model":{"a": 1}}', "empty": b""}
    data["bytes"] = bytes(range(256))
    if kind in saves:
        cut(file, written(tmp_path, saves[kind]))
    else:
        file.write_bytes(data[kind])
    words = refused(file, tmp_path)
    assert str(file) in words
    assert "copy or download it again" in words
    assert {"text": "b'hello world", "empty": "it is empty"}.get(kind, "") in words


def test_a_missing_file_and_a_folder(tmp_path):
    assert "nowhere.pth cannot be read: No such file" in refused(tmp_path / "nowhere.pth", tmp_path)
    words = refused(tmp_path, tmp_path)
    assert "cannot be read: Is a directory; use a weights file (.pth" in words


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"epoch": 3, "arch": "resnet18"}, "but the names epoch, arch"),
        ([torch.zeros(3)], "but a list"),
        (torch.zeros(3), "but a Tensor"),
        ({}, "but a dict"),
    ],
)
def test_files_without_named_tensors(content, words, tmp_path):
    torch.save(content, tmp_path / "weights.pth")
    assert f"contains no named tensors, {words}" in refused(tmp_path / "weights.pth", tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("layer3.0.conv1.weight"), "the file lacks 1 (layer3.0.conv1.weight)"),
        (
            lambda s: s.update({"layer1.0.se.fc1.weight": torch.zeros(3)}),
            "the file has unknown 1 (layer1.0.se.fc1.weight)",
        ),
        (
            lambda s: s.update({"conv1.weight": torch.zeros(64, 3, 5, 5)}),
            "has other shapes in 1 (conv1.weight [64, 3, 5, 5] instead of [64, 3, 7, 7])",
        ),
    ],
)
def test_what_fits_no_backbone_is_told_with_the_nearest(change, words, tmp_path):
    state = resnet().state_dict()
    change(state)
    torch.save(prefixed("module.", state), tmp_path / "weights.pth")
    shown = refused(tmp_path / "weights.pth", tmp_path)
    assert "does not fit any backbone of hardmix; the closest is resnet18" in shown
    assert words in shown
    assert "backbone to timm:NAME" in shown


def test_a_named_backbone_that_does_not_fit_or_exist(tmp_path):
    file = tmp_path / "weights.pth"
    torch.save(resnet().state_dict(), file)
    shown = refused(file, tmp_path, backbone="resnet34")
    assert "does not fit backbone=resnet34: of its tensors, the file lacks 80 (layer1.2" in shown
    assert "omit backbone" in shown
    assert "'resnet19' is unknown" in refused(file, tmp_path, backbone="resnet19")


def test_too_many_channels(tmp_path):
    state = resnet().state_dict() | {"conv1.weight": torch.zeros(64, 20, 7, 7)}
    torch.save(state, tmp_path / "weights.pth")
    shown = refused(tmp_path / "weights.pth", tmp_path)
    assert "is a resnet18 for images of 20 channels: hardmix supports 1 to 16" in shown


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite(value, tmp_path):
    state = resnet().state_dict()
    state["layer2.1.bn2.bias"][3] = value
    torch.save(state, tmp_path / "weights.pth")
    shown = refused(tmp_path / "weights.pth", tmp_path)
    assert "the tensor layer2.1.bn2.bias has 1 values that are NaN or infinite" in shown


def test_out_that_holds_a_run_is_not_touched(tmp_path):
    torch.save(resnet().state_dict(), tmp_path / "weights.pth")
    run = import_weights(tmp_path / "weights.pth", tmp_path / "a")
    before = run.encoder_file.read_bytes()
    torch.save(resnet().state_dict(), tmp_path / "weights.pth")
    with pytest.raises(InputError, match=r"out=.*a already has a run.s config.json: choose"):
        import_weights(tmp_path / "weights.pth", tmp_path / "a")
    run.config_file.unlink()
    with pytest.raises(InputError, match=r"already has a run.s encoder.safetensors"):
        import_weights(tmp_path / "weights.pth", tmp_path / "a")
    assert run.encoder_file.read_bytes() == before


def test_out_that_cannot_be_a_folder(tmp_path):
    file = tmp_path / "weights.pth"
    torch.save(resnet().state_dict(), file)
    with pytest.raises(InputError, match=r"out=.* cannot be written: File exists"):
        import_weights(file, file)
    with pytest.raises(InputError, match=r"data.image_size=3 must be"):
        import_weights(file, tmp_path / "run", image_size=3)


def test_names_with_brackets_are_shown_as_they_are(tmp_path, capfd):
    state = resnet().state_dict() | {"fc.[/red]": torch.zeros(1)}
    torch.save(
        {n: v for n, v in state.items() if n not in ("fc.weight", "fc.bias")}, tmp_path / "w"
    )
    import_weights(tmp_path / "w", tmp_path / "run")
    assert "1 (fc.[/red])" in capfd.readouterr().out


def zipped(file, pickle, compression):
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickle)
        archive.writestr("archive/version", b"3")
    return file


LISTS = b"\x80\x02" + b"]" * 2_100_000 + b"."
"""Return a pickle that makes two million lists."""


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (
            lambda file: zipped(file, b"\x80\x02" + b"]" * 50_000_000, zipfile.ZIP_DEFLATED),
            r"has 0\.0 MB and expands to 50\.0 MB",
        ),
        (lambda file: zipped(file, LISTS, zipfile.ZIP_STORED), "more than 2000000 operations"),
        (lambda file: zipped(file, LISTS, zipfile.ZIP_DEFLATED), "more than 2000000 operations"),
        (lambda file: file.write_bytes(LISTS), "more than 2000000 operations"),
    ],
    ids=["compressed", "many", "compressed and many", "legacy"],
)
def test_a_file_that_would_fill_the_memory_is_refused_unread(write, words, tmp_path, monkeypatch):
    write(tmp_path / "weights.pth")

    def read(*_, **__):
        raise AssertionError("it was read")

    monkeypatch.setattr(torch, "load", read)
    with pytest.raises(InputError, match=words):
        import_weights(tmp_path / "weights.pth", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_our_own_encoders_keep_their_method(tmp_path):
    torch.manual_seed(0)
    config = RECIPES["demo"].build("supervised", False)
    run = Run.create(tmp_path / "run", config)
    run.write_encoder(build_backbone("small").trunk, config)
    again = import_weights(run.encoder_file, tmp_path / "again")
    assert again.config().method == "supervised"
