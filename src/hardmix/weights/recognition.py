"""Recognises the network in a weights file, and its layout, by names and shapes only.

Known layouts are those of official MoCo, torchvision, timm, lightly, EfficientNet-PyTorch and
hardmix.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hardmix.errors import InputError
from hardmix.models.backbones import BACKBONES, build_backbone
from hardmix.runs.folder import ENCODER_FORMAT, OWN_TRUNK
from hardmix.runs.weight_files import SavedWeights, first_names
from hardmix.runtime.own_code import check_allowed, is_own
from hardmix.settings.named_choices import Head

MAX_CHANNELS = 16
PREFIXES = (
    "module.",
    "_orig_mod.",
    "model.",
    "encoder_q.",
    "base_encoder.",
    "backbone.",
    "encoder.",
)
"""Prefixes of wrapped networks, outermost first, tried one after the other."""

CHILDREN = dict(zip("014567", ("conv1", "bn1", *(f"layer{n}" for n in range(1, 5))), strict=True))
"""A ResNet's children by their number in nn.Sequential, as lightly writes them."""

AFTER_TRUNK = re.compile(r"(fc|head\w*|classifier|linear|proj\w*|pred\w*|prototypes|neck)\.")
"""Names outside the trunk, which do not affect its features."""

MOCO_HEADS: dict[frozenset[str], tuple[Head, str]] = {
    frozenset({"weight", "bias"}): ("linear", "bias"),
    frozenset({"0.weight", "0.bias", "2.weight", "2.bias"}): ("mlp", "2.bias"),
}
"""The head by the names under MoCo's fc, and its tensor with one number per dimension."""


class NamesUnder(NamedTuple):
    """The tensors under a prefix: the name in a trunk -> the name in the file."""

    prefix: str
    names: dict[str, str]
    numbered: bool


class Fit(NamedTuple):
    """How well a view fits a backbone: names that agree, and those that do not, by reason."""

    backbone: str
    view: NamesUnder
    channels: int
    agreeing: list[str]
    wrong: dict[str, list[str]]

    @property
    def score(self) -> tuple[bool, int]:
        """Whether everything agrees, and how many more names agree than do not."""
        wrong = sum(len(names) for names in self.wrong.values())
        return wrong == 0, len(self.agreeing) - wrong


class MocoParts(NamedTuple):
    """MoCo's parts besides the trunk; names: in imported.safetensors -> in the file.

    These are the head, the queue, and the key encoder, in which training continues.
    """

    head: Head
    dim: int
    queue_size: int | None
    names: dict[str, str]


def recognise(file: Path, source: SavedWeights, backbone: str | None) -> Fit:
    """Return the backbone and the part of the file that agree in every name and shape."""
    ours = source.facts.get("backbone") if is_ours(source) else None
    named = backbone or (ours if ours != OWN_TRUNK else None)
    if named is not None and is_own(named):
        where = "the config" if backbone else str(file)
        check_allowed(named, "model.backbone", where)
    fits = [
        _compare(source.tensors, name, view)
        for name in ([named] if named else _candidates(source))
        for view in _views("", {name: name for name in source.tensors})
    ]
    nearest = max(fits, key=lambda fit: fit.score)
    if not nearest.score[0]:
        raise InputError(_no_fit(file, nearest, backbone))
    if nearest.channels > MAX_CHANNELS:
        raise InputError(
            f"{file} is a {nearest.backbone} for images of {nearest.channels} channels: hardmix"
            f" supports 1 to {MAX_CHANNELS}; choose weights for fewer."
        )
    return nearest


def _candidates(source: SavedWeights) -> list[str]:
    """Return the backbones to try if none is named."""
    views = _views("", {name: name for name in source.tensors})
    flat = any(is_numbered_flat(view.names) for view in views)
    return [*BACKBONES, *(EFFICIENTNETS if flat else ())]


def _views(prefix: str, names: dict[str, str]) -> Iterator[NamesUnder]:
    """Yield the names as they are, then those under each prefix."""
    numbered = {"0.weight", "4.0.conv1.weight"} <= names.keys()
    yield NamesUnder(prefix, _by_child(names) if numbered else names, numbered)
    for inner in PREFIXES:
        below = {k.removeprefix(inner): v for k, v in names.items() if k.startswith(inner)}
        if below:
            yield from _views(prefix + inner, below)


def _by_child(names: dict[str, str]) -> dict[str, str]:
    split = {name: name.partition(".") for name in names}
    return {f"{CHILDREN.get(a, a)}{dot}{b}": names[name] for name, (a, dot, b) in split.items()}


@cache
def _shapes(backbone: str) -> dict[str, torch.Size]:
    """Return the names and shapes of a trunk for three channels, without its values."""
    if backbone.startswith("timm:"):  # some of timm's cannot be built on the meta device
        trunk = build_backbone(backbone).trunk
    else:
        with torch.device("meta"):
            trunk = build_backbone(backbone).trunk
    return {name: tensor.shape for name, tensor in trunk.state_dict().items()}


