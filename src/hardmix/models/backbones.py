"""Backbones by name. A trunk turns images into (batch, width) features.

A new backbone is a function and its line in `BACKBONES`. All start from random weights, except
those of `fetch_pretrained`. The ResNets are torchvision's own, without the classifier: their
state_dict has torchvision's names, so that weights can be exchanged with other programs.
"""

import ast
import copy
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import torch
import torchvision.models as torchvision_models
import torchvision.models.resnet as torchvision_resnet
from jaxtyping import Float
from torch import Tensor, nn

from hardmix.errors import InputError
from hardmix.models.lab_pair import LabPair
from hardmix.runtime.own_code import call_own, is_own, load_own

RESNETS = (
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "wide_resnet50_2",
    "wide_resnet101_2",
    "resnext50_32x4d",
    "resnext101_32x8d",
    "resnext101_64x4d",
)
"""All ResNets of torchvision; the paper's is resnet50."""

SETTING = "model.backbone"

OURS = {
    "num_classes": "the classifier is removed",
    "in_chans": "it follows from data.channels",
    "pretrained": "weights come from hardmix import",
    "checkpoint_path": "weights come from hardmix import",
}
"""Options of timm that hardmix sets itself, and why."""


class Backbone(NamedTuple):
    """A trunk and its number of features."""

    trunk: nn.Module
    """Images (batch, channels, height, width) -> features (batch, width)."""
    width: int


def build_backbone(
    name: str | Callable[..., nn.Module], channels: int = 3, image_size: int | None = None
) -> Backbone:
    """Build the trunk of this name, with random weights, for images of `channels` channels.

    If `image_size` is given, timm's trunks and your own are tried with it: some take only one size.

    - `resnet50` and the others of `RESNETS`: torchvision's, the fc an identity (official MoCo).
    - the same with `-cifar`, for 32 pixels: a 3x3 stem of stride 1, no max-pool (as SimCLR's).
    - `small`: `SmallResNet`, made for CPUs.
    - `lab-NAME`: two of half the width, for lightness and for colours (CMC); NAME is in `HALVED`.
    - `resnet18-narrow`: a ResNet-18 of a quarter of the width, for detectors on CPUs.
    - `timm:NAME`: any timm model, without its classifier; `timm:NAME?img_size=96` with options.
    - `mypackage:make_net`: your own function, called with `channels` if it takes that; or the
      function itself. A name must be allowed (`hardmix.allow_code`).
    """
    if callable(name):
        return _own(name, channels, image_size)
    if is_own(name):
        return _own(load_own(name, SETTING), channels, image_size)
    if name.startswith("timm:"):
        trunk, width = _timm(name, channels)
        if image_size is not None:
            feature_width(trunk, channels, image_size)
        return Backbone(trunk, width)
    if name not in BACKBONES:
        raise InputError(_unknown(name))
    return BACKBONES[name](channels)


def _own(make: Callable[..., Any], channels: int, image_size: int | None) -> Backbone:
    trunk = call_own(make, SETTING, channels=channels)
    if not isinstance(trunk, nn.Module):
        raise InputError(
            f"{SETTING}: {make.__name__} returns a {type(trunk).__name__}: it must return a"
            " torch.nn.Module that turns images into (batch, width) features."
        )
    return Backbone(trunk, feature_width(trunk, channels, image_size or 224))


def _resnet(name: str, channels: int) -> Backbone:
    build: Callable[[], nn.Module] = getattr(torchvision_resnet, name.removesuffix("-cifar"))
    trunk: Any = build()
    width: int = trunk.fc.in_features
    trunk.fc = nn.Identity()
    if name.endswith("-cifar"):
        trunk.conv1 = _initialise(nn.Conv2d(channels, 64, 3, padding=1, bias=False))
        trunk.maxpool = nn.Identity()
    elif channels != 3:
        trunk.conv1 = _initialise(nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False))
    return Backbone(trunk, width)


def _narrow(channels: int) -> Backbone:
    """Build a ResNet-18 a quarter as wide as torchvision's: 0.7 M parameters, 128 features."""
    return _thin_resnet("resnet18", channels, 16)


def _small(channels: int, share: int = 1) -> Backbone:
    trunk = SmallResNet(channels, share)
    return Backbone(trunk, trunk.width)


THIN_RESNETS: dict[str, tuple[Any, list[int]]] = {
    "resnet18": (torchvision_resnet.BasicBlock, [2, 2, 2, 2]),
    "resnet50": (torchvision_resnet.Bottleneck, [3, 4, 6, 3]),
}
"""Blocks of the ResNets that can also be built at another width."""

