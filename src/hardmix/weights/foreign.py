"""Weights from elsewhere become a run: hardmix import FILE --out RUN.

Read are checkpoints of official MoCo, state dicts of torchvision, timm and lightly, and our own
encoders. Code in a file never runs. What names and shapes do not show cannot be seen: networks that
differ only in strides or pooling (timm's resnetblur50) need their name as `backbone`.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor, nn

from hardmix.data.augment import channel_statistics
from hardmix.errors import InputError
from hardmix.models.backbones import BACKBONES, build_backbone
from hardmix.models.encoders import build_encoder
from hardmix.runs.folder import ENCODER_FORMAT, OWN_TRUNK, Run
from hardmix.runs.weight_files import Source, first_names, read_weights
from hardmix.runtime.atomic_files import write_atomically
from hardmix.runtime.console import say, table, warn
from hardmix.settings.config import Head, PretrainConfig
from hardmix.settings.methods import METHOD_FACTS, MethodName
from hardmix.settings.recipes import RECIPES

IMPORTED = "imported.safetensors"
"""Head and queue of a MoCo checkpoint: head.*, queue (K, dim), queue_ptr."""

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
"""What networks are wrapped in, outermost first: looked under one after the other."""

CHILDREN = dict(zip("014567", ("conv1", "bn1", *(f"layer{n}" for n in range(1, 5))), strict=True))
"""A ResNet's children by their number in nn.Sequential, as lightly writes them."""

AFTER_TRUNK = re.compile(r"(fc|head\w*|classifier|linear|proj\w*|pred\w*|prototypes|neck)\.")
"""Names beside the trunk's that do not change its features."""

MOCO_HEADS: dict[frozenset[str], tuple[Head, str]] = {
    frozenset({"weight", "bias"}): ("linear", "bias"),
    frozenset({"0.weight", "0.bias", "2.weight", "2.bias"}): ("mlp", "2.bias"),
}
"""By the names under MoCo's fc: the head, and the tensor that has one number per dimension."""


class _View(NamedTuple):
    """The tensors under a prefix: the name in a trunk -> the name in the file."""

    prefix: str
    names: dict[str, str]
    numbered: bool


class _Fit(NamedTuple):
    """How well a view agrees with a backbone: the names that do, and those that do not, by why."""

    backbone: str
    view: _View
    channels: int
    agreeing: list[str]
    wrong: dict[str, list[str]]

    @property
    def score(self) -> tuple[bool, int]:
        wrong = sum(len(names) for names in self.wrong.values())
        return wrong == 0, len(self.agreeing) - wrong


class _Moco(NamedTuple):
    """What MoCo has beside the trunk; names: in imported.safetensors -> in the file."""

    head: Head
    dim: int
    queue_size: int | None
    names: dict[str, str]


def import_weights(
    file: Path, out: Path, *, backbone: str | None = None, image_size: int | None = None
) -> Run:
    """A run that every command accepts, with the trunk of a weights file from elsewhere.

    The backbone is recognised by names and shapes where `backbone` does not name it. Evaluation
    crops have `image_size` pixels: unset, what our own encoder says, 32 for backbones made for
    that, else 224. The config's method tells how MoCo files were trained; of others it is unknown
    and "moco-v2" stands there.
    """
    run = Run(out)
    for held in (run.config_file, run.encoder_file):
        if held.exists():
            raise InputError(f"--out {out} holds the {held.name} of a run: choose another folder.")
    source = read_weights(file)
    fit = _recognise(file, source, backbone)
    taken = {name: source.tensors[fit.view.names[name]] for name in fit.agreeing}
    moco = _moco(source, fit)
    beside = {k: source.tensors[name] for k, name in moco.names.items()} if moco else {}
    _check_finite(file, taken | beside)
    config = _config(source, fit, moco, image_size)
    data = config.data
    trunk = build_encoder(config.model, data.channels, image_size=data.image_size).trunk
    trunk.load_state_dict(trunk.state_dict() | taken)  # old files have no num_batches_tracked
    _write(run, trunk, config, beside)
    _report(run, config, source, fit, moco)
    _warn_of_statistics(trunk, config)
    return run


