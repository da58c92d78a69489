"""Kinds of views: how many of an image, how large, cut from how much of it.

MoCo has two of one kind. SwAV has small ones beside them, PIRL one that it cuts into tiles. Views
are numbered through all kinds, so that another kind leaves the views before it as they were.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from jaxtyping import Float32, Int64, UInt8
from torch import Tensor

from hardmix.data.augment import colour_views, crop_views, make_views
from hardmix.errors import InputError
from hardmix.settings.config import DataConfig
from hardmix.settings.named_choices import Augmentation

Crops = Sequence[UInt8[Tensor, "_ batch channels _ _"]]
"""Of each kind, what is to be coloured."""
Views = tuple[Float32[Tensor, "batch channels _ _"], ...]
"""The views of all kinds, normalised."""


class ViewKind(NamedTuple):
    """Views of an image that are made alike; where it says None, as data.* does."""

    number: int = 1
    """How many of them."""
    size: int | None = None
    """Height and width in pixels, instead of data.image_size."""
    scale: tuple[float, float] | None = None
    """Least and most area of the crop, as fractions of the image; else data.min_scale to 1."""
    augmentation: Augmentation | None = None
    """What is applied after the crop, instead of data.augmentation."""


class _Making(NamedTuple):
    """How the views of a kind are made."""

    config: DataConfig
    views: int
    first: int
    """Number of the kind's first view among all views."""
    max_scale: float


class ViewMaker:
    """Makes the views of images of all kinds; a function of (seed, epoch, image, view) alone."""

    def __init__(self, kinds: Sequence[ViewKind], config: DataConfig, seed: int) -> None:
        self.config, self.seed = config, seed
        self.number = sum(kind.number for kind in kinds)
        self._makings = [
            _making(kind, config, sum(before.number for before in kinds[:place]))
            for place, kind in enumerate(kinds)
            if kind.number
        ]

    @property
    def on_cpu(self) -> bool:
        """Whether colours are changed on the CPU even if a GPU trains: RandAugment's are."""
        return self.config.augmentation == "infomin"

    def numbers_of(self, channels: int) -> int:
        """Return how many numbers the views of one image have."""
        return sum(each.views * channels * each.config.image_size**2 for each in self._makings)

    def make(
        self,
        images: UInt8[Tensor, "batch channels height width"],
        ids: Int64[Tensor, " batch"],
        epoch: int,
    ) -> Views:
        """The views of images of one size, on their device."""
        made = (
            make_views(images, ids, each.config, self.seed, epoch, *each[1:])
            for each in self._makings
        )
        return tuple(view for views in made for view in views)

    def crop(
        self,
        images: Sequence[Tensor] | UInt8[Tensor, "batch channels height width"],
        ids: Int64[Tensor, " batch"],
        epoch: int,
    ) -> Crops:
        """The first half of `make` for images of any size: a worker's part."""
        return [
            crop_views(images, ids, each.config, self.seed, epoch, *each[1:])
            for each in self._makings
        ]

    def colour(
        self,
        crops: Crops,
        ids: Int64[Tensor, " batch"],
        epoch: int,
        out: Sequence[Float32[Tensor, "_ batch channels _ _"] | None] | None = None,
    ) -> Views:
        """The second half, for what `crop` gave; into `out`, if there is one."""
        places = out or [None] * len(crops)
        made = (
            colour_views(crop, ids, each.config, self.seed, epoch, place, first=each.first)
            for crop, each, place in zip(crops, self._makings, places, strict=True)
        )
        return tuple(view for views in made for view in views)


def _making(kind: ViewKind, config: DataConfig, first: int) -> _Making:
    least, most = kind.scale or (config.min_scale, 1.0)
    own = replace(
        config,
        image_size=kind.size or config.image_size,
        min_scale=least,
        augmentation=kind.augmentation or config.augmentation,
    )
    return _Making(own, kind.number, first, most)


def usual_views(number: int) -> tuple[ViewKind, ...]:
    """Return the kinds of a method whose views are all as data.* says."""
    return (ViewKind(number),)


def check_own_pipelines(kinds: Sequence[ViewKind]) -> None:
    """Raise InputError if views of these kinds cannot come from data.views."""
    if any(kind != ViewKind(kind.number) for kind in kinds):
        sizes = ", ".join(f"{kind.number} of {kind.size or 'data.image_size'} px" for kind in kinds)
        raise InputError(
            f"data.views makes views of one size, but this method needs {sizes}: leave data.views"
            " unset, or choose another method."
        )