HALVED = ("small", "resnet18", "resnet18-cifar", "resnet50", "resnet50-cifar")
"""Backbones that can be built as two halves for CMC: 'lab-NAME'."""


def _thin_resnet(name: str, channels: int, first: int) -> Backbone:
    """Build a ResNet whose first stage has `first` planes instead of 64."""
    block, layers = THIN_RESNETS[name.removesuffix("-cifar")]
    trunk: Any = torchvision_resnet.ResNet(block, [1, 1, 1, 1])
    trunk.inplanes = first
    trunk.conv1 = nn.Conv2d(channels, first, 7, stride=2, padding=3, bias=False)
    if name.endswith("-cifar"):
        trunk.conv1 = nn.Conv2d(channels, first, 3, padding=1, bias=False)
        trunk.maxpool = nn.Identity()
    trunk.bn1 = nn.BatchNorm2d(first)
    for stage, number in enumerate(layers):
        layer = trunk._make_layer(block, first << stage, number, stride=1 if stage == 0 else 2)
        setattr(trunk, f"layer{stage + 1}", layer)
    trunk.fc = nn.Identity()
    for layer in trunk.modules():
        if isinstance(layer, nn.Conv2d):
            _initialise(layer)
    return Backbone(trunk, (first << 3) * block.expansion)


def _lab(name: str, channels: int) -> Backbone:
    """Build CMC's pair: the backbone of this name twice, at half its width."""
    if channels != 3:
        raise InputError(
            f"model.backbone=lab-{name} with data.channels={channels}: lightness and colours are"
            " those of images with 3 channels."
        )
    light, colours = (
        _small(half, share=2) if name == "small" else _thin_resnet(name, half, 32)
        for half in (1, 2)  # channels: lightness, and two of colour
    )
    return Backbone(LabPair(light.trunk, colours.trunk), 2 * light.width)