def _compare(tensors: Mapping[str, Tensor], backbone: str, view: NamesUnder) -> Fit:
    wanted = dict(_shapes(backbone))
    if is_numbered_flat(view.names):
        view = view._replace(names=timm_names(view.names, wanted))
    found = {name: tensors[theirs].shape for name, theirs in view.names.items()}
    channels = 3
    stem = next((name for name, shape in wanted.items() if len(shape) == 4), "")
    if len(found.get(stem, ())) == 4 and not backbone.startswith("lab-"):  # any channels fit
        channels = found[stem][1]
        wanted[stem] = torch.Size([wanted[stem][0], channels, *wanted[stem][2:]])
    bad = [name for name in wanted if name in found and found[name] != wanted[name]]
    wrong = {
        "lacks": [n for n in wanted if n not in found and not n.endswith("batches_tracked")],
        "has unknown": [n for n in found if n not in wanted and not AFTER_TRUNK.match(n)],
        "has other shapes in": [f"{n} {[*found[n]]} instead of {[*wanted[n]]}" for n in bad],
    }
    agreeing = [name for name in wanted if found.get(name) == wanted[name]]
    return Fit(backbone, view, channels, agreeing, wrong)


def _no_fit(file: Path, fit: Fit, backbone: str | None) -> str:
    reasons = [
        f"{why} {len(names)} ({first_names(names)})" for why, names in fit.wrong.items() if names
    ]
    start = f"does not fit any backbone of hardmix; the closest is {fit.backbone}"
    way_out = "set backbone to timm:NAME"
    if backbone is not None:
        start, way_out = f"does not fit backbone={backbone}", "omit backbone"
    return (
        f"{file} {start}: of its tensors, the file {', '.join(reasons)}; {way_out}, or save only"
        " the state_dict of the trunk."
    )


def moco_parts(source: SavedWeights, fit: Fit) -> MocoParts | None:
    """Return the head and queue of a MoCo checkpoint; the queue only if dimensions match."""
    if not fit.view.prefix.endswith("encoder_q."):
        return None
    fc = {k.removeprefix("fc."): v for k, v in fit.view.names.items() if k.startswith("fc.")}
    head, last = MOCO_HEADS.get(frozenset(fc), (None, ""))
    if head is None:
        return None
    names = {f"head.{layer}": name for layer, name in fc.items()}
    dim = len(source.tensors[fc[last]])
    outer = fit.view.prefix.removesuffix("encoder_q.")
    key = {k: name.replace("encoder_q.", "encoder_k.") for k, name in names.items()}
    key |= {
        f"trunk.{k}": fit.view.names[k].replace("encoder_q.", "encoder_k.") for k in fit.agreeing
    }
    if source.tensors.keys() >= {*key.values()}:
        names |= {f"key.{k}": name for k, name in key.items()}
    queue = source.tensors.get(f"{outer}queue", torch.empty(0))
    if queue.ndim != 2 or len(queue) != dim or queue.numel() == 0:
        return MocoParts(head, dim, None, names)
    held = [name for name in ("queue", "queue_ptr") if outer + name in source.tensors]
    return MocoParts(head, dim, queue.shape[1], names | {name: outer + name for name in held})


def is_ours(source: SavedWeights) -> bool:
    """Return whether hardmix wrote the file."""
    return source.facts.get("format") == ENCODER_FORMAT


EFFICIENTNETS = tuple(f"timm:tf_efficientnet_lite{number}" for number in range(5))
"""Recognised by shapes; others must be named by `backbone`."""

FLAT_BLOCK = re.compile(r"_blocks\.(\d+)\._(\w+)\.(\w+)")
TIMM_BLOCK = re.compile(r"blocks\.(\d+\.\d+)\.")

AROUND = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2"}
AFTER = {"_fc": "classifier"}
EXPANDED = {
    "expand_conv": "conv_pw",
    "bn0": "bn1",
    "depthwise_conv": "conv_dw",
    "bn1": "bn2",
    "project_conv": "conv_pwl",
    "bn2": "bn3",
}
PLAIN = {"depthwise_conv": "conv_dw", "bn1": "bn1", "project_conv": "conv_pw", "bn2": "bn2"}
SQUEEZE = {"se_reduce": "se.conv_reduce", "se_expand": "se.conv_expand"}


def is_numbered_flat(names: Iterable[str]) -> bool:
    """Return whether these are names of EfficientNet-PyTorch."""
    return {"_conv_stem.weight", "_blocks.0._depthwise_conv.weight"} <= set(names)


def timm_names(names: Mapping[str, str], wanted: Iterable[str]) -> dict[str, str]:
    """Return timm's names of these tensors; `wanted` are all names of timm's network.

    Values are the names in the file. Unknown names are kept.
    """
    found = (TIMM_BLOCK.match(name) for name in wanted)
    places = list(dict.fromkeys(match[1] for match in found if match))
    expanded = {
        match[1] for name in names if (match := FLAT_BLOCK.match(name)) and "expand_c" in name
    }
    return {_timm_name(name, places, expanded): value for name, value in names.items()}


def _timm_name(name: str, places: list[str], expanded: set[str]) -> str:
    match = FLAT_BLOCK.match(name)
    if match is None:
        layer, dot, rest = name.partition(".")
        return (AROUND | AFTER).get(layer, layer) + dot + rest
    number, layer, rest = match.groups()
    known = (EXPANDED if number in expanded else PLAIN) | SQUEEZE
    if int(number) >= len(places) or layer not in known:
        return name
    return f"blocks.{places[int(number)]}.{known[layer]}.{rest}"
