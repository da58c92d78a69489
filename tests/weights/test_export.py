"""Exported encoders: the programs they are for load them and give the same features."""

import ast
import dataclasses
import pickle
import pickletools
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torchvision
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from hardmix.errors import InputError
from hardmix.evaluation.trained_encoder import load_encoder
from hardmix.models.backbones import RESNETS, build_backbone
from hardmix.runs.folder import OWN_TRUNK, Run
from hardmix.settings.config import PretrainConfig
from hardmix.weights import export as exporting
from hardmix.weights.detectron2_files import PLUG_IN_FILE, SHAPES, detectron2_name, side_files
from hardmix.weights.export import FORMATS, export

pytestmark = pytest.mark.slow

SIZE = 64


def make_run(path, backbone="resnet18", channels=3, trunk=None, reduce=False) -> Run:
    """Write a run that was not trained, but whose batch norms have statistics of their own."""
    config = PretrainConfig()
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, channels=channels, image_size=SIZE, reduce=reduce),
        model=dataclasses.replace(config.model, backbone=backbone),
    )
    own = OWN_TRUNK if trunk is not None else None
    trunk = trunk or build_backbone(backbone, channels).trunk
    for layer in trunk.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.running_mean, -0.5, 0.5)
            nn.init.uniform_(layer.running_var, 0.5, 2.0)
            nn.init.uniform_(layer.weight.data, 0.5, 1.5)
            nn.init.uniform_(layer.bias.data, -0.5, 0.5)
            layer.num_batches_tracked.fill_(7)
    run = Run.create(path, config)
    run.write_encoder(trunk, config, own)
    return run


def read_weights(file) -> dict[str, torch.Tensor]:
    return load_file(file) if file.suffix == ".safetensors" else torch.load(file)


def assert_same_features(model, run, channels=3) -> None:
    images = torch.randn(2, channels, SIZE, SIZE)
    with torch.no_grad():
        ours, theirs = load_encoder(run.path)(images), model.eval()(images)
    assert ours.std() > 1e-3
    torch.testing.assert_close(theirs, ours, rtol=1e-6, atol=1e-6)


# safetensors


def test_our_own_format_is_read_back_with_its_facts(tmp_path):
    run = make_run(tmp_path / "run", "small")
    (file,) = export(run.path, "safetensors", tmp_path / "a" / "b" / "encoder.safetensors")
    again = load_encoder(file)
    assert (again.backbone, again.image_size, again.channels) == ("small", SIZE, 3)
    assert_same_features(again, run)
    with safe_open(file, "pt") as opened:
        assert opened.metadata()["method"] == run.config().method


def test_a_file_is_exported_as_its_run(tmp_path):
    run = make_run(tmp_path / "run", "small")
    (copy,) = export(run.encoder_file, "safetensors", tmp_path / "copy.safetensors")
    assert copy.read_bytes() == run.encoder_file.read_bytes()


def test_a_users_own_network_is_exported_with_its_help(tmp_path):
    trunk = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.LazyLinear(4))
    trunk(torch.randn(2, 3, SIZE, SIZE))
    run = make_run(tmp_path / "run", trunk=trunk)
    with pytest.raises(InputError, match="trunk="):
        export(run.path, "safetensors", tmp_path / "a.safetensors")
    export(run.path, "safetensors", tmp_path / "a.safetensors", trunk=trunk)
    with pytest.raises(InputError, match=r"backbone='own'.*safetensors and onnx"):
        export(run.path, "torchvision", tmp_path / "a.pth", trunk=trunk)


# torchvision


@pytest.mark.parametrize("ending", ["pth", "pt", "safetensors"])
def test_torchvisions_model_loads_it_strictly_and_gives_the_same_features(ending, tmp_path, capfd):
    run = make_run(tmp_path / "run")
    (file,) = export(run.path, "torchvision", tmp_path / f"weights.{ending}")
    model = torchvision.models.resnet18()
    model.fc = nn.Identity()
    weights = read_weights(file)
    assert type(weights) is dict
    model.load_state_dict(weights, strict=True)
    assert_same_features(model, run)
    shown = capfd.readouterr().out
    assert "differ by 0.0e+00" in shown
    assert "torchvision.models.resnet18()" in shown


# timm


@pytest.fixture
def timm():
    return pytest.importorskip("timm", reason="timm is not installed: pip install 'hardmix[timm]'")


