"""The menu: everything a run can choose, checked before any image is read. Imports no torch.

Choices by name stand here; the tables that carry them out stand beside the functions, and a test
holds both equal. Defaults are the paper's for ImageNet-100 (App. C.1, official MoCo-v2).
"""

import math
from dataclasses import dataclass, field
from typing import Literal

from hardmix.errors import InputError

StrategyName = Literal[
    "mochi",
    "ranked-by-key",
    "mixed-with-key",
    "beta-weighted",
    "one-minus-beta-weighted",
    "log-beta-weighted",
    "softmax-sampled",
    "fixed-percentage",
    "own",
]
"""How synthetic points are planned: Sec. 4 ("mochi") and the variants of App. B.2; "own" is a
function of yours, given to `pretrain` or `MochiLoss`."""

RealNegatives = Literal["keep", "drop_hardest", "drop_all"]
"""What becomes of the real negatives beside the synthetic ones. The paper keeps them; its row
"(all queue)" is never defined, and "drop_all" is our most plausible reading of it."""

QueueStart = Literal["random", "empty"]
"""What an unfilled slot is: a random negative, as in official MoCo, or none."""

Method = Literal["moco-v1", "moco-v2", "mochi", "supervised"]
"""What is trained. "supervised" is cross-entropy with labels: the paper's upper bound."""

DataName = Literal[
    "shapes",
    "cifar10",
    "cifar100",
    "stl10",
    "imagenet",
    "imagenet100",
    "folder",
    "list",
    "shards",
    "own",
]
"""Data sets by name. "folder" is any folder of images, "list" a text file of paths, "shards"
WebDataset archives; all three are recognised by their `root` alone. "own" is an `ImageSet` of
yours, given to `pretrain`."""

