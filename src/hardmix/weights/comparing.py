"""Whether another program gives our features: seen on random images before a file is written."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from hardmix.errors import InputError
from hardmix.evaluation.features import TrainedEncoder
from hardmix.runtime.console import say

TOLERANCE = 1e-3
"""Features may differ by this part of the largest feature; anything above is another network."""
ROUNDED = 2e-2
"""The same where images are resized: a decoder's uint8 and the graph's may differ by one step."""


@torch.no_grad()
def compare(
    other: Callable[[Tensor], Tensor], encoder: TrainedEncoder, batches: tuple[int, ...], name: str
) -> None:
    """Say by how much another program's features differ on random images; refuse another net's."""
    size, generator = encoder.image_size, torch.Generator().manual_seed(0)
    worst = 0.0
    for number in batches:
        images = torch.randn(number, encoder.channels, size, size, generator=generator)
        worst = max(worst, difference(encoder(images), other(images)))
    if worst > TOLERANCE:
        raise InputError(
            f"features of {name} differ from ours by {worst:.1e} of the largest, above the limit"
            f" {TOLERANCE:.0e}: nothing was written; please report it."
        )
    say(f"Compared with {name} on random images: features differ by {worst:.1e} of the largest.")


def difference(
    ours: Float[Tensor, "batch features"], theirs: Float[Tensor, "batch features"]
) -> float:
    """The largest difference, as a part of the largest feature; infinite where one is no number."""
    part = float((ours - theirs).abs().max() / ours.abs().max().clamp_min(1e-12))
    return part if part == part else float("inf")


@torch.no_grad()
def compare_whole(other: Callable[[Tensor], Tensor], encoder: TrainedEncoder) -> None:
    """The same for images of several sizes, with the preprocessing on both sides."""
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
            f"features of onnxruntime, with the preprocessing, differ from ours by {worst:.1e} of"
            f" the largest, above the limit {ROUNDED:.0e}: nothing was written; please report it."
        )
    say(f"Compared on random images of {len(sizes)} sizes: features differ by {worst:.1e}.")
