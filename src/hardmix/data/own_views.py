"""Views from your own pipeline: torchvision v2, albumentations, or any function.

It is called once per view. The generators of torch, NumPy and Python are seeded before each call,
so that a view is a function of (seed, epoch, image, view). A result in uint8 is scaled and
normalised as in evaluation; floats are used as they are.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, Int64, UInt8
from PIL import Image
from torch import Tensor

from hardmix.data.colours import channel_statistics, normalise
from hardmix.errors import InputError
from hardmix.runtime.own_code import call_own, load_own
from hardmix.runtime.random_numbers import seed_of
from hardmix.settings.config import DataConfig

Pipeline = Callable[..., Any]
"""Function from an image, uint8 (channels, height, width), to a view, (channels, size, size)."""

OWN_VIEWS = "own"
"""The value of data.views if the program passed its own pipeline."""


def choose_pipelines(
    config: DataConfig, own: Pipeline | Sequence[Pipeline] | None, views: int
) -> tuple[Pipeline, ...] | None:
    """Return a pipeline for every view if the program or data.views gives one, otherwise None."""
    if own is None and config.views == OWN_VIEWS:
        raise InputError(
            "data.views=own means a pipeline that was passed by a program: pass it again, as"
            " pretrain(..., views=...), or name it as data.views='mypackage:make_views'."
        )
    if own is None and config.views is None:
        return None
    if own is None:
        make = load_own(config.views or "", "data.views")
        own = call_own(make, "data.views", image_size=config.image_size, channels=config.channels)
    pipelines: tuple[Any, ...] = tuple(own) if isinstance(own, list | tuple) else (own,) * views
    if len(pipelines) != views or not all(callable(pipeline) for pipeline in pipelines):
        raise InputError(
            f"data.views gives {own!r}: it must be a callable that makes a view of an image, or a"
            f" list of {views}, one for each view."
        )
    return pipelines


def make_own_views(
    images: Sequence[UInt8[Tensor, "channels _ _"]],
    ids: Int64[Tensor, " batch"],
    pipelines: Sequence[Pipeline],
    config: DataConfig,
    seed: int,
    epoch: int,
) -> Float32[Tensor, "views batch channels size size"]:
    """Return every view of these images."""
    size = config.image_size
    views = torch.empty(len(pipelines), len(images), config.channels, size, size)
    with _randomness_kept():
        for number, pipeline in enumerate(pipelines):
            for row, (image, index) in enumerate(zip(images, ids.tolist(), strict=True)):
                _seed(pipeline, seed_of("own views", seed, epoch, index, number))
                views[number, row] = _one_view(pipeline, image, config)
    return views


def _one_view(pipeline: Pipeline, image: Tensor, config: DataConfig) -> Tensor:
    try:
        if _is_albumentations(pipeline):
            result = pipeline(image=image.permute(1, 2, 0).contiguous().numpy())["image"]
        else:
            result = pipeline(image)
        view = _as_tensor(result)
    except Exception as error:
        raise InputError(
            f"data.views: {_name(pipeline)} failed on an image of shape {tuple(image.shape)} with"
            f" {type(error).__name__}: {error}."
        ) from error
    wanted = (config.channels, config.image_size, config.image_size)
    if tuple(view.shape) != wanted:
        raise InputError(
            f"data.views: {_name(pipeline)} makes views of shape {tuple(view.shape)}, and"
            f" data.channels and data.image_size require {wanted}: let it crop to that size."
        )
    if view.dtype != torch.uint8:
        return view.float()
    mean, std = channel_statistics(config.channels)
    return normalise(view[None].float().div_(255), mean, std)[0]


def _as_tensor(result: Any) -> Tensor:
    if isinstance(result, Tensor):
        return result.as_subclass(Tensor)
    array = np.asarray(result) if isinstance(result, Image.Image) else result
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"it returned a {type(result).__name__}, not a tensor, an array or an image"
        )
    return torch.from_numpy(np.atleast_3d(array).copy()).permute(2, 0, 1)


def _seed(pipeline: Pipeline, seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if _is_albumentations(pipeline):  # it has its own generators
        # One for all of its steps: generators of the same seed would draw the same numbers.
        pipeline.set_random_state(np.random.default_rng(seed), random.Random(seed))  # type: ignore[attr-defined]


def _is_albumentations(pipeline: Pipeline) -> bool:
    return type(pipeline).__module__.split(".")[0] == "albumentations"


def _name(pipeline: Pipeline) -> str:
    return getattr(pipeline, "__name__", type(pipeline).__name__)


@contextmanager
def _randomness_kept() -> Iterator[None]:
    """Restore the program's random number generators when the context ends."""
    of_torch, of_numpy, of_python = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        np.random.set_state(of_numpy)
        random.setstate(of_python)
