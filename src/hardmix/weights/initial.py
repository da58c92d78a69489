"""Weights that a run starts from: `model.init`, or those of an imported run."""

from pathlib import Path

from torch import Tensor, nn

from hardmix.errors import InputError
from hardmix.models.backbones import build_backbone
from hardmix.models.pretrained import fetch_pretrained
from hardmix.runs.folder import Run
from hardmix.runs.weight_files import Source, read_safetensors, read_weights
from hardmix.runtime.console import say
from hardmix.settings.config import PretrainConfig
from hardmix.weights.foreign import IMPORTED, check_finite
from hardmix.weights.pixel_statistics import adapt_statistics
from hardmix.weights.recognition import Fit, is_ours, recognise

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
    """Return the head and queue that `hardmix import` kept from a MoCo checkpoint, if any."""
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


def _fit(file: Path, source: Source, backbone: str, channels: int) -> Fit:
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
