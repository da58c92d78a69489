"""Weights of other programs imported as a run: hardmix import FILE --out RUN.

Supported are checkpoints of official MoCo, state dicts of torchvision, timm and lightly, and
hardmix's own encoders. Code in a file is never executed. Networks are recognised by names and
shapes only: those that differ in strides or pooling (timm's resnetblur50) must be named by
`backbone`.
"""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hardmix.data.colours import channel_statistics
from hardmix.errors import InputError
from hardmix.evaluation.hub import WEIGHTS, is_shared, located
from hardmix.models.backbones import RESNETS, build_backbone, fetch_pretrained
from hardmix.models.encoders import build_encoder
from hardmix.runs.folder import Run
from hardmix.runs.weight_files import SavedWeights, first_names, read_safetensors, read_weights
from hardmix.runtime.console import say, table, warn
from hardmix.runtime.files import write_atomically
from hardmix.runtime.own_code import allowing
from hardmix.settings.config import PretrainConfig
from hardmix.settings.methods import METHOD_FACTS, MethodName
from hardmix.settings.recipes import RECIPES
from hardmix.weights.recognition import Fit, MocoParts, is_ours, moco_parts, recognise

IMPORTED = "imported.safetensors"
"""Beside the trunk of a MoCo checkpoint: head.*, key.trunk.*, key.head.*, queue, queue_ptr."""


def import_weights(
    file: Path | str,
    out: Path | str,
    *,
    backbone: str | None = None,
    image_size: int | None = None,
) -> Run:
    """Import a file of weights as a run that every command accepts.

    `file` may be a folder that `hardmix export --format hf` wrote, or "hf:owner/name" on the Hub.
    Unless `backbone` names it, the backbone is recognised by names and shapes. `image_size` is the
    size of evaluation crops in pixels; None means what a hardmix encoder records, 32 for backbones
    made for that, and otherwise 224. The config's method is that of MoCo files; for others it is
    unknown and set to "moco-v2".
    """
    run = Run(out)
    for held in (run.config_file, run.encoder_file):
        if held.exists():
            raise InputError(f"out={out} already has a run's {held.name}: choose another folder.")
    place = located(file)
    file = place / WEIGHTS if is_shared(place) else place
    source = read_weights(file)
    with allowing(*([backbone] if backbone else ())):
        fit = recognise(file, source, backbone)
        taken = {name: source.tensors[fit.view.names[name]] for name in fit.agreeing}
        moco = moco_parts(source, fit)
        beside = {k: source.tensors[name] for k, name in moco.names.items()} if moco else {}
        check_finite(file, taken | beside)
        config = _config(source, fit, moco, image_size)
        data = config.data
        trunk = build_encoder(config.model, data.channels, image_size=data.image_size).trunk
    trunk.load_state_dict(trunk.state_dict() | taken)  # old files have no num_batches_tracked
    adapt_statistics(trunk, config.model.backbone, data.channels, data.image_size)
    _write(run, trunk, config, beside)
    _report(run, config, source, fit, moco)
    return run


def check_finite(file: Path, tensors: dict[str, Tensor]) -> None:
    """Raise InputError if weights contain NaN or infinity."""
    for name, tensor in tensors.items():
        wrong = int((~tensor.float().isfinite()).sum())
        if wrong:
            raise InputError(
                f"{file}: the tensor {name} has {wrong} values that are NaN or infinite; use an"
                " earlier checkpoint."
            )


def _config(
    source: SavedWeights, fit: Fit, moco: MocoParts | None, image_size: int | None
) -> PretrainConfig:
    method: MethodName = "moco-v1" if moco and moco.head == "linear" else "moco-v2"
    facts = source.facts if is_ours(source) else {}
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
    """Write the config last: a folder without one is not a run, and the import can be repeated."""
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        if beside:
            rows = {k: (v.T if k == "queue" else v).clone().contiguous() for k, v in beside.items()}
            write_atomically(run.path / IMPORTED, save(rows))
        run.write_encoder(trunk, config)
    except OSError as error:
        raise InputError(f"out={run.path} cannot be written: {error.strerror}.") from error
    Run.create(run.path, config)


def _report(
    run: Run, config: PretrainConfig, source: SavedWeights, fit: Fit, moco: MocoParts | None
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
        ["tensors not used", f"{len(left)} ({first_names(left)})" if left else "0"],
        ["head", f"{moco.head}, {moco.dim} dimensions" if moco else "none"],
        ["queue", f"{queue} keys" if queue else "none"],
        ["epoch", "unknown" if source.epoch is None else str(source.epoch)],
    ]
    table("imported", ["", "found"], rows)
    if moco:
        keyed = any(name.startswith("key.") for name in moco.names)
        found = ["head", *["queue"] * bool(queue), *["key encoder"] * keyed]
        say(f"Beside the encoder, {run.path / IMPORTED} has the {', the '.join(found)}.")
    if fit.backbone.endswith("-cifar"):
        say("conv1 has 3 x 3 pixels: assuming a stem of stride 1 without max-pool.")
    folder = shlex.quote(str(run.path))
    say(f"Next: hardmix linear {folder} --data.root DIR --preset imagenet1k")
    say(f"      hardmix knn {folder} --data.root DIR")
    if fit.backbone in RESNETS and fit.channels == 3:
        say(f"      hardmix detect {folder} --task voc --data.root VOCdevkit")
    say(f"      hardmix export {folder} --format onnx --out FILE")


def _layout(source: SavedWeights, fit: Fit) -> str:
    kinds = {
        "hardmix": is_ours(source),
        "MoCo": fit.view.prefix.endswith("encoder_q."),
        "lightly (numbered layers)": fit.view.numbered,
        "timm": fit.backbone.startswith("timm:"),
        "torchvision": True,
    }
    name = next(name for name, holds in kinds.items() if holds)
    return f"{name}, under {fit.view.prefix}" if fit.view.prefix else name


