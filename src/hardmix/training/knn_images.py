"""The images that k-NN accuracy is measured on, opened before the first step.

It is measured during training and for the verdict at the end.
"""

from typing import NamedTuple

from hardmix.data.datasets import has_test, open_images
from hardmix.data.image_set import ImageSet
from hardmix.runtime.console import say
from hardmix.settings.config import PretrainConfig

KNN_IMAGES = 10_000
"""Maximum number of images of each split for k-NN accuracy during training."""


class KnnImages(NamedTuple):
    """Labelled images for k-NN accuracy during training."""

    bank: ImageSet
    """Training images, which vote."""
    test: ImageSet | None
    """Images that are classified; None means the bank itself, leaving one out."""


def open_knn_images(config: PretrainConfig, images: ImageSet | None) -> KnnImages | None:
    """Return the labelled images of both splits, or None if k-NN cannot be measured."""
    seed = config.train.seed
    bank = None if images is None else _with_classes(images, seed)
    if bank is None or not (config.train.knn_every or config.train.verdict):
        return None
    if not has_test(config.data):
        return KnnImages(bank, None)
    test = _with_classes(open_images(config.data, "test", seed), 0)
    if test is None:
        say("The test images have no labels: k-NN is measured among the training images.")
    return KnnImages(bank, test)


def _with_classes(images: ImageSet, seed: int) -> ImageSet | None:
    """Two or more whose class is known, or None."""
    if images.labels is None or int((images.labels >= 0).sum()) < 2:
        return None
    return images.labelled().subset(KNN_IMAGES, seed)
