"""Backbones: names, torchvision's own weights, sizes; timm where it is installed."""

import sys

import pytest
import torch
import torchvision
from torch import nn

from hardmix.errors import InputError
from hardmix.models.backbones import BACKBONES, RESNETS, build_backbone, fetch_pretrained
from hardmix.models.batch_norm import split_batch_norm
from hardmix.models.encoders import build_encoder
from hardmix.settings.config import ModelConfig
from places import ROOT


def output_size(module: nn.Module, size: int, channels: int = 3) -> tuple[int, ...]:
    """Shapes without the arithmetic: a network of any size takes milliseconds."""
    return tuple(module(torch.empty(2, channels, size, size, device="meta")).shape)


def test_names_are_torchvisions():
    ours = {
        name for name in torchvision.models.list_models() if "resne" in name and "3d" not in name
    }
    assert set(RESNETS) <= ours
    for name in ("resnet18", "resnet50-cifar", "wide_resnet50_2", "small"):
        assert name in BACKBONES


@pytest.mark.parametrize("name", RESNETS)
def test_every_resnet_has_torchvisions_names_but_the_fc(name):
    with torch.device("meta"):
        trunk, width = build_backbone(name)
        official = getattr(torchvision.models, name)()
    assert output_size(trunk, 64) == (2, width)
    shapes = {key: value.shape for key, value in trunk.state_dict().items()}
    assert shapes == {
        key: value.shape for key, value in official.state_dict().items() if key[:3] != "fc."
    }


@pytest.mark.parametrize(("name", "width"), [("resnet18", 512), ("resnet50", 2048)])
def test_weights_move_to_torchvision_and_give_the_same_features(name, width):
    trunk, found = build_backbone(name)
    assert found == width
    official = getattr(torchvision.models, name)()
    official.fc = nn.Identity()
    official.load_state_dict(trunk.state_dict(), strict=True)
    images = torch.randn(2, 3, 64, 64)
    assert trunk.eval()(images).equal(official.eval()(images))


@pytest.mark.parametrize("name", ["resnet18-cifar", "resnet50-cifar", "resnext50_32x4d-cifar"])
def test_the_cifar_stem_keeps_every_pixel(name):
    with torch.device("meta"):
        trunk, width = build_backbone(name)
        plain, _ = build_backbone(name.removesuffix("-cifar"))
    assert output_size(trunk, 32) == (2, width)
    stem = nn.Sequential(trunk.conv1, trunk.bn1, trunk.relu, trunk.maxpool)
    assert output_size(stem, 32)[2:] == (32, 32)
    stages = nn.Sequential(stem, trunk.layer1, trunk.layer2, trunk.layer3, trunk.layer4)
    assert output_size(stages, 32)[2:] == (4, 4)
    assert list(trunk.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("name", ["resnet18", "resnet18-cifar", "small"])
@pytest.mark.parametrize("channels", [1, 3, 5])
def test_any_number_of_channels(name, channels):
    trunk, width = build_backbone(name, channels)
    features = trunk(torch.randn(2, channels, 32, 32))
    assert features.shape == (2, width)
    assert features.isfinite().all()


def test_the_cifar_stem_is_initialised_as_torchvisions():
    """Kaiming, fan out: a 3x3 stem with 64 outputs has standard deviation sqrt(2 / (9 * 64))."""
    weight = build_backbone("resnet18-cifar")[0].conv1.weight.detach()
    assert float(weight.std()) == pytest.approx((2 / (9 * 64)) ** 0.5, rel=0.1)


def test_names_differ_from_each_other_only_by_seed():
    torch.manual_seed(3)
    first = build_backbone("small").trunk.state_dict()
    torch.manual_seed(3)
    second = build_backbone("small").trunk.state_dict()
    assert all(value.equal(second[key]) for key, value in first.items())


# Names that are not known


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("resnet5", "resnet50"), ("resnet18_cifar", "resnet18-cifar"), ("Small", "small")],
)
def test_an_unknown_name_lists_the_nearest_first(name, nearest):
    with pytest.raises(InputError) as error:
        build_backbone(name)
    words = str(error.value)
    assert words.startswith(f"model.backbone={name!r} is unknown. Nearest: ")
    assert nearest in words.split("Also known")[0]
    assert all(known in words for known in BACKBONES)
    assert "timm:NAME" in words


def test_an_unknown_name_like_nothing_lists_them_all():
    with pytest.raises(InputError) as error:
        build_backbone("qqqqqqqqqqqq")
    assert "Nearest" not in str(error.value)
    assert all(known in str(error.value) for known in BACKBONES)


def test_without_timm_the_way_to_get_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(
        InputError, match=r"'timm:resnet10t' needs timm.*pip install 'hardmix\[timm\]'"
    ):
        build_backbone("timm:resnet10t")
    with pytest.raises(InputError, match=r"resnet50.*extra 'timm'"):
        build_backbone("resnet5")


# timm


@pytest.fixture
def timm():
    return pytest.importorskip("timm", reason="timm is not installed: pip install 'hardmix[timm]'")


@pytest.mark.parametrize("name", ["resnet10t", "mobilenetv3_small_050", "efficientnet_lite0"])
def test_timm_models_give_features_of_their_width(timm, name):
    trunk, width = build_backbone(f"timm:{name}", channels=2)
    assert trunk(torch.randn(4, 2, 32, 32)).shape == (4, width)
    assert not any("classifier" in key or key.startswith("fc.") for key in trunk.state_dict())


def test_timms_batch_norm_with_activation_is_split_too(timm):
    trunk, _ = build_backbone("timm:mobilenetv3_small_050")
    split_batch_norm(trunk, 2)
    images = torch.randn(8, 3, 32, 32)
    torch.manual_seed(0)
    whole = trunk(images)
    parts = torch.cat([split_batch_norm(trunk, 1)(half) for half in images.chunk(2)])
    torch.testing.assert_close(whole, parts, rtol=1e-3, atol=1e-4)


def test_an_unknown_timm_name_lists_the_nearest(timm):
    with pytest.raises(InputError, match=r"Nearest: .*timm:resnet10t"):
        build_backbone("timm:resnet10")
    with pytest.raises(InputError, match=r"Nearest: timm:efficientnet_b0"):
        build_backbone("efficientnet_b0")


def test_a_timm_model_for_another_size_is_refused_at_the_start(timm):
    config = ModelConfig(backbone="timm:vit_tiny_patch16_224")
    with pytest.raises(InputError, match=r"fails on images of shape \(2, 3, 32, 32\).*image_size"):
        build_encoder(config, image_size=32)


@pytest.mark.parametrize("document", ["README.md", "docs/results.md", "docs/performance.md"])
def test_documents_state_the_size_of_the_small_backbone(document):
    number = sum(each.numel() for each in build_backbone("small").trunk.parameters())
    assert f"{number:,} parameters" in (ROOT / document).read_text()


def test_weights_of_a_missing_timm_name_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(InputError, match=r"model\.init=timm needs timm.*'hardmix\[timm"):
        fetch_pretrained("timm", "timm:resnet18", 3)
