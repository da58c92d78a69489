"""Alignment and uniformity on the unit sphere: how well an embedding space is used (App. A).

Definitions and signs follow Wang and Isola: both are losses, lower is better. (The paper prints
alignment with a stray minus sign, and plots both negated.) Features are normalised here.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hardmix.errors import InputError
from hardmix.mixing.checks import check_finite, check_labels
from hardmix.mixing.unit_length import unit_vectors

CHUNK = 2048
"""Features compared at once: two chunks of 2048 dimensions and their products are 0.05 GB."""


def alignment(features: Float[Tensor, "n dim"], labels: Int[Tensor, " n"]) -> float:
    """Return L_align (App. A): the mean squared distance of images of one class (alpha = 2).

    The mean is over all ordered pairs of different images of one class, pooled over the classes. On
    the unit sphere the sum over a class of n images with mean m is 2 n^2 (1 - |m|^2), so pairs need
    not be enumerated. Images with a negative label are ignored.
    """
    _check(features, labels)
    kept = labels >= 0
    classes, members = labels[kept].unique(return_inverse=True)
    count = members.bincount(minlength=len(classes)).double()
    if not bool((count > 1).any()):
        raise InputError(
            "labels has no class with two or more images: alignment compares images of one class."
        )
    total = torch.zeros(
        len(classes), features.shape[1], dtype=torch.float64, device=features.device
    )
    where = torch.full((len(labels),), -1, device=labels.device)
    where[kept] = members
    for rows, of_class in zip(features.split(CHUNK), where.split(CHUNK), strict=True):
        total.index_add_(0, of_class[of_class >= 0], _unit(rows[of_class >= 0]).double())
    distances = 2 * (count.square() - total.square().sum(dim=1))
    return float(distances.sum() / (count * (count - 1)).sum())


def uniformity(features: Float[Tensor, "n dim"], t: float = 2.0) -> float:
    """Return L_uniform (App. A): log of the mean Gaussian potential exp(-t |x - y|^2).

    The mean is exact, over all pairs of different images, computed in chunks.
    """
    _check(features)
    if not (math.isfinite(t) and t > 0):
        raise InputError(f"t={t} must be a finite number above 0: the paper uses 2.")
    number, total = len(features), 0.0
    if number < 2:
        raise InputError(f"features hold {number} image: uniformity needs two or more.")
    for start in range(0, number, CHUNK):
        rows = _unit(features[start : start + CHUNK])
        for other in range(start, number, CHUNK):
            columns = rows if other == start else _unit(features[other : other + CHUNK])
            # |x - y|^2 = 2 - 2 x.y
            potential = (rows @ columns.T).sub_(1).mul_(2 * t).exp_()
            if other == start:
                potential = potential.triu_(diagonal=1)
            total += float(potential.sum(dtype=torch.float64))
    return math.log(total / (number * (number - 1) / 2))


def _unit(features: Tensor) -> Tensor:
    return unit_vectors("features", features.detach(), check=False)


def _check(features: Tensor, labels: Tensor | None = None) -> None:
    if features.ndim != 2 or not features.is_floating_point():
        raise InputError(
            f"features have shape {tuple(features.shape)} and dtype {features.dtype}: they must be"
            " a two-dimensional floating-point tensor with one image per row."
        )
    if labels is not None:
        check_labels("labels", labels, len(features), "features")
    check_finite(features=features)
    empty = (features == 0).all(dim=1)
    if bool(empty.any()):
        raise InputError(
            f"features[{int(empty.nonzero()[0])}] has length 0 and cannot be normalised:"
            " leave such images out."
        )
