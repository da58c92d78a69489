"""The methods: where they are, titles, options of their own, and the settings they do not use.

A new method is a file in methods/ and a line in `METHOD_FACTS` here, with a dataclass above it if
the method has options of its own. These appear as --NAME.* on the command line. Their defaults are
the published ones for ImageNet; recipes change them for small images. Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from hardmix.errors import InputError
from hardmix.settings.facts import (
    check_above,
    check_at_least,
    check_between,
    check_choices,
    setting,
)
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
class MocoV3Options(MethodOptions):
    """MoCo v3's projector, predictor and patches."""

    hidden: int = setting(4096, name="hidden units")
    """Hidden units of projector and predictor."""
    freeze_patches: bool = setting(True, name="frozen patch projection")
    """Keep the random patch projection of a Vision Transformer, which makes training stable."""

    def __post_init__(self) -> None:
        check_at_least(self, "moco-v3", hidden=1)


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
    """Return the pixels of a jigsaw and of its tiles: 255 and 64 for 224, as published."""
    return 3 * round(image_size * 85 / 224), max(8, round(image_size * 64 / 224))


def small_crop_size(image_size: int) -> int:
    """Return the pixels of a small crop of data.small_crops: SwAV's 96 for 224."""
    return max(8, round(image_size * 96 / 224))


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
        check_choices(self, "pcl")
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


MethodName = str
"""A key of `METHOD_FACTS`."""


@dataclass(frozen=True)
class MethodFacts:
    """Facts about a method that are known without building it."""

    title: str
    """The paper's name."""
    home: str
    """Module and class in methods/, such as "co2.Co2"; it is imported when a run needs it."""
    options: type[MethodOptions] | None = None
    """Class of its own settings, if it has any."""
    unused: tuple[str, ...] = ()
    """Patterns of shared settings that have no effect on it; help and tables omit them."""
    no_mixing: str = ""
    """Why hard negatives cannot be mixed on top of it; empty if they can."""
    passes: float = 4.0
    """Forward passes over a whole image per step, a backward pass counting as two: an estimate of
    its cost. MoCo's 4 are a query's 3 and a key's 1."""
    whole_batch: bool = False
    """Whether its loss compares the images of a batch, which train.accumulate would divide."""
    batch_negatives: int = 2
    """Negatives that every other image of the batch gives, for methods without a queue or bank."""

    def uses(self, setting: str) -> bool:
        """Return whether the method uses a shared setting, given by its dotted name."""
        return not any(fnmatch(setting, pattern) for pattern in self.unused)


NO_NEGATIVES = (
    "oracle",
    "mix.*",
    "loss.*",
    "train.queue_*",
    "train.exclude_same_image",
    "train.temperature",
    "data.small_crops",
)
"""Settings not used by methods without negatives."""
NO_KEYS = ("model.head", "model.dim", "model.key_*")
"""Settings not used by methods without a key encoder and a head."""

NO_FURTHER_QUERIES = ("loss.jigsaw", "data.small_crops")
"""Settings not used by methods other than MoCo and MoCHi."""

NO_PAIR = ("model.key_*", "train.queue_start", "train.exclude_same_image", *NO_FURTHER_QUERIES)
"""Settings not used by methods without a key encoder whose keys are queued."""

METHOD_FACTS: dict[MethodName, MethodFacts] = {
    "moco-v1": MethodFacts("MoCo", "moco.Moco", unused=("mix.*",)),
    "moco-v2": MethodFacts("MoCo-v2", "moco.Moco", unused=("mix.*",)),
    "mochi": MethodFacts("MoCHi", "moco.Moco"),
    "simclr": MethodFacts(
        "SimCLR", "simclr.SimClr", unused=(*NO_PAIR, "train.queue_size"), passes=6, whole_batch=True
    ),
    "unmix": MethodFacts(
        "MoCo-v2 + Image Mixture", "unmix.Unmix", UnmixOptions, NO_FURTHER_QUERIES, passes=7
    ),
    "co2": MethodFacts("MoCo-v2 + CO2", "co2.Co2", Co2Options, NO_FURTHER_QUERIES),
    "instdis": MethodFacts("InstDis", "instdis.InstDis", InstDisOptions, NO_PAIR, passes=3),
    "pirl": MethodFacts("PIRL", "pirl.Pirl", PirlOptions, NO_PAIR, passes=5.2),
    "cmc": MethodFacts("CMC", "cmc.Cmc", CmcOptions, NO_PAIR, passes=1.5),
    "pcl": MethodFacts("PCL", "pcl.Pcl", PclOptions, NO_FURTHER_QUERIES, passes=5),
    "swav": MethodFacts(
        "SwAV",
        "swav.Swav",
        SwavOptions,
        (
            *(name for name in NO_NEGATIVES if name != "train.temperature"),
            "model.key_*",
            "model.head",
        ),
        no_mixing="SwAV compares images with prototypes and has no negatives to mix",
        passes=9.3,
        whole_batch=True,
    ),
    "byol": MethodFacts(
        "BYOL",
        "byol.Byol",
        ByolOptions,
        (*NO_NEGATIVES, "model.head", "model.key_bn_splits", "model.key_shuffle"),
        no_mixing="BYOL has no negatives to mix",
        passes=8,
    ),
    "moco-v3": MethodFacts(
        "MoCo-v3",
        "moco_v3.MocoV3",
        MocoV3Options,
        (
            *(name for name in NO_PAIR if name != "model.key_*"),
            "train.queue_size",
            "model.head",
            "model.key_bn_splits",
            "model.key_shuffle",
        ),
        passes=8,
        whole_batch=True,
        batch_negatives=1,
    ),
    "supervised": MethodFacts(
        "supervised", "supervised.Supervised", unused=(*NO_NEGATIVES, *NO_KEYS), passes=3
    ),
}
"""The choices of --method. "supervised" is cross-entropy with labels, the paper's upper bound."""