def _recognise(file: Path, source: Source, backbone: str | None) -> _Fit:
    """The backbone and the part of the file that agree in every name and shape."""
    ours = source.facts.get("backbone") if _is_ours(source) else None
    named = backbone or (ours if ours != OWN_TRUNK else None)
    fits = [
        _compare(source.tensors, name, view)
        for name in ([named] if named else BACKBONES)
        for view in _views("", {name: name for name in source.tensors})
    ]
    nearest = max(fits, key=lambda fit: fit.score)
    if not nearest.score[0]:
        raise InputError(_no_fit(file, nearest, backbone))
    if nearest.channels > MAX_CHANNELS:
        raise InputError(
            f"{file} is a {nearest.backbone} for images of {nearest.channels} channels: hardmix"
            f" takes 1 to {MAX_CHANNELS}; choose weights for fewer."
        )
    return nearest


def _views(prefix: str, names: dict[str, str]) -> Iterator[_View]:
    """The names as they are, then what is under each prefix among them."""
    numbered = {"0.weight", "4.0.conv1.weight"} <= names.keys()
    yield _View(prefix, _by_child(names) if numbered else names, numbered)
    for inner in PREFIXES:
        below = {k.removeprefix(inner): v for k, v in names.items() if k.startswith(inner)}
        if below:
            yield from _views(prefix + inner, below)


def _by_child(names: dict[str, str]) -> dict[str, str]:
    split = {name: name.partition(".") for name in names}
    return {f"{CHILDREN.get(a, a)}{dot}{b}": names[name] for name, (a, dot, b) in split.items()}


@cache
def _shapes(backbone: str) -> dict[str, torch.Size]:
    """Names and shapes of a trunk for three channels, without its numbers."""
    if backbone.startswith("timm:"):  # some of timm cannot be built without memory
        trunk = build_backbone(backbone).trunk
    else:
        with torch.device("meta"):
            trunk = build_backbone(backbone).trunk
    return {name: tensor.shape for name, tensor in trunk.state_dict().items()}


def _compare(tensors: Mapping[str, Tensor], backbone: str, view: _View) -> _Fit:
    wanted = dict(_shapes(backbone))
    found = {name: tensors[theirs].shape for name, theirs in view.names.items()}
    channels = 3
    stem = next((name for name, shape in wanted.items() if len(shape) == 4), "")
    if len(found.get(stem, ())) == 4:  # any number of channels fits
        channels = found[stem][1]
        wanted[stem] = torch.Size([wanted[stem][0], channels, *wanted[stem][2:]])
    bad = [name for name in wanted if name in found and found[name] != wanted[name]]
    wrong = {
        "misses": [n for n in wanted if n not in found and not n.endswith("batches_tracked")],
        "has unknown": [n for n in found if n not in wanted and not AFTER_TRUNK.match(n)],
        "has other shapes in": [f"{n} {[*found[n]]} instead of {[*wanted[n]]}" for n in bad],
    }
    agreeing = [name for name in wanted if found.get(name) == wanted[name]]
    return _Fit(backbone, view, channels, agreeing, wrong)


def _no_fit(file: Path, fit: _Fit, backbone: str | None) -> str:
    reasons = [
        f"{why} {len(names)} ({first_names(names)})" for why, names in fit.wrong.items() if names
    ]
    start = f"fits no backbone of hardmix; the nearest is {fit.backbone}"
    way_out = "name another with --backbone timm:NAME"
    if backbone is not None:
        start, way_out = f"does not fit --backbone {backbone}", "leave --backbone out"
    return (
        f"{file} {start}: of its tensors, the file {', '.join(reasons)}; {way_out}, or save the"
        " state_dict of the trunk alone."
    )


def _moco(source: Source, fit: _Fit) -> _Moco | None:
    """Head and queue of a MoCo checkpoint; the queue only where it has the head's dimension."""
    if not fit.view.prefix.endswith("encoder_q."):
        return None
    fc = {k.removeprefix("fc."): v for k, v in fit.view.names.items() if k.startswith("fc.")}
    head, last = MOCO_HEADS.get(frozenset(fc), (None, ""))
    if head is None:
        return None
    names = {f"head.{layer}": name for layer, name in fc.items()}
    dim = len(source.tensors[fc[last]])
    outer = fit.view.prefix.removesuffix("encoder_q.")
    queue = source.tensors.get(f"{outer}queue", torch.empty(0))
    if queue.ndim != 2 or len(queue) != dim or queue.numel() == 0:
        return _Moco(head, dim, None, names)
    held = [name for name in ("queue", "queue_ptr") if outer + name in source.tensors]
    return _Moco(head, dim, queue.shape[1], names | {name: outer + name for name in held})


