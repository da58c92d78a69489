"""The encoder that a folder is explored with: weights at hand, or plain features that need none."""

from pathlib import Path

from hardmix.errors import InputError
from hardmix.evaluation.baselines import PlainFeatures
from hardmix.evaluation.trained_encoder import TrainedEncoder, load_encoder
from hardmix.models.backbones import build_backbone, fetch_pretrained
from hardmix.runs.folder import Run
from hardmix.runs.weight_files import read_weights
from hardmix.weights.foreign import FETCHED, adapt_statistics, check_finite
from hardmix.weights.recognition import is_ours, recognise

PLAIN_SIZE = 96
"""Side in pixels of the images that plain features are computed of."""
FETCHED_SIZE = 224
"""Side in pixels of the images that other libraries' weights are for."""
FETCHED_BACKBONES = {"timm": "timm:tf_efficientnet_lite0", "torchvision": "resnet18"}
"""The small networks that "timm" and "torchvision" stand for."""
PLAIN = (
    "No weights were named: images are compared by colours, their layout and the directions of"
    " edges, which find what looks alike, not what is alike; --weights timm, or a RUN of your own,"
    " is better at that."
)


def encoder_of(weights: Path | str | None, channels: int = 3) -> tuple[TrainedEncoder, str]:
    """Return an encoder, and a sentence that says which.

    Args:
        weights: a run, a file of weights, "hf:owner/name", "timm" or "torchvision" for a small
            network of theirs, "timm:NAME" for another one, or None for `PlainFeatures`.
        channels: channels of the images.
    """
    if weights is None:
        return TrainedEncoder(PlainFeatures(), "plain", PLAIN_SIZE, channels).eval(), PLAIN
    name = str(weights)
    library = name.partition(":")[0]
    if library in FETCHED and not Path(name).exists():
        backbone = (
            FETCHED_BACKBONES[library] if name == library else name.removeprefix("torchvision:")
        )
        try:
            trunk = fetch_pretrained(library, backbone, channels)
        except InputError as error:  # it speaks of the setting of training
            raise InputError(str(error).replace("model.init", "weights")) from error
        adapt_statistics(trunk, backbone, channels, FETCHED_SIZE)
        encoder = TrainedEncoder(trunk, backbone, FETCHED_SIZE, channels)
        return encoder.eval(), f"Images are compared by {backbone} with {library}'s weights."
    if not name.startswith("hf:") and not Path(name).exists():
        raise InputError(
            f"weights={name} does not exist: name a run, a file of weights, hf:owner/name, timm,"
            " timm:NAME or torchvision; without weights, plain features are used."
        )
    if name.startswith("hf:") or Path(name).is_dir() or _is_encoder(Path(name)):
        encoder = load_encoder(weights, or_checkpoint=Run(Path(name)).exists)
        return encoder, f"Images are compared by the encoder of {name}."
    return _foreign(Path(name))


def _is_encoder(file: Path) -> bool:
    return file.suffix == ".safetensors" and is_ours(read_weights(file))


def _foreign(file: Path) -> tuple[TrainedEncoder, str]:
    """Return the encoder in a file of another program."""
    source = read_weights(file)
    fit = recognise(file, source, None)
    size = 32 if fit.backbone == "small" or fit.backbone.endswith("-cifar") else FETCHED_SIZE
    taken = {name: source.tensors[fit.view.names[name]] for name in fit.agreeing}
    check_finite(file, taken)
    trunk = build_backbone(fit.backbone, fit.channels, size).trunk
    trunk.load_state_dict(trunk.state_dict() | taken)
    adapt_statistics(trunk, fit.backbone, fit.channels, size)
    encoder = TrainedEncoder(trunk, fit.backbone, size, fit.channels, file)
    return encoder.eval(), f"Images are compared by the {fit.backbone} of {file}."