class SmallResNet(nn.Module):
    """A residual network for CPUs and images of 32 to 64 pixels; not in the paper.

    A stem and three stages, each one convolution with a shortcut that halves the image: 0.43 M
    parameters, 4.0 M multiply-adds at 32 pixels, 256 features. Pre-training runs at about 900
    images per second and core with AVX2. It was chosen for what MoCo-v2 learns in a given time:
    docs/results-older.md lists the networks that were tried.
    """

    WIDTHS = (32, 64, 128, 256)

    def __init__(self, channels: int = 3, share: int = 1) -> None:
        super().__init__()
        first, second, third, self.width = (width // share for width in self.WIDTHS)
        self.conv1 = nn.Conv2d(channels, first, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(first)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = _Halving(first, second)
        self.layer2 = _Halving(second, third)
        self.layer3 = _Halving(third, self.width)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                _initialise(layer)

    def forward(self, images: Float[Tensor, "batch channels y x"]) -> Float[Tensor, "batch width"]:
        """Return the features: the last stage's mean over the image."""
        maps: Tensor = self.relu(self.bn1(self.conv1(images)))
        maps = self.layer3(self.layer2(self.layer1(maps)))
        return maps.mean(dim=(2, 3))


class _Halving(nn.Module):
    """A convolution of stride 2, with the mean of 2 x 2 pixels as its shortcut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.downsample = nn.Sequential(
            nn.AvgPool2d(2, ceil_mode=True, count_include_pad=False),
            nn.Conv2d(inputs, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )

    def forward(
        self, maps: Float[Tensor, "batch inputs y x"]
    ) -> Float[Tensor, "batch outputs v u"]:
        return torch.relu_(self.bn1(self.conv1(maps)) + self.downsample(maps))


def _initialise(layer: nn.Conv2d) -> nn.Conv2d:
    """Initialise a layer as in torchvision's ResNets."""
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


def _timm(name: str, channels: int) -> Backbone:
    timm = _import_timm()
    if timm is None:
        raise InputError(
            f"model.backbone={name!r} needs timm, which is not installed:"
            " pip install 'hardmix[timm]'."
        )
    model_name, options = parse_timm(name)
    if not timm.is_model(model_name):
        raise InputError(_unknown(f"timm:{model_name}"))
    try:
        trunk = timm.create_model(model_name, num_classes=0, in_chans=channels, **options)
    except Exception as error:
        if not options:
            raise
        raise InputError(
            f"model.backbone={name!r}: timm's {model_name} does not accept these options"
            f" ({type(error).__name__}: {error})."
        ) from error
    return Backbone(trunk, trunk.head_hidden_size)


def parse_timm(name: str) -> tuple[str, dict[str, Any]]:
    """Parse 'timm:NAME?key=value&...' into timm's name and options."""
    model_name, _, query = name.removeprefix("timm:").partition("?")
    options: dict[str, Any] = {}
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key in OURS:
            raise InputError(f"model.backbone={name!r}: {key} cannot be set: {OURS[key]}.")
        if not value:
            raise InputError(f"model.backbone={name!r}: {key} needs a value, as in {key}=96.")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value
    return model_name, options


def feature_width(trunk: nn.Module, channels: int, image_size: int) -> int:
    """Return a trunk's number of features, found by running a copy on two black images."""
    device = next(trunk.parameters(), torch.empty(0)).device
    images = torch.zeros(2, channels, image_size, image_size, device=device)
    try:
        with torch.no_grad():
            features = copy.deepcopy(trunk).eval()(images)
    except Exception as error:
        raise InputError(
            f"the trunk {type(trunk).__name__} fails on images of shape {tuple(images.shape)}:"
            f" {error}. Choose another trunk, or the data.image_size and data.channels it accepts."
        ) from error
    if not isinstance(features, Tensor) or features.shape[:-1] != (2,):
        shape = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise InputError(
            f"the trunk {type(trunk).__name__} turns 2 images into {shape}: it must return"
            " (2, width); pool and flatten its output, as nn.Sequential(trunk,"
            " nn.AdaptiveAvgPool2d(1), nn.Flatten()) does."
        )
    return features.shape[1]


def _import_timm() -> Any | None:
    """Import timm if a name needs it, as it is slow; return None if it is not installed."""
    try:
        return import_module("timm")
    except ModuleNotFoundError:
        return None


def _unknown(name: str) -> str:
    timm = _import_timm()
    from_timm = [f"timm:{model}" for model in timm.list_models()] if timm else []
    wanted = name.removeprefix("timm:").lower()
    names = {full.removeprefix("timm:"): full for full in [*from_timm, *BACKBONES]}
    nearest = [names[short] for short in get_close_matches(wanted, names, n=5, cutoff=0.5)]
    others = [backbone for backbone in BACKBONES if backbone not in nearest]
    timm_words = f"timm:NAME ({len(from_timm)} models)" if timm else "timm:NAME (extra 'timm')"
    timm_words += ", or your own function, mypackage:make_net"
    return (
        f"model.backbone={name!r} is unknown."
        + (f" Nearest: {', '.join(nearest)}." if nearest else "")
        + f" {'Also known' if nearest else 'Known'}: {', '.join(others)}; {timm_words}."
    )


BACKBONES: dict[str, Callable[[int], Backbone]] = {
    "small": _small,
    "resnet18-narrow": _narrow,
    **{name: partial(_resnet, name) for name in RESNETS},
    **{f"{name}-cifar": partial(_resnet, f"{name}-cifar") for name in RESNETS},
    **{f"lab-{name}": partial(_lab, name) for name in HALVED},
}
"""Functions from channels to a trunk, by every name except 'timm:NAME'."""


def fetch_pretrained(library: str, name: str, channels: int) -> nn.Module:
    """Return a trunk with timm's or torchvision's own pre-trained weights, downloaded if needed.

    timm adapts weights for three channels to another number; torchvision's need three.
    """
    try:
        if library == "timm" and name.startswith("timm:"):
            model, options = parse_timm(name)
            timm = import_module("timm")
            trunk: nn.Module = timm.create_model(
                model, pretrained=True, num_classes=0, in_chans=channels, **options
            )
            return trunk
        if library == "torchvision" and name in RESNETS and channels == 3:
            weights = torchvision_models.get_model_weights(name).DEFAULT
            trunk = build_backbone(name).trunk
            trunk.load_state_dict(weights.get_state_dict(check_hash=True), strict=False)
            return trunk
    except ModuleNotFoundError as error:
        raise InputError(
            f"model.init={library} needs {library}, which is not installed:"
            " pip install 'hardmix[timm]'."
        ) from error
    except Exception as error:  # whatever a download raises
        raise InputError(
            f"model.init={library}: the weights of {name} could not be fetched"
            f" ({type(error).__name__}: {error}); download them elsewhere and set model.init to the"
            " file."
        ) from error
    wanted = "timm:NAME" if library == "timm" else f"one of {', '.join(RESNETS)}, three channels"
    raise InputError(
        f"model.init={library} with model.backbone={name} and data.channels={channels}: it needs"
        f" {wanted}."
    )
