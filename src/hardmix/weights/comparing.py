"""Checks on random images, before a file is written, that another program gives our features."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from hardmix.errors import InputError
from hardmix.evaluation.features import TrainedEncoder
from hardmix.runtime.console import say

TOLERANCE = 1e-3
"""Largest allowed difference of features, relative to the largest feature."""
ROUNDED = 2e-2
"""The same for resized images, whose uint8 values may differ by one between implementations."""


@torch.no_grad()
def compare(
    other: Callable[[Tensor], Tensor], encoder: TrainedEncoder, batches: tuple[int, ...], name: str
) -> None:
    """Print how much another program's features differ on random images; raise if too much."""
    size, generator = encoder.image_size, torch.Generator().manual_seed(0)
    worst = 0.0
    for number in batches:
        images = torch.randn(number, encoder.channels, size, size, generator=generator)
        worst = max(worst, difference(encoder(images), other(images)))
    if worst > TOLERANCE:
        raise InputError(
            f"features of {name} differ from hardmix's by {worst:.1e} of the largest, above the"
            f" limit of {TOLERANCE:.0e}: nothing was written; please report this."
        )
    say(f"Verified with {name} on random images: features differ by {worst:.1e} of the largest.")


def difference(
    ours: Float[Tensor, "batch features"], theirs: Float[Tensor, "batch features"]
) -> float:
    """Return the largest difference relative to the largest feature; infinite for NaN."""
    part = float((ours - theirs).abs().max() / ours.abs().max().clamp_min(1e-12))
    return part if part == part else float("inf")


@torch.no_grad()
def compare_whole(other: Callable[[Tensor], Tensor], encoder: TrainedEncoder) -> None:
    """Compare features of images of several sizes, preprocessed on both sides."""
    size, generator = encoder.image_size, torch.Generator().manual_seed(0)
    worst = 0.0
    sizes = [(size, size), (size // 2 + 1, size), (3 * size + 1, 2 * size), (size, 6 * size)]
    for height, width in sizes:
        shape = 2, encoder.channels, height, width
        images = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        ours = encoder(torch.stack([encoder.preprocess(image) for image in images]))
        worst = max(worst, difference(ours, other(images)))
    if worst > ROUNDED:
        raise InputError(
            f"features of onnxruntime with preprocessing differ from hardmix's by {worst:.1e} of"
            f" the largest, above the limit of {ROUNDED:.0e}: nothing was written; please report"
            " this."
        )
    say(f"Verified on random images of {len(sizes)} sizes: features differ by {worst:.1e}.")