Augmentation = Literal["moco-v1", "moco-v2", "plain"]
"""How a view is coloured after its random crop: as in official MoCo, or only flipped."""
ProbeSolver = Literal["lbfgs", "sgd"]
Head = Literal["linear", "mlp"]
Schedule = Literal["cosine", "step"]
Precision = Literal["auto", "fp32", "bf16"]
OnNan = Literal["stop", "skip"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which images, and how two views are made of each."""

    name: DataName | None = None
    """Data set; may be left out where `root` tells it."""
    root: str | None = None
    """Folder, text file of paths, or shards 'a-{000..099}.tar'. `shapes` needs none."""
    num_images: int | None = None
    """How many images: needed for shards; for `shapes`, how many to draw; else a limit."""
    image_size: int = 224
    """Height and width of a view in pixels."""
    channels: int = 3
    """1 to 16; other than 3 leaves out the colour operations."""
    augmentation: Augmentation = "moco-v2"
    """MoCo-v2's stronger views, MoCo-v1's, or plain: crop and flip alone."""
    blur: bool = True
    """MoCo-v2's Gaussian blur; those who train on 32 pixels drop it."""
    min_scale: float = 0.2
    """Smallest share of the image's area that a random crop takes."""
    max_pixels: int = 89_000_000
    """Images with more pixels are refused by name."""
    max_unreadable: float = 0.01
    """Share of images that may be unreadable: those are skipped and named, more stop the run."""
    workers: int = 2
    """Processes that decode image files; sets held in memory need none."""

    def __post_init__(self) -> None:
        check_above(self, "data", num_images=0, image_size=7, max_pixels=0, workers=-1)
        check_between(self, "data", 1, 16, "channels")
        check_between(self, "data", 0.0, 1.0, "min_scale", "max_unreadable")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The encoder f: trunk, head, and how the key encoder follows."""

    backbone: str = "resnet50"
    """A torchvision ResNet (resnet18 ... wide_resnet101_2), the same with '-cifar' for 32 pixel
    images, 'small' (made for CPUs), 'resnet18-narrow' (a quarter as wide), or 'timm:NAME'."""
    head: Head = "mlp"
    """What is between trunk and loss: MoCo-v2's two layers, or MoCo-v1's one."""
    dim: int = 128
    """Dimensions of the embedding in which negatives are mixed."""
    key_momentum: float = 0.999
    """How slowly the key encoder follows the query encoder."""
    key_bn_splits: int = 4
    """Groups of the key encoder's batch normalisation on one process: stands in for shuffled
    batch norm over as many GPUs. 1 lets the batch statistics give the answer away."""

    def __post_init__(self) -> None:
        check_above(self, "model", dim=0, key_bn_splits=0)
        check_between(self, "model", 0.0, 1.0, "key_momentum")


@dataclass(frozen=True, kw_only=True)
class MixConfig:
    """MoCHi (N, s, s') and its variants (Sec. 4, App. B.2)."""

    num_hardest: int = 1024
    """N: hardest negatives of a query that may be mixed."""
    num_pairs: int = 1024
    """s: points that mix two of them."""
    num_with_query: int = 128
    """s': points that mix one of them with the query."""
    warm_up_epochs: float = 10
    """Epochs at the start without mixing (Sec. 5)."""
    warm_up_steps: int | None = None
    """The same in steps; goes before `warm_up_epochs`."""
    strategy: StrategyName = "mochi"
    """How points are planned."""
    real_negatives: RealNegatives = "keep"
    """Whether the real negatives count beside them."""
    through_query: bool = False
    """Whether the gradient passes the query inside a point mixed with it."""
    sampling_temperature: float = 0.2
    """tau' of the strategy softmax-sampled."""
    percentage: float = 50.0
    """X of the strategy fixed-percentage, at the start."""
    percentage_end: float | None = None
    """X at the end of training, on a line between; unset: it stays."""

    def __post_init__(self) -> None:
        check_above(self, "mix", num_hardest=0, num_pairs=-1, num_with_query=-1, warm_up_epochs=-1)
        check_above(self, "mix", warm_up_steps=-1, sampling_temperature=0)
        check_between(self, "mix", 0.0, 100.0, "percentage", "percentage_end")
        if self.num_pairs > 0 and self.num_hardest < 2:
            raise InputError(
                f"mix.num_pairs={self.num_pairs} with mix.num_hardest={self.num_hardest}: a pair"
                " needs two different negatives; raise mix.num_hardest or set mix.num_pairs to 0."
            )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """SGD and its learning rate."""

    lr: float = 0.03
    """Initial learning rate; the paper has 0.03 for batches of 128 and of 256."""
    momentum: float = 0.9
    """Of SGD; that of the key encoder is `model.key_momentum`."""
    weight_decay: float = 1e-4
    """On all weights, those of batch norm too, as in official MoCo."""
    schedule: Schedule = "cosine"
    """MoCo-v2's cosine, once an epoch, or MoCo-v1's steps."""
    milestones: tuple[int, ...] = (120, 160)
    """Epochs at which the step schedule divides by ten."""

    def __post_init__(self) -> None:
        check_above(self, "optimizer", lr=0, weight_decay=-1e-12)
        check_between(self, "optimizer", 0.0, 1.0, "momentum")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The loop."""

    epochs: int = 200
    """Length of the schedule."""
    stop_epoch: int | None = None
    """Stop after this many epochs of it: the paper's 100-epoch results are epoch 100 of 200."""
    batch_size: int = 128
    """Images per step, over all processes."""
    accumulate: int = 1
    """Split each batch into this many parts to save memory."""
    queue_size: int = 16384
    """K: keys in the queue."""
    queue_start: Literal["random", "empty", "prefill"] = "random"
    """Unfilled slots: random negatives as in official MoCo, none, or filled before the start."""
    exclude_same_image: bool = False
    """Mask older keys of the query's own image: they are there when K exceeds the data set."""
    temperature: float = 0.2
    """tau of Eq. 1."""
    seed: int = 0
    """Of all that is random: weights, queue, order, views and mixing."""
    precision: Precision = "auto"
    """bf16 where the processor is fast at it, else fp32."""
    device: str = "auto"
    """cuda where there is one, else cpu."""
    log_every: int = 50
    """Steps between two lines of metrics.jsonl."""
    knn_every: int = 10
    """Epochs between two k-NN accuracies, where labels exist; 0: never."""
    save_every: int = 1
    """Epochs between two checkpoints; the last two are kept, and the best by k-NN."""
    save_minutes: float = 30.0
    """Minutes between two checkpoints within an epoch; 0: none."""
    keep_every: int = 0
    """Epochs between two checkpoints that are never deleted; 0: none."""
    on_nan: OnNan = "stop"
    """What a loss or gradient does that is no number: stop the run, or skip the step."""
    timeout: float = 300.0
    """Seconds that processes wait for one that is silent, before the run ends."""
    tensorboard: bool = False
    """Write RUN/tensorboard beside metrics.jsonl; needs hardmix[tensorboard]."""
    profile: bool = False
    """Measure where the time of a step goes: a table at the end, and RUN/profile.json."""

    def __post_init__(self) -> None:
        check_above(self, "train", epochs=0, stop_epoch=0, batch_size=0, accumulate=0, queue_size=0)
        check_above(self, "train", temperature=0, log_every=0, knn_every=-1, save_every=0, seed=-1)
        check_above(self, "train", save_minutes=-1e-12, keep_every=-1, timeout=0)
        if self.batch_size % self.accumulate:
            raise InputError(
                f"train.accumulate={self.accumulate} does not divide"
                f" train.batch_size={self.batch_size}: every part of a batch has the same size."
            )


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """A complete run."""

    recipe: str = "imagenet100"
    """The named run that the settings began with."""
    method: Method = "mochi"
    """What is trained; a recipe sets what belongs to it."""
    oracle: bool = False
    """Sec. 3.3: drop negatives of the query's class, from the loss and from mixing."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    mix: MixConfig = field(default_factory=MixConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        if self.method == "mochi" and self.mix.num_hardest > self.train.queue_size:
            raise InputError(
                f"mix.num_hardest={self.mix.num_hardest} exceeds"
                f" train.queue_size={self.train.queue_size}: MoCHi ranks only entries held in the"
                " queue; lower mix.num_hardest or raise train.queue_size."
            )
        part = self.train.batch_size // self.train.accumulate
        if part % self.model.key_bn_splits and self.method != "supervised":
            raise InputError(
                f"model.key_bn_splits={self.model.key_bn_splits} does not divide the {part} images"
                f" encoded at once (train.batch_size={self.train.batch_size},"
                f" train.accumulate={self.train.accumulate}): every group has the same size."
            )


@dataclass(frozen=True, kw_only=True)
class LinearConfig:
    """A linear classifier on a frozen trunk (App. C.1); defaults are those of ImageNet-100."""

    epochs: int = 60
    """Passes over the training images."""
    batch_size: int = 128
    """Images per step."""
    lr: float = 10.0
    """Initial learning rate."""
    milestones: tuple[int, ...] = (30, 40, 50)
    """Epochs at which the learning rate is divided by ten."""
    min_scale: float = 0.08
    """Smallest share of the image's area that a training crop takes: torchvision's default."""
    seed: int = 0
    """Of the classifier's first weights, the order and the crops."""

    def __post_init__(self) -> None:
        check_above(self, "linear", epochs=0, batch_size=0, lr=0, seed=-1)
        check_between(self, "linear", 0.0, 1.0, "min_scale")


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """All weights trained on a share of the labels; not in the paper."""

    labels: float = 1.0
    """Share of the labels: 0.01, 0.1, 1.0; the same number of images from every class."""
    epochs: int = 30
    """Passes over the chosen images."""
    batch_size: int = 128
    """Images per step, at most."""
    lr: float = 0.01
    """Initial learning rate of the trunk."""
    classifier_lr: float = 0.1
    """That of the new classifier on it."""
    weight_decay: float = 1e-4
    """On all weights."""
    min_scale: float = 0.2
    """Smallest share of the image's area that a training crop takes."""
    seed: int = 0
    """Of the labels chosen, the classifier's first weights, the order and the crops."""

    def __post_init__(self) -> None:
        check_above(self, "finetune", labels=0, epochs=0, batch_size=0, lr=0)
        check_above(self, "finetune", classifier_lr=0, seed=-1)
        check_between(self, "finetune", 0.0, 1.0, "labels", "min_scale")


def check_above(config: object, prefix: str, **limits: float) -> None:
    """Refuse a setting that is not above its limit, by its name on the command line."""
    for name, limit in limits.items():
        value = getattr(config, name)
        if value is not None and not (math.isfinite(value) and value > limit):
            raise InputError(f"{prefix}.{name}={value} must be a finite number above {limit}.")


def check_between(config: object, prefix: str, low: float, high: float, *names: str) -> None:
    """Refuse a setting outside of its limits, by its name on the command line."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not low <= value <= high:
            raise InputError(f"{prefix}.{name}={value} must be between {low} and {high}.")
