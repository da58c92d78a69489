"""The menu: everything a run can choose, checked before any image is read. Imports no torch.

Choices by name stand here; the tables that carry them out stand beside the functions, and a test
holds both equal. Defaults are the paper's for ImageNet-100 (App. C.1, official MoCo-v2).
"""

from dataclasses import dataclass, field
from typing import Literal

from hardmix.errors import InputError
from hardmix.settings.bounds import check_above, check_between, nearest_first
from hardmix.settings.facts import setting
from hardmix.settings.methods import METHOD_FACTS, MethodName, MethodOptions

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

CacheMode = Literal["auto", "memory", "file", "off"]
"""Where decoded images are kept. "auto": in memory if they fit, in a file if decoding them takes
long; a file serves later commands too."""

Augmentation = Literal["moco-v1", "moco-v2", "plain"]
"""How a view is coloured after its random crop: as in official MoCo, or only flipped."""
Head = Literal["linear", "mlp"]
OptimizerName = Literal["sgd", "lars", "adamw"]
Schedule = Literal["cosine", "step"]
Precision = Literal["auto", "fp32", "bf16"]
OnNan = Literal["stop", "skip"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which images, and how two views are made of each."""

    name: DataName | None = setting(None, label="{}")
    """Data set; may be left out where `root` tells it."""
    root: str | None = setting(None, resume=True)
    """Folder, text file of paths, or shards 'a-{000..099}.tar'. `shapes` needs none."""
    test: str | None = setting(None, resume=True, identity=False, later=True)
    """List or folder of test images, where `root` is one without any."""
    num_images: int | None = setting(None, name="number of images")
    """How many images: needed for shards; for `shapes`, how many to draw; else a limit."""
    image_size: int = setting(224, label="{} px")
    """Height and width of a view in pixels."""
    channels: int = 3
    """1 to 16; other than 3 leaves out the colour operations."""
    augmentation: Augmentation = "moco-v2"
    """MoCo-v2's stronger views, MoCo-v1's, or plain: crop and flip alone."""
    blur: bool = True
    """MoCo-v2's Gaussian blur; those who train on 32 pixels drop it."""
    min_scale: float = setting(0.2, name="smallest crop")
    """Smallest share of the image's area that a random crop takes."""
    views: str | None = setting(None, name="own views")
    """'mypackage:make_views': a function of yours that gives a torchvision v2 or albumentations
    pipeline, applied once for each view in place of crop and `augmentation`."""
    reduce: bool = setting(False, name="reduced images", later=True)
    """Make images smaller as they are read, the shorter side at most twice `image_size`: large
    photographs are decoded several times faster, to other pixels."""
    frames_per_second: float = setting(1.0, later=True)
    """How many frames of a video are taken as images; needs hardmix[video]."""
    max_pixels: int = 89_000_000
    """Images with more pixels are refused by name."""
    max_unreadable: float = setting(0.01, resume=True, identity=False)
    """Share of images that may be unreadable: those are skipped and named, more stop the run."""
    workers: int = setting(2, resume=True, identity=False)
    """Processes that decode image files; sets held in memory need none."""
    cache: CacheMode = setting("auto", resume=True, identity=False, later=True)
    """Where decoded images are kept, so that each is decoded once: the same bits either way."""
    cache_gb: float = setting(2.0, resume=True, identity=False, later=True)
    """GB of decoded images to be held in memory at most."""

    def __post_init__(self) -> None:
        check_above(self, "data", num_images=0, image_size=7, max_pixels=0, workers=-1, cache_gb=0)
        check_above(self, "data", frames_per_second=0)
        check_between(self, "data", 1, 16, "channels")
        check_between(self, "data", 0.0, 1.0, "min_scale", "max_unreadable")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The encoder f: trunk, head, and how the key encoder follows."""

    backbone: str = setting("resnet50", label="{}")
    """A torchvision ResNet (resnet18 ... wide_resnet101_2), the same with '-cifar' for 32 pixel
    images, 'small' (made for CPUs), 'resnet18-narrow' (a quarter as wide), 'timm:NAME' with
    options as in 'timm:NAME?img_size=96', or a function of yours, 'mypackage:make_net'."""
    head: Head = "mlp"
    """What is between trunk and loss: MoCo-v2's two layers, or MoCo-v1's one."""
    dim: int = setting(128, name="embedding dimensions")
    """Dimensions of the embedding in which negatives are mixed."""
    key_momentum: float = 0.999
    """How slowly the key encoder follows the query encoder."""
    key_bn_splits: int = setting(4, name="groups of the key batch norm")
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
    warm_up_epochs: float = setting(10, name="epochs without mixing")
    """Epochs at the start without mixing (Sec. 5)."""
    warm_up_steps: int | None = setting(None, name="steps without mixing")
    """The same in steps; goes before `warm_up_epochs`."""
    strategy: StrategyName = setting("mochi", label="{}", name="mixing strategy")
    """How points are planned."""
    real_negatives: RealNegatives = setting("keep", label="real negatives {}")
    """Whether the real negatives count beside them."""
    through_query: bool = setting(False, name="gradient through the query")
    """Whether the gradient passes the query inside a point mixed with it."""
    sampling_temperature: float = setting(0.2, label="tau' = {}")
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
    """The optimizer and its learning rate."""

    name: OptimizerName = setting("sgd", label="{}", name="optimizer")
    """SGD as official MoCo, LARS for large batches (You et al. 2017), or AdamW."""
    lr: float = setting(0.03, label="learning rate {}", name="learning rate")
    """Initial learning rate; the paper has 0.03 for batches of 128 and of 256."""
    momentum: float = setting(0.9, name="momentum of the optimizer")
    """Of SGD and LARS; that of the key encoder is `model.key_momentum`."""
    betas: tuple[float, ...] = (0.9, 0.999)
    """Of AdamW."""
    weight_decay: float = 1e-4
    """On all weights, those of batch norm too, as in official MoCo."""
    decay_all: bool = setting(True, name="weight decay on norms and biases")
    """Whether norms and biases are decayed too. LARS takes those that are not as they come."""
    clip: float | None = setting(None, name="largest gradient norm")
    """Scale gradients down to this norm where they are longer; unset: never."""
    warm_up_epochs: float = setting(0, name="epochs of rising learning rate")
    """Epochs over which the learning rate rises from 0, step by step, before the schedule."""
    schedule: Schedule = "cosine"
    """MoCo-v2's cosine, once an epoch, or MoCo-v1's steps."""
    milestones: tuple[int, ...] = setting((120, 160), name="epochs of the step schedule")
    """Epochs at which the step schedule divides by ten."""

    def __post_init__(self) -> None:
        check_above(self, "optimizer", lr=0, weight_decay=-1e-12, clip=0, warm_up_epochs=-1e-12)
        check_between(self, "optimizer", 0.0, 1.0, "momentum")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise InputError(
                f"optimizer.betas={self.betas} must be two numbers from 0 to below 1: AdamW's"
                " running means forget at these rates."
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The loop."""

    epochs: int = setting(200, resume=True, label="{} epochs")
    """Length of the schedule."""
    stop_epoch: int | None = setting(None, resume=True)
    """Stop after this many epochs of it: the paper's 100-epoch results are epoch 100 of 200."""
    batch_size: int = setting(128, label="batches of {}")
    """Images per step, over all processes."""
    accumulate: int = setting(1, name="parts of a batch")
    """Split each batch into this many parts to save memory."""
    queue_size: int = setting(16384, label="K = {}")
    """K: keys in the queue."""
    queue_start: Literal["random", "empty", "prefill"] = setting(
        "random", name="start of the queue"
    )
    """Unfilled slots: random negatives as in official MoCo, none, or filled before the start."""
    exclude_same_image: bool = setting(False, name="keys of the same image")
    """Mask older keys of the query's own image: they are there when K exceeds the data set."""
    temperature: float = setting(0.2, label="tau = {}")
    """tau of Eq. 1."""
    seed: int = setting(0, label="seed {}")
    """Of all that is random: weights, queue, order, views and mixing."""
    precision: Precision = "auto"
    """bf16 where the processor is fast at it, else fp32."""
    device: str = setting("auto", resume=True, identity=False)
    """cuda where there is one, else cpu."""
    log_every: int = setting(50, resume=True, identity=False)
    """Steps between two lines of metrics.jsonl."""
    knn_every: int = setting(10, resume=True, identity=False)
    """Epochs between two k-NN accuracies, where labels exist; 0: never."""
    save_every: int = setting(1, resume=True, identity=False)
    """Epochs between two checkpoints; the last two are kept, and the best by k-NN."""
    save_minutes: float = setting(30.0, resume=True, identity=False)
    """Minutes between two checkpoints within an epoch; 0: none."""
    keep_every: int = setting(0, resume=True, identity=False)
    """Epochs between two checkpoints that are never deleted; 0: none."""
    on_nan: OnNan = setting("stop", resume=True, identity=False)
    """What a loss or gradient does that is no number: stop the run, or skip the step."""
    timeout: float = setting(300.0, resume=True, identity=False)
    """Seconds that processes wait for one that is silent, before the run ends."""
    tensorboard: bool = setting(False, resume=True, identity=False)
    """Write RUN/tensorboard beside metrics.jsonl; needs hardmix[tensorboard]."""
    wandb: bool = setting(False, resume=True, identity=False)
    """Send the same lines to Weights & Biases; needs hardmix[wandb]."""
    profile: bool = setting(False, resume=True, identity=False)
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

    @property
    def last_epoch(self) -> int:
        """How many epochs of the schedule are trained."""
        return self.epochs if self.stop_epoch is None else min(self.stop_epoch, self.epochs)


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """A complete run."""

    recipe: str = "imagenet100"
    """The named run that the settings began with."""
    method: MethodName = "mochi"
    """What is trained; a recipe sets what belongs to it."""
    oracle: bool = False
    """Sec. 3.3: drop negatives of the query's class, from the loss and from mixing."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    mix: MixConfig = field(default_factory=MixConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    options: MethodOptions | None = None
    """Settings that only this method has; unset: its defaults."""

    def __post_init__(self) -> None:
        if self.method not in METHOD_FACTS:
            known = ", ".join(nearest_first(self.method, METHOD_FACTS))
            raise InputError(f"there is no method {self.method!r}: choose one of {known}.")
        self._check_options()
        if self.uses("mix.num_hardest") and self.mix.num_hardest > self.train.queue_size:
            raise InputError(
                f"mix.num_hardest={self.mix.num_hardest} exceeds"
                f" train.queue_size={self.train.queue_size}: MoCHi ranks only entries held in the"
                " queue; lower mix.num_hardest or raise train.queue_size."
            )
        part = self.train.batch_size // self.train.accumulate
        if part % self.model.key_bn_splits and self.uses("model.key_bn_splits"):
            raise InputError(
                f"model.key_bn_splits={self.model.key_bn_splits} does not divide the {part} images"
                f" encoded at once (train.batch_size={self.train.batch_size},"
                f" train.accumulate={self.train.accumulate}): every group has the same size."
            )

    def uses(self, setting: str) -> bool:
        """Whether a setting, by its dotted name, means anything to the method."""
        return METHOD_FACTS[self.method].uses(setting)

    def _check_options(self) -> None:
        kind = METHOD_FACTS[self.method].options
        if self.options is None and kind is not None:
            object.__setattr__(self, "options", kind())  # frozen, and not yet given away
        elif self.options is not None and type(self.options) is not kind:
            raise InputError(
                f"options={self.options} do not belong to the method {self.method}: leave them"
                f" out{'' if kind is None else f', or give {kind.__name__}(...)'}."
            )
