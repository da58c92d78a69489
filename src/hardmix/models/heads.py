"""Projection heads, between a trunk's features and the loss."""

from collections.abc import Callable

from torch import nn

from hardmix.settings.named_choices import Head


def batch_norm_mlp(width: int, hidden: int, dim: int) -> nn.Sequential:
    """Two layers with batch norm between them: the heads of BYOL and SwAV."""
    return nn.Sequential(
        nn.Linear(width, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, dim)
    )


HEADS: dict[Head, Callable[[int, int], nn.Module]] = {
    "linear": nn.Linear,
    "mlp": lambda width, dim: nn.Sequential(
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, dim)
    ),
    "mlp-bn": lambda width, dim: nn.Sequential(
        nn.Linear(width, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, dim, bias=False),
        nn.BatchNorm1d(dim),
    ),
}
"""Heads from width to dim: MoCo-v1's layer, MoCo-v2's two, with `width` hidden units, and SimCLR's,
with batch norm after both (official code, `proj_head_mode` nonlinear)."""
