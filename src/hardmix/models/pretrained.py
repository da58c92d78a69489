"""Pre-trained weights of timm and torchvision, which may need a download."""

from importlib import import_module

import torchvision.models as torchvision_models
from torch import nn

from hardmix.errors import InputError
from hardmix.models.backbones import RESNETS, build_backbone, parse_timm


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
