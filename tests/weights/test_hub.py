"""Encoders in folders for the Hugging Face Hub, without the Hub: cached and local folders."""

import json
import shutil
import sys
from dataclasses import replace

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

import hardmix
from fake_runs import VERSIONS, result_of, verdict_of
from hardmix.errors import InputError, UnnamedCodeError
from hardmix.evaluation.features import write_features
from hardmix.evaluation.hub import CARD, WEIGHTS
from hardmix.evaluation.trained_encoder import TrainedEncoder, load_encoder
from hardmix.runs.folder import Run, pack_encoder
from hardmix.settings.config import DataConfig
from hardmix.weights.export import export
from hardmix.weights.foreign import import_weights
from hardmix.weights.hub_folder import wilson
from untrained_runs import CONFIG, make_run

pytestmark = pytest.mark.slow

FILES = {"README.md", "config.json", "model.safetensors", "preprocessor_config.json"}


def make(path, backbone="small") -> Run:
    """A run with a verdict and a k-NN result, of images in a folder that nobody else should see."""
    data = replace(CONFIG.data, name="folder", root="/home/someone/private/cats", num_images=None)
    model = replace(CONFIG.model, backbone=backbone)
    run = make_run(path, replace(CONFIG, data=data, model=model, method="mochi"))
    config = json.loads(run.config_file.read_text())
    knn = result_of(config, 0.6, test=500, train=2000, k=20) | {"data": "cats"}
    pretrain = {"versions": VERSIONS, "run": config}
    run.results.mkdir()
    for name, result in {"knn": knn, "verdict": verdict_of(), "pretrain": pretrain}.items():
        (run.results / f"{name}.json").write_text(json.dumps(result))
    return run


@pytest.fixture
def photos(tmp_path):
    for number in range(6):
        pixels = torch.randint(0, 256, (40, 52, 3), dtype=torch.uint8).numpy()
        file = tmp_path / "photos" / f"{number}.png"
        file.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(file)
    return tmp_path / "photos"


def test_the_folders_encoder_gives_the_features_of_the_run(tmp_path, photos):
    run, folder = make(tmp_path / "run"), tmp_path / "shared"
    export(run.path, "hf", folder)
    assert {file.name for file in folder.iterdir()} == FILES
    data = DataConfig(name="folder", root=str(photos), image_size=32, workers=0)
    out = write_features(run.path, data, tmp_path / "features.safetensors")[0]
    for encoder in (load_encoder(folder), TrainedEncoder.from_pretrained(folder)):
        images = [encoder.preprocess(file) for file in sorted(photos.iterdir())]
        with torch.no_grad():
            ours = encoder(torch.stack(images))
        torch.testing.assert_close(ours, load_file(out)["features"], rtol=1e-6, atol=1e-6)
        assert not encoder.training
    again = import_weights(folder, tmp_path / "again")
    torch.testing.assert_close(
        load_encoder(again.path).state_dict(), load_encoder(run.path).state_dict()
    )


def test_the_card_is_filled_from_the_run_and_names_no_place(tmp_path):
    run, folder = make(tmp_path / "run"), tmp_path / "shared"
    export(run.path, "hf", folder, licence="cc-by-4.0")
    card = (folder / CARD).read_text()
    _, front, body = card.split("---\n", 2)
    facts = yaml.safe_load(front)
    assert facts["library_name"] == "hardmix"
    assert facts["license"] == "cc-by-4.0"
    assert "mochi" in facts["tags"]
    assert "timm" not in facts["tags"]
    assert "timm cannot load it" in body
    assert "| data | 2,000 images of `cats` |" in body
    assert "| k-NN | 60.0 % Top-1 | 55.6 to 64.2 % | k 20, on cats |" in body
    assert "The encoder is worse than the weights it started from." in body
    assert "**not** clearly better" in body
    assert "kalantidis2020hard" in body
    for file in folder.glob("*.[jm]*"):
        assert str(tmp_path) not in file.read_text(errors="replace")
        assert "someone" not in file.read_text(errors="replace")


def test_results_that_are_not_of_this_encoder_are_left_out(tmp_path):
    run = make(tmp_path / "run")
    config = json.loads(run.config_file.read_text())
    config["train"]["epochs"] += 1
    run.config_file.write_text(json.dumps(config))  # resumed since it was evaluated
    export(run.path, "hf", tmp_path / "resumed")
    assert "60.0 %" not in (tmp_path / "resumed" / CARD).read_text()
    imported = import_weights(run.encoder_file, tmp_path / "imported")
    export(imported.path, "hf", tmp_path / "of-imported")
    assert "did not train them" in (tmp_path / "of-imported" / CARD).read_text()
    export(run.encoder_file, "hf", tmp_path / "of-file")
    card = (tmp_path / "of-file" / CARD).read_text()
    assert "The run is not at hand" in card
    assert "None is stated yet" in card