@pytest.mark.parametrize(
    ("backbone", "name", "channels"),
    [
        ("resnet18", "resnet18", 3),
        ("resnext50_32x4d", "resnext50_32x4d", 3),
        ("resnet18", "resnet18", 5),
        ("timm:resnet10t", "resnet10t", 3),
    ],
)
def test_timms_model_loads_it_strictly_and_gives_the_same_features(
    backbone, name, channels, tmp_path, timm, capfd
):
    run = make_run(tmp_path / "run", backbone, channels)
    (file,) = export(run.path, "timm", tmp_path / "weights.pth")
    model = timm.create_model(name, num_classes=0, in_chans=channels)
    model.load_state_dict(read_weights(file), strict=True)
    assert_same_features(model, run, channels)
    shown = capfd.readouterr().out
    assert "differ by" in shown
    assert f'timm.create_model("{name}", num_classes=0' in shown


def test_timm_has_every_resnet_under_the_same_name(timm):
    for name in RESNETS:
        with torch.device("meta"):
            theirs = timm.create_model(name, num_classes=0).state_dict()
            ours = build_backbone(name).trunk.state_dict()
        assert {k: v.shape for k, v in theirs.items()} == {k: v.shape for k, v in ours.items()}


def test_without_timm_the_file_is_written_and_that_it_was_not_compared_is_said(
    tmp_path, monkeypatch, capfd
):
    run = make_run(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "timm", None)
    (file,) = export(run.path, "timm", tmp_path / "weights.safetensors")
    assert set(read_weights(file)) == set(load_file(run.encoder_file))
    assert "Not verified" in capfd.readouterr().out


# ONNX