FETCHED = ("timm", "torchvision")
"""Values of `model.init` that stand for a library's own pre-trained weights."""


def initial_trunk(config: PretrainConfig, run: Run) -> nn.Module | None:
    """Return the trunk to start from; None for random weights or those of a checkpoint."""
    init = config.model.init
    if init is None and is_imported(config, run):
        init = str(run.encoder_file)
    if init is None or any(run.checkpoints.glob("step-*")):
        return None
    data, backbone = config.data, config.model.backbone
    if init in FETCHED:
        trunk = fetch_pretrained(init, backbone, data.channels)
        foreign = True
    else:
        file = weights_file(init)
        source = read_weights(file)
        fit = _fit(file, source, backbone, data.channels)
        trunk = build_backbone(backbone, data.channels, data.image_size).trunk
        taken = {name: source.tensors[fit.view.names[name]] for name in fit.agreeing}
        check_finite(file, taken)
        trunk.load_state_dict(trunk.state_dict() | taken)
        foreign = not is_ours(source)
    if foreign:
        adapt_statistics(trunk, backbone, data.channels, data.image_size)
    say(f"Starting from {init}; the trunk's learning rate is {config.trunk_lr:g} x optimizer.lr.")
    return trunk


def is_imported(config: PretrainConfig, run: Run) -> bool:
    """Return whether the run was made by `hardmix import` and never trained."""
    return config.recipe == "imported" and run.encoder_file.exists()


def imported_parts(config: PretrainConfig, run: Run) -> dict[str, Tensor]:
    """Return the head, queue and key encoder that `hardmix import` kept, if any."""
    file = run.path / IMPORTED
    return read_safetensors(file).tensors if is_imported(config, run) and file.exists() else {}


def weights_file(init: str) -> Path:
    """Return the file of `model.init`: itself, or a run's encoder."""
    path = Path(init).expanduser()
    if not path.is_dir():
        return path
    file = Run.open(path).encoder_file
    if not file.exists():
        raise InputError(
            f"model.init={init} has no encoder.safetensors: finish that run first, with"
            f" hardmix pretrain --out {init} --resume."
        )
    return file


def recognised_backbone(init: str) -> str:
    """Return the backbone recognised in the file of `model.init`."""
    file = weights_file(init)
    return recognise(file, read_weights(file), None).backbone


def _fit(file: Path, source: SavedWeights, backbone: str, channels: int) -> Fit:
    try:
        fit = recognise(file, source, backbone)
    except InputError as error:
        try:
            found = recognise(file, source, None).backbone
        except InputError:
            raise error from None
        raise InputError(
            f"model.init={file} has the weights of a {found}, but model.backbone={backbone}: set"
            f" model.backbone to {found}."
        ) from None
    if fit.channels != channels:
        raise InputError(
            f"model.init={file} is for images of {fit.channels} channels, but"
            f" data.channels={channels}: choose other weights, or leave model.init unset."
        )
    return fit


CLOSE = 0.05
"""Largest relative difference of features that the border may cause."""


@torch.no_grad()
def adapt_statistics(trunk: nn.Module, backbone: str, channels: int, image_size: int) -> None:
    """Adapt a trunk with timm's weights to hardmix's normalisation; prints or warns."""
    known: Any = getattr(trunk, "pretrained_cfg", None) or {}
    mean, std = (torch.tensor(known.get(name, ())) for name in ("mean", "std"))
    our_mean, our_std = map(torch.tensor, channel_statistics(channels))
    if channels != 3 or len(mean) != 3 or len(std) != 3:
        return
    if torch.allclose(mean, our_mean) and torch.allclose(std, our_std):
        return
    pixels = torch.rand(4, 3, image_size, image_size, generator=torch.Generator().manual_seed(0))
    training = trunk.training
    trunk.eval()
    before = {name: value.clone() for name, value in trunk.state_dict().items()}
    wanted = trunk(_normalised(pixels, mean, std))
    folded = _fold(trunk, our_std / std, (our_mean - mean) / std)
    error = (trunk(_normalised(pixels, our_mean, our_std)) - wanted).norm() / wanted.norm()
    if folded and float(error) < CLOSE:
        say(
            f"{backbone} was trained on pixels normalised with mean {mean.tolist()} and deviation"
            f" {std.tolist()}: its first layer was adapted to hardmix's normalisation."
        )
    else:
        trunk.load_state_dict(before)
        warn(
            f"{backbone} was trained on pixels normalised with mean {mean.tolist()} and deviation"
            f" {std.tolist()}, but hardmix uses {our_mean.tolist()} and {our_std.tolist()}: its"
            " features are worse than they could be."
        )
    trunk.train(training)


def _fold(trunk: nn.Module, factor: Tensor, shift: Tensor) -> bool:
    """Fold factor and shift into the first layers; False if no layer can take the shift."""
    layers = [each for each in trunk.modules() if isinstance(each, nn.Conv2d | _BatchNorm)]
    if not layers or not isinstance(layers[0], nn.Conv2d) or layers[0].in_channels != len(factor):
        return False
    first = layers[0]
    added = first.weight.sum(dim=(2, 3)) @ shift
    first.weight.mul_(factor[:, None, None])
    if first.bias is not None:
        first.bias.add_(added)
        return True
    behind = layers[1] if len(layers) > 1 else None
    if not isinstance(behind, _BatchNorm) or behind.running_mean is None:
        return False
    behind.running_mean.sub_(added)
    return True


def _normalised(pixels: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    return (pixels - mean[:, None, None]) / std[:, None, None]
