"""Images to measure with: real ones if the user names a folder, otherwise generated ones."""

from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image

from hardmix.data.image_set import ImageSet
from hardmix.data.sources import open_images
from hardmix.settings.config import DataConfig

PHOTOGRAPH = (500, 375)
"""Width and height, near ImageNet's mean."""
JPEG_QUALITY = 92
"""Quality at which a generated file has about as many bytes as one of ImageNet, 110 KB."""


def small_data(root: str | None, size: int = 32, number: int | None = None) -> DataConfig:
    """Return CIFAR-10 or generated shapes, with MoCo-v2's views including blur."""
    if root is not None:
        return DataConfig(name="cifar10", root=root, image_size=size)
    return DataConfig(name="shapes", num_images=number, image_size=size)


def photographs(root: str | None, folder: Path, number: int) -> ImageSet:
    """Return the photographs in the user's folder, or generated ones written to `folder`."""
    if root is None:
        for index in range(number):
            Image.fromarray(_picture(index)).save(folder / f"{index}.jpg", quality=JPEG_QUALITY)
    # Decoded every time, as if the set were too large to be kept.
    return open_images(DataConfig(name="folder", root=root or str(folder), cache="off"))


def as_files(images: ImageSet, folder: Path) -> ImageSet:
    """Return images that are in memory as PNG files, each of which is decoded once."""
    assert images.tensor is not None
    for index, image in enumerate(images.tensor.permute(0, 2, 3, 1)):
        Image.fromarray(image.numpy()).save(folder / f"{index:06}.png", compress_level=1)
    return open_images(DataConfig(name="folder", root=str(folder), cache="memory"))


def repeated(images: ImageSet, number: int) -> ImageSet:
    """Return this many images, repeating those that exist."""
    return images.select(torch.arange(number) % len(images))


def listed(folder: Path, number: int) -> str:
    """Return a list with one small image repeated, for steps that get their batches otherwise."""
    Image.new("RGB", (8, 8)).save(folder / "black.png")
    file = folder / "images.txt"
    file.write_text("black.png\n" * number)
    return str(file)


def _picture(seed: int) -> UInt8[np.ndarray, "height width 3"]:
    """Return smooth colours with grain, about as costly to decode as a photograph."""
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (12, 16, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize(PHOTOGRAPH, Image.Resampling.BICUBIC))
    grain = generator.normal(0, 10, smooth.shape)
    return np.clip(smooth + grain, 0, 255).astype(np.uint8)