def _check_finite(file: Path, tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        wrong = int((~tensor.float().isfinite()).sum())
        if wrong:
            raise InputError(
                f"{file}: the tensor {name} has {wrong} values that are no finite numbers; take an"
                " earlier checkpoint."
            )


def _config(
    source: Source, fit: _Fit, moco: _Moco | None, image_size: int | None
) -> PretrainConfig:
    method: MethodName = "moco-v1" if moco and moco.head == "linear" else "moco-v2"
    facts = source.facts if _is_ours(source) else {}
    method = next((known for known in METHOD_FACTS if known == facts.get("method")), method)
    if image_size is None:
        small = fit.backbone == "small" or fit.backbone.endswith("-cifar")
        said = facts.get("image_size", "")
        image_size = int(said) if said.isdecimal() else 32 if small else 224
    config = RECIPES["imagenet1k"].build(method, False)
    model, train = replace(config.model, backbone=fit.backbone), config.train
    if moco:
        model = replace(model, head=moco.head, dim=moco.dim)
        train = replace(train, queue_size=moco.queue_size or train.queue_size)
    data = replace(config.data, name=None, image_size=image_size, channels=fit.channels)
    return replace(config, recipe="imported", data=data, model=model, train=train)


def _write(run: Run, trunk: nn.Module, config: PretrainConfig, beside: dict[str, Tensor]) -> None:
    """The config last: a folder without one is no run, and can be imported into again."""
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        if beside:
            rows = {k: (v.T if k == "queue" else v).clone().contiguous() for k, v in beside.items()}
            write_atomically(run.path / IMPORTED, save(rows))
        run.write_encoder(trunk, config)
    except OSError as error:
        raise InputError(f"--out {run.path} cannot be written: {error.strerror}.") from error
    Run.create(run.path, config)


def _report(
    run: Run, config: PretrainConfig, source: Source, fit: _Fit, moco: _Moco | None
) -> None:
    used = {
        *(fit.view.names[name] for name in fit.agreeing),
        *(moco.names.values() if moco else ()),
    }
    left = [name for name in source.tensors if name not in used]
    queue = moco.queue_size if moco else None
    size = config.data.image_size
    rows = [
        ["layout", _layout(source, fit)],
        ["backbone", fit.backbone],
        ["images", f"{fit.channels} x {size} x {size}"],
        ["tensors taken", str(len(fit.agreeing))],
        ["tensors left out", f"{len(left)} ({first_names(left)})" if left else "0"],
        ["head", f"{moco.head}, {moco.dim} dimensions" if moco else "none"],
        ["queue", f"{queue} keys" if queue else "none"],
        ["epoch", "unknown" if source.epoch is None else str(source.epoch)],
    ]
    table("imported", ["", "found"], rows)
    if moco:
        say(f"{run.path / IMPORTED} keeps the head{' and the queue' if queue else ''}.")
    if fit.backbone.endswith("-cifar"):
        say("conv1 has 3 x 3 pixels: taken for a stem of stride 1 without max-pool.")
    folder = shlex.quote(str(run.path))
    say(f"next: hardmix knn {folder} --data.root DIR")
    say(f"      hardmix export {folder} --format onnx --out FILE")


def _layout(source: Source, fit: _Fit) -> str:
    kinds = {
        "hardmix": _is_ours(source),
        "MoCo": fit.view.prefix.endswith("encoder_q."),
        "lightly (numbered layers)": fit.view.numbered,
        "timm": fit.backbone.startswith("timm:"),
        "torchvision": True,
    }
    name = next(name for name, holds in kinds.items() if holds)
    return f"{name}, under {fit.view.prefix}" if fit.view.prefix else name


def _warn_of_statistics(trunk: nn.Module, config: PretrainConfig) -> None:
    known: Any = getattr(trunk, "pretrained_cfg", None) or {}
    ours = channel_statistics(config.data.channels)
    theirs = tuple(tuple(known.get(name, ())) for name in ("mean", "std"))
    if config.data.channels == 3 and all(theirs) and theirs != ours:
        warn(
            f"timm trains {config.model.backbone} with mean and deviation {theirs}, hardmix"
            f" normalises with {ours}: features of weights trained timm's way are worse than they"
            " could be."
        )


def _is_ours(source: Source) -> bool:
    return source.facts.get("format") == ENCODER_FORMAT