STEPS_TO_V2 = {
    "cosine": ("optimizer.schedule", "cosine"),
    "MLP": ("model.head", "mlp"),
    "augmentation": ("data.augmentation", "moco-v2"),
}
"""The changes of MoCo-v2 to MoCo (App. B.1): setting and value."""

ON_MOCO = "MoCo-v2 + "
"""Beginning of the titles of methods that add a term to MoCo's loss. A run with MoCo's first
settings has another: "MoCo + Image Mixture"."""

COUNTS = ("mix.num_hardest", "mix.num_pairs", "mix.num_with_query")
"""N, s, s'."""


def method_title(settings: Mapping[str, Any]) -> str:
    """Return the paper's name for a run: MoCHi (N, s, s'), MoCo + MLP, MoCo-v2 oracle.

    `settings` are given by dotted name; those that older versions do not record are shown as "?".
    """
    method = settings.get("method", "unknown method")
    if not isinstance(method, str) or method not in METHOD_FACTS:
        return str(method)
    facts = METHOD_FACTS[method]
    title = facts.title
    if title.startswith(ON_MOCO):
        title = f"MoCo{_steps('moco-v1', settings)} + {title.removeprefix(ON_MOCO)}"
    points = [settings.get(name, "?") for name in COUNTS[1:]]
    if _only_warms_up(settings) and (method == "mochi" or any(points)):
        title = METHOD_FACTS["moco-v2"].title if method == "mochi" else title
        title += " (MoCHi in its warm-up)"
    elif facts.uses("mix.num_pairs") and (method == "mochi" or any(points)):
        title += "" if method == "mochi" else " + MoCHi"
        title += f" ({', '.join(str(settings.get(name, '?')) for name in COUNTS)})"
        strategy = settings.get("mix.strategy", "mochi")
        title += "" if strategy == "mochi" else f" {strategy}"
    if method in ("moco-v1", "moco-v2", "mochi"):
        title += _steps(method, settings)
    if method == "cmc" and settings.get("cmc.unmix") is True:
        title += " + iMix"
    if settings.get("data.augmentation") == "infomin":
        title += " with InfoMin Aug."
    if facts.uses("loss.jigsaw") and settings.get("loss.jigsaw"):
        title += " + jigsaw"
    if facts.uses("loss.denominator"):
        title += _family(settings)
    return f"{title} oracle" if settings.get("oracle") is True else title


def _only_warms_up(settings: Mapping[str, Any]) -> bool:
    """Return whether a run ends before the first epoch that mixes."""
    numbers = [settings.get(name) for name in ("mix.warm_up_epochs", "train.epochs")]
    numbers.append(settings.get("train.stop_epoch") or numbers[1])
    known = [each for each in numbers if isinstance(each, int | float)]
    by_steps = settings.get("mix.warm_up_steps") is not None
    return len(known) == len(numbers) and not by_steps and known[0] >= min(known[1:])


def _family(settings: Mapping[str, Any]) -> str:
    """Return the parts of later papers in the loss, as " + hcl weights + debiased"."""
    weights, denominator, chosen = (
        settings.get(f"loss.{name}", "none") for name in ("weights", "denominator", "filter")
    )
    added = "" if weights == "none" else f" + {weights} weights"
    added += "" if denominator in ("none", "infonce") else f" + {denominator}"
    return added if chosen == "none" else f"{added} + {chosen} filter"


def _steps(method: str, settings: Mapping[str, Any]) -> str:
    """Return the steps from MoCo to MoCo-v2 that a run takes, or those that it leaves out."""
    taken = {
        step: settings.get(name, value) in (value, "infomin")
        for step, (name, value) in STEPS_TO_V2.items()
    }
    if method != "moco-v1":
        views = "" if taken.pop("augmentation") else f" with {settings['data.augmentation']} views"
        return "".join(f" without {step}" for step, used in taken.items() if not used) + views
    if all(taken.values()):
        return "-v2"
    return "".join(f" + {step}" for step, used in taken.items() if used)
