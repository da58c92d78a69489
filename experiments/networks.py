"""The network of the point `wider`: `small` with every layer twice as wide."""

from torch import nn

from hardmix.models.backbones import SmallResNet


class WideResNet(SmallResNet):
    """1.7 M parameters, 512 features."""

    WIDTHS = (64, 128, 256, 512)


def wide(channels: int = 3) -> nn.Module:
    """Return the network of `model.backbone = "networks:wide"`, with experiments on PYTHONPATH."""
    return WideResNet(channels)
