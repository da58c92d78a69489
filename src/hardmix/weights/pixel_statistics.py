"""Weights trained on pixels normalised differently, adapted to hardmix's normalisation.

With x = (p - m) / s for hardmix's pixels and (p - m') / s' for theirs, theirs are
x s/s' + (m - m')/s': the factor goes into the first convolution, the shift into its bias or the
batch norm after it. Only the border differs, where a convolution pads with zeros, which are
another grey.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hardmix.data.augment import channel_statistics
from hardmix.runtime.console import say, warn

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