def test_wilsons_interval_is_that_of_the_tables():
    assert wilson(0.5, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert wilson(1.0, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)


@pytest.mark.parametrize(("backbone", "channels"), [("resnet18", 3), ("timm:resnet10t", 5)])
def test_timm_loads_the_folder(backbone, channels, tmp_path):
    timm = pytest.importorskip("timm", reason="pip install 'hardmix[timm]'")
    data = replace(CONFIG.data, channels=channels)
    config = replace(CONFIG, model=replace(CONFIG.model, backbone=backbone), data=data)
    folder = tmp_path / "shared"
    export(make_run(tmp_path / "run", config).path, "hf", folder)
    assert "timm.create_model" in (folder / CARD).read_text()
    model, encoder = (
        timm.create_model(f"local-dir:{folder}", pretrained=True).eval(),
        load_encoder(folder),
    )
    images = torch.randn(2, channels, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(model(images), encoder(images), rtol=1e-6, atol=1e-6)
    resize = timm.data.create_transform(**timm.data.resolve_model_data_config(model)).transforms[0]
    assert resize.size == 37  # as evaluation_crop does for 32 pixels


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A cache of huggingface_hub with the folder owner/name, and no network."""
    constants = pytest.importorskip("huggingface_hub").constants
    export(make(tmp_path / "run").path, "hf", tmp_path / "shared")
    cached = tmp_path / "cache" / "models--owner--name"
    commit = "a" * 40
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    (cached / "blobs").mkdir()
    (cached / "snapshots" / commit).mkdir(parents=True)
    for file in (tmp_path / "shared").iterdir():  # as the cache keeps them: links to blobs
        shutil.copy(file, cached / "blobs" / file.name)
        (cached / "snapshots" / commit / file.name).symlink_to(f"../../blobs/{file.name}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def test_an_encoder_on_the_hub_is_loaded_by_its_name(hub):
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        ours = load_encoder(hub / "run")(images)
        for name in ("hf:owner/name", f"hf:owner/name@{'a' * 40}"):
            assert torch.equal(hardmix.load_encoder(name)(images), ours)
        again = TrainedEncoder.from_pretrained(
            "owner/name", cache_dir=hub / "cache", local_files_only=True
        )
        assert torch.equal(again(images), ours)
    for name, reason in {
        "hf:owner/other": "could not be downloaded",
        "hf:name": "must have the form hf:owner/name",
    }.items():
        with pytest.raises(InputError, match=reason):
            load_encoder(name)


def test_a_folder_is_uploaded_as_it_is(hub, monkeypatch):
    import huggingface_hub

    sent = {}

    class Api:
        def __init__(self, token):
            sent["token"] = token

        def create_repo(self, repo_id, private, exist_ok):
            sent["private"] = private
            return huggingface_hub.RepoUrl(f"https://huggingface.co/{repo_id}")

        def upload_folder(self, repo_id, folder_path, commit_message):
            sent.update(name=repo_id, files={file.name for file in folder_path.iterdir()})
            return "an address"

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    encoder = load_encoder(hub / "shared")
    assert encoder.push_to_hub("owner/name", private=True, token="secret") == "an address"
    assert sent == {"token": "secret", "private": True, "name": "owner/name", "files": FILES}
    with pytest.raises(InputError, match=r"hardmix export RUN --format hf --out DIR"):
        load_encoder(hub / "run").push_to_hub("owner/name")


def test_no_code_that_a_shared_folder_names_is_run(tmp_path):
    folder = tmp_path / "shared"
    run = make(tmp_path / "run")
    export(run.path, "hf", folder)
    trunk = load_encoder(run.path).trunk
    named = replace(run.config(), model=replace(CONFIG.model, backbone="evil_module:make_net"))
    (folder / WEIGHTS).write_bytes(pack_encoder(trunk, named))
    with pytest.raises(UnnamedCodeError, match="evil_module:make_net"):
        load_encoder(folder)
    assert "evil_module" not in sys.modules
    assert load_encoder(folder, trunk=trunk).backbone == "evil_module:make_net"


def test_wrong_requests_are_one_sentence(tmp_path, monkeypatch):
    run = make(tmp_path / "run")
    with pytest.raises(InputError, match="licence needs the format hf"):
        export(run.path, "onnx", tmp_path / "a.onnx", licence="mit")
    with pytest.raises(InputError, match="already exists"):
        export(run.path, "hf", run.path)
    (tmp_path / "empty").mkdir()
    export(run.path, "hf", tmp_path / "empty")
    with pytest.raises(InputError, match=r"checkpoint=1 .*name the folder of a run"):
        load_encoder(tmp_path / "empty", checkpoint="1")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InputError, match=r"pip install 'hardmix\[hf\]'"):
        load_encoder("hf:owner/name")