@pytest.fixture
def onnx_parts():
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    return pytest.importorskip("onnxruntime")


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(("backbone", "channels"), [("resnet18", 3), ("small", 5)])
def test_onnxruntime_gives_the_same_features_at_any_batch(
    backbone, channels, tmp_path, onnx_parts, capfd
):
    run = make_run(tmp_path / "run", backbone, channels)
    (file,) = export(run.path, "onnx", tmp_path / "encoder.onnx")
    assert "Verified with onnxruntime" in capfd.readouterr().out
    assert sorted(each.name for each in tmp_path.iterdir()) == ["encoder.onnx", "run"]
    session = onnx_parts.InferenceSession(file)
    encoder = load_encoder(run.path)
    for number in (1, 2, 5):
        images = torch.randn(number, channels, SIZE, SIZE)
        (features,) = session.run(["features"], {"images": images.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(
                torch.from_numpy(features), encoder(images), rtol=1e-3, atol=1e-4
            )
    facts = session.get_modelmeta().custom_metadata_map
    assert facts["backbone"] == backbone
    assert len(ast.literal_eval(facts["mean"])) == channels


def test_an_onnx_file_that_differs_is_not_left(tmp_path, monkeypatch, onnx_parts):
    run = make_run(tmp_path / "run")
    other = load_encoder(make_run(tmp_path / "other").path)
    right = exporting._onnx_model
    monkeypatch.setattr(exporting, "_onnx_model", lambda _, *rest: right(other, *rest))
    with pytest.raises(
        InputError, match=r"onnxruntime differ.*limit of 1e-03.*nothing was written"
    ):
        export(run.path, "onnx", tmp_path / "new" / "encoder.onnx")
    assert not (tmp_path / "new").exists()


def test_features_that_are_no_numbers_differ():
    ours = torch.ones(2, 3)
    assert exporting.difference(ours, ours * torch.nan) == float("inf")
    assert exporting.difference(ours * 2, ours) == 0.5


@pytest.mark.parametrize(
    ("backbone", "channels", "reduce"), [("small", 3, True), ("resnet18", 1, False)]
)
def test_an_onnx_file_with_its_preprocessing_takes_images_of_any_size(
    backbone, channels, reduce, tmp_path, onnx_parts, capfd
):
    run = make_run(tmp_path / "run", backbone, channels, reduce=reduce)
    (file,) = export(run.path, "onnx", tmp_path / "whole.onnx", with_preprocessing=True)
    assert "random images of 4 sizes" in capfd.readouterr().out
    session = onnx_parts.InferenceSession(file)
    (given,) = session.get_inputs()
    assert given.type == "tensor(uint8)"
    encoder = load_encoder(run.path)
    generator = torch.Generator().manual_seed(1)
    for height, width in [
        *((SIZE, SIZE), (SIZE, SIZE + 1), (9, 200), (211, 90), (1, 1)),
        *((500, 375), (129, 1000), (2 * SIZE, 2 * SIZE)),
    ]:
        shape = 2, channels, height, width
        images = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        with torch.no_grad():
            ours = encoder(torch.stack([encoder.preprocess(image) for image in images])).numpy()
        theirs = session.run(None, {given.name: images.numpy()})[0]
        limit = 1e-5 if height == width == SIZE else 0.02  # one step of 255 where it is resized
        assert np.abs(ours - theirs).max() < limit * np.abs(ours).max(), (height, width)


def test_a_preprocessing_that_differs_is_not_written(tmp_path, monkeypatch, onnx_parts):
    run = make_run(tmp_path / "run", "small")
    monkeypatch.setattr(exporting, "LONGEST", 1)
    with pytest.raises(InputError, match=r"preprocessing.*limit of 2e-02: nothing was written"):
        export(run.path, "onnx", tmp_path / "whole.onnx", with_preprocessing=True)
    assert not (tmp_path / "whole.onnx").exists()


def test_only_onnx_can_hold_a_preprocessing(tmp_path):
    run = make_run(tmp_path / "run", "small")
    with pytest.raises(InputError, match="with_preprocessing needs the format onnx"):
        export(run.path, "safetensors", tmp_path / "a.safetensors", with_preprocessing=True)


@pytest.mark.parametrize("missing", ["onnx", "onnxscript", "onnxruntime"])
def test_without_onnx_the_way_to_get_it_is_named(missing, tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", "small")
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(InputError, match=rf"needs {missing}, .*pip install 'hardmix\[onnx\]'"):
        export(run.path, "onnx", tmp_path / "encoder.onnx")


def test_a_network_too_large_for_onnx_is_refused(tmp_path, monkeypatch, onnx_parts):
    run = make_run(tmp_path / "run", "small")
    monkeypatch.setattr(exporting, "ONNX_LIMIT", 1000)
    with pytest.raises(InputError, match=r"limited to 1000.*safetensors"):
        export(run.path, "onnx", tmp_path / "encoder.onnx")


class Branching(nn.Module):
    """A network that torch cannot export, because it branches on the content of its images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.conv(images).mean(dim=(2, 3))
        return features * 2 if bool(features.sum() > 0) else features


def test_a_network_that_torch_cannot_export_is_refused(tmp_path, onnx_parts):
    trunk = Branching()
    run = make_run(tmp_path / "run", trunk=trunk)
    with pytest.raises(InputError, match=r"cannot export backbone='own' to ONNX.*safetensors"):
        export(run.path, "onnx", tmp_path / "encoder.onnx", trunk=trunk)


# detectron2

NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def expected_names(blocks: tuple[int, ...], convolutions: int) -> set[str]:
    """Return detectron2's names of a ResNet, from its structure alone."""
    layers = ["stem.conv1"]
    for stage, number in enumerate(blocks, start=2):
        for block in range(number):
            layers += [f"res{stage}.{block}.conv{k}" for k in range(1, convolutions + 1)]
            if block == 0 and not (convolutions == 2 and stage == 2):
                layers.append(f"res{stage}.{block}.shortcut")
    return {f"{layer}.weight" for layer in layers} | {
        f"{layer}.norm.{part}" for layer in layers for part in NORM
    }


@pytest.mark.parametrize(
    ("backbone", "blocks", "convolutions", "tensors"),
    [
        ("resnet18", (2, 2, 2, 2), 2, 120),
        ("resnet34", (3, 4, 6, 3), 2, 216),
        ("resnet50", (3, 4, 6, 3), 3, 318),
        ("resnet101", (3, 4, 23, 3), 3, 624),
        ("resnext101_64x4d", (3, 4, 23, 3), 3, 624),
    ],
)
def test_detectron2s_names_are_those_of_its_resnets(backbone, blocks, convolutions, tensors):
    with torch.device("meta"):
        names = list(build_backbone(backbone).trunk.state_dict())
    renamed = [detectron2_name(name) for name in names]
    assert len(set(renamed)) == len(names) == tensors
    assert set(renamed) == expected_names(blocks, convolutions)


def test_some_names_by_hand():
    assert detectron2_name("conv1.weight") == "stem.conv1.weight"
    assert detectron2_name("bn1.running_var") == "stem.conv1.norm.running_var"
    assert detectron2_name("layer1.0.conv2.weight") == "res2.0.conv2.weight"
    assert detectron2_name("layer4.2.bn3.bias") == "res5.2.conv3.norm.bias"
    assert detectron2_name("layer3.0.downsample.0.weight") == "res4.0.shortcut.weight"
    assert detectron2_name("layer3.0.downsample.1.weight") == "res4.0.shortcut.norm.weight"


def test_detectron2_can_build_every_resnet():
    assert set(SHAPES) == set(RESNETS)
    for name, shape in SHAPES.items():
        with torch.device("meta"):
            weights = {
                detectron2_name(key): value.shape
                for key, value in build_backbone(name).trunk.state_dict().items()
            }
        width = shape.groups * shape.group_width
        assert weights["res2.0.conv1.weight"] == (width, 64, 1, 1) or shape.depth < 50
        assert weights["res2.0.conv2.weight"][:2] == (width, width // shape.groups)
        last = "conv2" if shape.depth < 50 else "conv3"
        assert weights[f"res2.0.{last}.norm.bias"] == (shape.first_stage,)


@pytest.mark.parametrize("ending", ["pth", "pkl"])
def test_a_detectron2_file_holds_every_weight_of_a_resnet50(ending, tmp_path):
    run = make_run(tmp_path / "run", "resnet50")
    files = export(run.path, "detectron2", tmp_path / "out" / f"mochi.{ending}")
    names = [f"mochi.{ending}", "mochi_voc_24k.yaml", "mochi_coco_1x.yaml", PLUG_IN_FILE]
    assert [file.name for file in files] == names
    if ending == "pth":
        data = torch.load(files[0], weights_only=True)
        model = data["model"]
    else:
        data = pickle.loads(files[0].read_bytes(), encoding="latin1")
        assert all(type(array) is np.ndarray for array in data["model"].values())
        assert all(array.flags.writeable for array in data["model"].values())
        model = {name: torch.from_numpy(array) for name, array in data["model"].items()}
    assert data["__author__"] == "hardmix"
    assert data["matching_heuristics"] is True
    source = load_file(run.encoder_file)
    assert len(model) == len(source)
    for name, tensor in source.items():
        other = model[detectron2_name(name)]
        assert other.dtype == tensor.dtype
        assert torch.equal(other, tensor)


def test_the_pickle_names_nothing_that_numpy_1_has_elsewhere(tmp_path):
    run = make_run(tmp_path / "run")
    file = export(run.path, "detectron2", tmp_path / "a.pkl")[0]
    words, names = [], set()
    for opcode, argument, _ in pickletools.genops(file.read_bytes()):
        if isinstance(argument, str):
            words.append(argument)
        if opcode.name == "STACK_GLOBAL":
            names.add(tuple(words[-2:]))
        assert opcode.name != "GLOBAL"
    assert names == {("numpy", "ndarray"), ("builtins", "bytearray")}


def read_configs(backbone="resnet50") -> dict[str, dict]:
    yaml = pytest.importorskip("yaml")
    files = side_files(backbone, "mochi.pth")
    return {
        name: yaml.safe_load(files[f"mochi_{name}.yaml"].decode())
        for name in ("voc_24k", "coco_1x")
    }


def test_both_configs_have_mocos_settings():
    for config in read_configs().values():
        model = config["MODEL"]
        assert config["VERSION"] == 2
        assert model["META_ARCHITECTURE"] == "GeneralizedRCNN"
        assert model["WEIGHTS"] == "mochi.pth"
        assert model["PIXEL_MEAN"] == [123.675, 116.28, 103.53]
        assert model["PIXEL_STD"] == [58.395, 57.12, 57.375]
        assert model["BACKBONE"] == {"FREEZE_AT": 0}
        assert model["RESNETS"] == {
            "DEPTH": 50,
            "NUM_GROUPS": 1,
            "WIDTH_PER_GROUP": 64,
            "RES2_OUT_CHANNELS": 256,
            "NORM": "naiveSyncBN",
            "STRIDE_IN_1X1": False,
        }
        assert model["RPN"] == {"PRE_NMS_TOPK_TEST": 6000, "POST_NMS_TOPK_TEST": 1000}
        assert model["ROI_HEADS"]["NAME"] == "Res5ROIHeadsExtraNorm"
        assert config["INPUT"]["FORMAT"] == "RGB"
        assert config["INPUT"]["MIN_SIZE_TEST"] == 800
        assert config["SOLVER"]["IMS_PER_BATCH"] == 16
        assert config["SOLVER"]["BASE_LR"] == 0.02
        assert config["TEST"]["PRECISE_BN"] == {"ENABLED": True, "NUM_ITER": 200}


def test_the_configs_differ_in_data_and_schedule():
    voc, coco = read_configs().values()
    assert (voc["MODEL"]["MASK_ON"], coco["MODEL"]["MASK_ON"]) == (False, True)
    assert voc["MODEL"]["ROI_HEADS"]["NUM_CLASSES"] == 20
    assert coco["MODEL"]["ROI_HEADS"]["NUM_CLASSES"] == 80
    sizes = [480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800]
    assert voc["INPUT"]["MIN_SIZE_TRAIN"] == sizes
    assert coco["INPUT"]["MIN_SIZE_TRAIN"] == sizes[5:]
    assert voc["DATASETS"]["TRAIN"] == ["voc_2007_trainval", "voc_2012_trainval"]
    assert voc["DATASETS"]["TEST"] == ["voc_2007_test"]
    assert coco["DATASETS"] == {"TRAIN": ["coco_2017_train"], "TEST": ["coco_2017_val"]}
    names = ("STEPS", "MAX_ITER", "WARMUP_ITERS")
    assert [voc["SOLVER"][name] for name in names] == [[18000, 22000], 24000, 100]
    assert [coco["SOLVER"][name] for name in names] == [[60000, 80000], 90000, 1000]


def test_the_config_describes_the_backbone():
    resnets = read_configs("resnext101_32x8d")["voc_24k"]["MODEL"]["RESNETS"]
    assert (resnets["DEPTH"], resnets["NUM_GROUPS"], resnets["WIDTH_PER_GROUP"]) == (101, 32, 8)
    assert read_configs("resnet18")["voc_24k"]["MODEL"]["RESNETS"]["RES2_OUT_CHANNELS"] == 64


def test_the_plug_in_is_python_and_registers_the_head_that_the_configs_name():
    tree = ast.parse(side_files("resnet50", "a.pth")[PLUG_IN_FILE])
    (head,) = [
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "Res5ROIHeadsExtraNorm"
    ]
    assert [ast.unparse(each) for each in head.decorator_list] == ["ROI_HEADS_REGISTRY.register()"]
    assert [ast.unparse(each) for each in head.bases] == ["Res5ROIHeads"]
    assert "add_module('norm', get_norm(norm, channels))" in ast.unparse(head)


def test_the_plug_in_evaluates_without_a_trainer(monkeypatch):
    """A trainer opens the training data, which --eval-only must not need."""
    calls = []

    class Base:
        """A stand-in for detectron2's classes and functions."""

        def __init__(self, *_, **__):
            calls.append(type(self).__name__)

        build_model = test = classmethod(lambda cls, *_: calls.append("static"))
        resume_or_load = merge_from_file = merge_from_list = lambda *_, **__: None
        freeze = register = lambda *_: lambda cls: cls
        train = lambda self: calls.append("train")  # noqa: E731
        OUTPUT_DIR = MODEL = property(lambda self: self)
        WEIGHTS = None

    names = {
        "checkpoint": ["DetectionCheckpointer"],
        "config": ["get_cfg"],
        "data": ["MetadataCatalog"],
        "engine": ["DefaultTrainer", "default_argument_parser", "default_setup", "launch"],
        "evaluation": ["COCOEvaluator", "PascalVOCDetectionEvaluator"],
        "layers": ["get_norm"],
        "modeling.backbone.resnet": ["BasicBlock", "ResNet"],
        "modeling.roi_heads": ["Res5ROIHeads"],
    }
    for module, classes in names.items():
        made = {name: type(name, (Base,), {}) for name in classes}
        monkeypatch.setitem(sys.modules, f"detectron2.{module}", SimpleNamespace(**made))
    heads = sys.modules["detectron2.modeling.roi_heads"]
    heads.ROI_HEADS_REGISTRY = Base()
    space = {"__name__": "plug_in"}
    exec(side_files("resnet50", "a.pth")[PLUG_IN_FILE].decode(), space)
    for eval_only in (True, False):
        calls.clear()
        arguments = SimpleNamespace(config_file="c", opts=[], resume=False, eval_only=eval_only)
        space["main"](arguments)
        assert ("Trainer" in calls, "train" in calls) == (not eval_only, not eval_only)
        assert ("DetectionCheckpointer" in calls, "static" in calls) == (eval_only, eval_only)


def test_two_exports_to_one_folder_share_the_plug_in_but_no_other_file(tmp_path):
    run = make_run(tmp_path / "run")
    export(run.path, "detectron2", tmp_path / "a.pth")
    export(run.path, "detectron2", tmp_path / "b.pth")
    with pytest.raises(InputError, match=r"b_voc_24k.yaml already exists"):
        export(run.path, "detectron2", tmp_path / "b.pkl")
    assert not (tmp_path / "b.pkl").exists()
    (tmp_path / PLUG_IN_FILE).write_text("# somebody's own")
    with pytest.raises(InputError, match=rf"{PLUG_IN_FILE} already exists"):
        export(run.path, "detectron2", tmp_path / "c.pth")
    assert (tmp_path / PLUG_IN_FILE).read_text() == "# somebody's own"


# Errors of users


@pytest.mark.parametrize("kind", ["torchvision", "timm", "detectron2"])
@pytest.mark.parametrize("backbone", ["small", "resnet18-cifar"])
def test_networks_that_a_program_does_not_have_are_refused(kind, backbone, tmp_path):
    run = make_run(tmp_path / "run", backbone)
    with pytest.raises(InputError, match=rf"{kind}.*'{backbone}'.*safetensors and onnx support"):
        export(run.path, kind, tmp_path / "new" / "a.pth")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("kind", ["torchvision", "detectron2"])
def test_timms_networks_are_for_timm(kind, tmp_path, timm):
    run = make_run(tmp_path / "run", "timm:resnet10t")
    with pytest.raises(InputError, match=r"'timm:resnet10t'.*timm supports this one"):
        export(run.path, kind, tmp_path / "a.pth")


@pytest.mark.parametrize("kind", ["torchvision", "detectron2"])
def test_other_channels_are_refused_where_the_network_has_three(kind, tmp_path):
    run = make_run(tmp_path / "run", channels=5)
    with pytest.raises(InputError, match=r"channels=5.*3.*safetensors and onnx"):
        export(run.path, kind, tmp_path / "a.pth")


def test_an_unknown_format_lists_the_nearest_first(tmp_path):
    with pytest.raises(InputError, match=r"format='torchvison'.*choose one of torchvision,"):
        export(tmp_path, "torchvison", tmp_path / "a.pth")


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if FORMATS[kind].suffixes])
@pytest.mark.parametrize("name", ["encoder", "encoder.zip"])
def test_a_wrong_ending_is_refused(kind, name, tmp_path):
    with pytest.raises(InputError, match=rf"{kind} must end in \{FORMATS[kind].suffixes[0]}"):
        export(tmp_path, kind, tmp_path / name)


@pytest.mark.parametrize("kind", FORMATS)
def test_an_existing_file_is_refused_and_not_touched(kind, tmp_path):
    file = tmp_path / "".join(["a", *FORMATS[kind].suffixes[:1]])
    file.write_text("mine")
    with pytest.raises(InputError, match="already exists: choose another name or delete it"):
        export(tmp_path, kind, file)
    assert file.read_text() == "mine"


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    run = make_run(tmp_path / "run", "small")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        export(run.path, "safetensors", tmp_path / "file" / "a.safetensors")


def test_what_is_no_run_is_refused(tmp_path):
    for where in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(InputError, match=str(where)):
            export(where, "safetensors", tmp_path / "a.safetensors")


def test_a_program_that_has_other_tensors_is_named(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run")
    monkeypatch.setattr("torchvision.models.resnet.resnet18", lambda: torchvision.models.resnet34())
    encoder = load_encoder(run.path, trunk=_identity_fc(torchvision.models.resnet18()))
    job = exporting.ExportJob(run.encoder_file, encoder, tmp_path / "a.pth")
    with pytest.raises(InputError, match=r"the installed torchvision.s resnet18"):
        exporting._torchvision(job)


def _identity_fc(model):
    model.fc = nn.Identity()
    return model
