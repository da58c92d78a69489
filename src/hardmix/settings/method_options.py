"""Settings that only one method has: --NAME.* on the command line. Imports no torch.

Defaults are the published ones for ImageNet; recipes change them for small images.
"""

from dataclasses import dataclass

from hardmix.errors import InputError
from hardmix.settings.bounds import check_above, check_at_least, check_between
from hardmix.settings.facts import setting
from hardmix.settings.named_choices import KMeans


@dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """Base class of the settings that only one method has; on the command line, --NAME.*."""


@dataclass(frozen=True, kw_only=True)
class ByolOptions(MethodOptions):
    """BYOL's projector and predictor."""

    hidden: int = setting(4096, name="hidden units")
    """Hidden units of projector and predictor."""

    def __post_init__(self) -> None:
        check_at_least(self, "byol", hidden=1)


@dataclass(frozen=True, kw_only=True)
class Co2Options(MethodOptions):
    """CO2's consistency term."""

    weight: float = setting(1.0, label="consistency x {}")
    """alpha: weight of the consistency term; that of MoCo's loss is 1."""
    temperature: float = setting(0.05, label="consistency at tau = {}")
    """Temperature of the two distributions over the queue."""

    def __post_init__(self) -> None:
        check_at_least(self, "co2", weight=0)
        check_above(self, "co2", temperature=0)


@dataclass(frozen=True, kw_only=True)
class UnmixOptions(MethodOptions):
    """Image Mixture (Un-Mix)."""

    beta: float = setting(1.0, label="Beta({0}, {0})")
    """lambda, the share of the image itself, is drawn from Beta(beta, beta), once per step."""
    mixup: float = setting(0.5, label="mixup in {} of the steps")
    """Share of the steps that mix whole images (mixup); the others paste a rectangle (CutMix)."""

    def __post_init__(self) -> None:
        check_above(self, "unmix", beta=0)
        check_between(self, "unmix", 0.0, 1.0, "mixup")


@dataclass(frozen=True, kw_only=True)
class InstDisOptions(MethodOptions):
    """Instance discrimination with a bank of all images."""

    bank_momentum: float = setting(0.5, label="bank momentum {}")
    """Share of an image's old embedding in the bank when its new one is written."""

    def __post_init__(self) -> None:
        check_between(self, "instdis", 0.0, 1.0, "bank_momentum")


def jigsaw_sizes(image_size: int) -> tuple[int, int]:
    """Pixels of a jigsaw and of its tiles, in proportion: the published 255 and 64 for 224."""
    return 3 * round(image_size * 85 / 224), max(8, round(image_size * 64 / 224))


@dataclass(frozen=True, kw_only=True)
class PirlOptions(MethodOptions):
    """PIRL's bank and jigsaw."""

    bank_momentum: float = setting(0.5, label="bank momentum {}")
    """Share of an image's old embedding in the bank when its new one is written."""
    weight: float = setting(0.5, label="jigsaw x {}")
    """lambda: weight of the jigsaw's loss; that of the image's own is 1 - lambda."""
    jigsaw_size: int = setting(255, name="jigsaw pixels")
    """Height and width in pixels of the view that is cut into 3 x 3 cells."""
    tile_size: int = setting(64, name="tile pixels")
    """Height and width in pixels of a tile, cut from its cell at a random place."""

    def __post_init__(self) -> None:
        check_between(self, "pirl", 0.0, 1.0, "bank_momentum", "weight")
        check_at_least(self, "pirl", tile_size=8)
        if self.tile_size > self.jigsaw_size // 3:
            raise InputError(
                f"pirl.tile_size={self.tile_size} exceeds a third of"
                f" pirl.jigsaw_size={self.jigsaw_size}, the size of a cell: lower pirl.tile_size"
                " or raise pirl.jigsaw_size."
            )


@dataclass(frozen=True, kw_only=True)
class CmcOptions(MethodOptions):
    """CMC's banks, and Image Mixture on top."""

    bank_momentum: float = setting(0.5, label="bank momentum {}")
    """Share of an image's old embeddings in the banks when its new ones are written."""
    unmix: bool = setting(False, label="+ iMix")
    """Add Image Mixture (Un-Mix): also contrast images that are mixed with others of the batch."""

    def __post_init__(self) -> None:
        check_between(self, "cmc", 0.0, 1.0, "bank_momentum")


@dataclass(frozen=True, kw_only=True)
class PclOptions(MethodOptions):
    """PCL's clusters."""

    clusters: tuple[int, ...] = setting((), label="{} clusters")
    """Numbers of clusters, one k-means each. Unset: 25000, 50000 and 100000 for ImageNet-1k's
    images, and in proportion for others."""
    warm_up_epochs: int = setting(20, name="epochs without prototypes")
    """Epochs of plain MoCo before the first clustering."""
    kmeans: KMeans = setting("auto", name="library of k-means", later=True)
    """Library of k-means: scikit-learn in mini-batches, or faiss (hardmix[faiss]) over all images.
    auto: faiss from 200,000 images on, if it is installed."""

    def __post_init__(self) -> None:
        check_at_least(self, "pcl", warm_up_epochs=0)
        if any(number < 2 for number in self.clusters):
            raise InputError(f"pcl.clusters={self.clusters} must be numbers of at least 2.")


@dataclass(frozen=True, kw_only=True)
class SwavOptions(MethodOptions):
    """SwAV's prototypes, codes, small crops and queue."""

    prototypes: int = setting(3000, label="{} prototypes")
    """Number of prototypes."""
    epsilon: float = setting(0.05, label="epsilon = {}")
    """Smoothness of the codes: the lower, the nearer to one prototype per image."""
    iterations: int = setting(3, name="Sinkhorn iterations")
    """Iterations of Sinkhorn's algorithm, which gives every prototype its share of the batch."""
    small_crops: int = setting(6, label="{} small crops")
    """Small crops beside the two large ones; they predict codes and have none."""
    small_size: int = setting(96, name="pixels of a small crop")
    """Height and width of a small crop in pixels. It covers 5 % to 14 % of the image."""
    queue_size: int = setting(3840, label="{} queued embeddings")
    """Earlier embeddings that take part in the codes, for small batches; 0: none."""
    queue_epoch: int = setting(15, name="first epoch with a queue")
    """Epoch from which on embeddings are queued; they are used once the queue is full."""
    frozen_epochs: int = setting(1, name="epochs with fixed prototypes")
    """Epochs before the prototypes are trained."""

    def __post_init__(self) -> None:
        check_at_least(self, "swav", prototypes=2, iterations=1, small_crops=0, small_size=8)
        check_at_least(self, "swav", queue_size=0, queue_epoch=0, frozen_epochs=0)
        check_above(self, "swav", epsilon=0)
