"""All settings of a run, checked before any image is read. Imports no torch.

Defaults are the paper's for ImageNet-100 (App. C.1, official MoCo-v2).
"""

from dataclasses import dataclass, field
from typing import Literal

from hardmix.errors import InputError
from hardmix.settings.bounds import check_above, check_at_least, check_between, nearest_first
from hardmix.settings.facts import setting
from hardmix.settings.loss_options import LossConfig, MixConfig
from hardmix.settings.method_checks import check_method
from hardmix.settings.method_options import MethodOptions
from hardmix.settings.methods import METHOD_FACTS, MethodName
from hardmix.settings.named_choices import (
    TRUNK_LR,
    Augmentation,
    CacheMode,
    Compiled,
    DataName,
    Head,
    OnNan,
    Precision,
    Shuffle,
)
from hardmix.settings.optimizer_options import OptimizerConfig

MOST_FRAMES = 1000
"""Frames of a second: the name of a frame counts thousandths."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The images, and how views are made of them."""

    name: DataName | None = setting(None, label="{}")
    """Data set. Unset: recognised from data.root."""
    root: str | None = setting(None, resume=True)
    """Where the images are: a folder, a text file of paths, shards such as 'a-{000..099}.tar', or
    'hf:FOLDER' or 'hf:NAME' for Hugging Face's datasets. The data set `shapes` needs none."""
    test: str | None = setting(None, resume=True, identity=False, later=True)
    """List, folder or shards of test images, if data.root has none."""
    num_images: int | None = setting(None, name="number of images")
    """Use at most this many images, chosen at random. Required for shards that are a stream; for
    `shapes`, the number of images to draw. Unset: all."""
    image_size: int = setting(224, label="{} px")
    """Height and width of a view in pixels."""
    channels: int = 3
    """Image channels, 1 to 16. Unless it is 3, the colour operations are skipped."""
    augmentation: Augmentation = "moco-v2"
    """MoCo-v2's stronger augmentation, MoCo-v1's, SimCLR's (twice the jitter), InfoMin's (with
    RandAugment, on the CPU), or plain: random crop and flip only."""
    colour_strength: float = setting(1.0, later=True, name="strength of colour changes")
    """Factor on the colour changes of data.augmentation, 0 to 1: the jitter's ranges and the
    probability of grey. 1: as published; 0: colours stay as they are. Lower it if colour tells
    your images apart."""
    blur: bool = True
    """MoCo-v2's Gaussian blur; usually off for 32-pixel images."""
    min_scale: float = setting(0.2, name="smallest crop")
    """Smallest area of a random crop, as a fraction of the image."""
    views: str | None = setting(None, name="own views", later=True)
    """'mypackage:make_views': your own function that returns a torchvision v2 or albumentations
    pipeline, applied once per view instead of the random crop and data.augmentation."""
    reduce: bool = setting(False, name="reduced images", later=True)
    """Shrink images while reading them, to a shorter side of at most twice data.image_size: large
    photographs are decoded several times faster, to different pixels."""
    frames_per_second: float = setting(1.0, later=True)
    """Frames per second of a video that are used as images, at most 1,000; needs
    hardmix[video]."""
    max_pixels: int = 89_000_000
    """Images with more pixels than this are treated as unreadable."""
    max_unreadable: float = setting(0.01, resume=True, identity=False)
    """Fraction of the images that may be unreadable. These are skipped and reported; any more
    stop the run."""
    shuffle: Shuffle = setting("full", later=True)
    """Order of the images in an epoch: shuffled fully or, for disks that are slow at random reads,
    blocks of 1,024 consecutive images in random order, shuffled among the 16 that are read
    together."""
    workers: int | None = setting(None, resume=True, identity=False)
    """Worker processes that decode image files, per process. Unset: one fewer than the cores of
    each process, at most 16; none for small images held in memory."""
    cache: CacheMode = setting("auto", resume=True, identity=False, later=True)
    """Where decoded images are kept, so that each is decoded only once. auto: in memory if they
    fit, in a file if decoding is slow. The results are the same bit for bit."""
    cache_gb: float = setting(2.0, resume=True, identity=False, later=True)
    """Most GB of decoded images to hold in memory."""

    def __post_init__(self) -> None:
        check_at_least(self, "data", num_images=1, image_size=8, max_pixels=1)
        check_above(self, "data", cache_gb=0, frames_per_second=0)
        check_between(self, "data", 0, MOST_FRAMES, "frames_per_second")
        check_between(self, "data", 0, 1024, "workers")
        check_between(self, "data", 1, 16, "channels")
        check_between(self, "data", 0.0, 1.0, "min_scale", "max_unreadable")
        check_between(self, "data", 0.0, 1.0, "colour_strength")
        if self.augmentation == "infomin" and self.channels != 3:
            raise InputError(
                f"data.augmentation=infomin with data.channels={self.channels}: RandAugment changes"
                " colours and needs 3 channels; choose moco-v2."
            )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The encoder f: trunk, head and key encoder."""

    backbone: str = setting("resnet50", label="{}")
    """A torchvision ResNet (resnet18 ... wide_resnet101_2), the same with '-cifar' for 32-pixel
    images, 'small' (made for CPUs), 'resnet18-narrow' (a quarter as wide), 'lab-small',
    'lab-resnet50' and others in two halves for CMC, 'timm:NAME' with options as in
    'timm:NAME?img_size=96', or your own function, 'mypackage:make_net'."""
    init: str | None = setting(None, later=True, label="from {}", name="initial weights")
    """Weights to start from instead of random ones: a file (torchvision, timm, official MoCo, the
    authors' MoCHi), a run's folder, or 'timm' or 'torchvision' for the backbone's own pre-trained
    weights. The head is always new. Recommended for small data sets."""
    head: Head = "mlp"
    """Projection head between trunk and loss: MoCo-v2's MLP of two layers, SimCLR's, with batch
    norm after both, or MoCo-v1's single linear layer."""
    dim: int = setting(128, name="embedding dimensions")
    """Dimensions of the embedding, in which negatives are mixed."""
    key_momentum: float = 0.999
    """Momentum of the key encoder; the closer to 1, the more slowly it follows the query
    encoder."""
    key_bn_splits: int = setting(4, name="key batch-norm groups")
    """Groups of the key encoder's batch normalisation on one process, in place of shuffled batch
    norm over as many GPUs. With 1, the batch statistics give the answer away."""

    def __post_init__(self) -> None:
        check_at_least(self, "model", dim=1, key_bn_splits=1)
        check_between(self, "model", 0.0, 1.0, "key_momentum")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Training: its length, batches, queue, checkpoints and logs."""

    epochs: int = setting(200, resume=True, label="{} epochs")
    """Epochs of the schedule."""
    stop_epoch: int | None = setting(None, resume=True)
    """Stop after this many epochs of the schedule: the paper's 100-epoch results are epoch 100
    of 200. Unset: train to the end."""
    batch_size: int = setting(128, label="batches of {}")
    """Images per step, summed over all processes."""
    accumulate: int = setting(1, name="parts of a batch")
    """Split each batch into this many parts and accumulate their gradients, to save memory."""
    queue_size: int = setting(16384, label="K = {}")
    """K: keys in the queue, the negatives of every query."""
    queue_start: Literal["random", "empty", "prefill"] = setting("random", name="initial queue")
    """The queue before training: random negatives as in official MoCo, empty, or filled with the
    keys of real images."""
    exclude_same_image: bool = setting(False, name="keys of the same image")
    """Exclude older keys of the query's own image from its negatives; they occur when the queue
    is larger than the data set."""
    temperature: float = setting(0.2, label="tau = {}")
    """tau of Eq. 1, which divides the similarities."""
    seed: int = setting(0, label="seed {}")
    """Seed of all randomness: initial weights, queue, order of the images, views and mixing."""
    precision: Precision = "auto"
    """Number format of the encoders. auto: bf16 if the processor is fast at it, otherwise fp32.
    fp16, with a scaled loss, is for GPUs without bf16."""
    device: str = setting("auto", resume=True, identity=False)
    """auto, cpu, cuda or cuda:N; cuda:1 is the second GPU. auto: cuda when available, otherwise
    cpu."""
    compile: Compiled = setting("no", resume=True, identity=False)
    """What torch.compile compiles; all includes the loss, but only for the methods moco-v1,
    moco-v2, mochi, unmix, co2 and pcl. Takes minutes at the start; worthwhile on GPUs, not on
    CPUs."""
    deterministic: bool = setting(False, resume=True, identity=False)
    """Use PyTorch's deterministic algorithms, so that a run on the same kind of GPU repeats bit
    for bit; slower. Runs on a CPU repeat without it."""
    log_every: int = setting(50, resume=True, identity=False)
    """Steps between lines of metrics.jsonl."""
    knn_every: int = setting(10, resume=True, identity=False)
    """Epochs between measurements of the k-NN accuracy, if the images have labels; 0: never."""
    verdict: bool = setting(True, resume=True, identity=False, later=True)
    """At the end, compare the encoder with the untrained network, raw pixels, a colour histogram
    and the weights it started from."""
    save_every: int = setting(1, resume=True, identity=False)
    """Epochs between checkpoints. The last two are kept, and the one with the best k-NN
    accuracy."""
    save_minutes: float = setting(30.0, resume=True, identity=False)
    """Minutes between checkpoints within an epoch; 0: none."""
    keep_every: int = setting(0, resume=True, identity=False)
    """Epochs between checkpoints that are never deleted; 0: none."""
    on_nan: OnNan = setting("stop", resume=True, identity=False)
    """What to do when a loss or gradient is NaN or infinite: stop the run, or skip the step."""
    timeout: float = setting(300.0, resume=True, identity=False)
    """Seconds to wait for a process that does not respond before the run is stopped."""
    tensorboard: bool = setting(False, resume=True, identity=False)
    """Also write the metrics to RUN/tensorboard; needs hardmix[tensorboard]."""
    wandb: bool = setting(False, resume=True, identity=False, later=True)
    """Also send the metrics to Weights & Biases; needs hardmix[wandb]."""
    profile: bool = setting(False, resume=True, identity=False)
    """Measure where the time of a step goes; prints a table at the end and writes
    RUN/profile.json."""

    def __post_init__(self) -> None:
        check_at_least(self, "train", epochs=1, stop_epoch=1, batch_size=1, accumulate=1)
        check_at_least(self, "train", queue_size=1, log_every=1, knn_every=0, save_every=1, seed=0)
        check_at_least(self, "train", save_minutes=0, keep_every=0)
        check_above(self, "train", temperature=0)
        check_between(self, "train", 0.001, 1e7, "timeout")
        if self.batch_size % self.accumulate:
            raise InputError(
                f"train.accumulate={self.accumulate} does not divide"
                f" train.batch_size={self.batch_size}: all parts of a batch must be of equal size."
            )

    @property
    def last_epoch(self) -> int:
        """Number of epochs of the schedule that are trained."""
        return self.epochs if self.stop_epoch is None else min(self.stop_epoch, self.epochs)


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """All settings of a run."""

    recipe: str = "imagenet100"
    """Name of the recipe that the settings start from."""
    method: MethodName = "mochi"
    """Training method. It changes the recipe's defaults."""
    oracle: bool = False
    """Use labels to exclude negatives of the query's class from the loss and from mixing
    (Sec. 3.3)."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    mix: MixConfig = field(default_factory=MixConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    choose: tuple[str, ...] = setting((), later=True, resume=True, identity=False)
    """Settings, by dotted name, that the run chooses itself when it starts, from a look at the
    images and from the measured speed (recipe photos). In a saved config all are chosen."""
    minutes: float = setting(10.0, later=True, resume=True, identity=False)
    """Time budget for settings that the run chooses itself."""
    options: MethodOptions | None = None
    """Settings that only this method has. Unset: its defaults."""

    def __post_init__(self) -> None:
        if self.method not in METHOD_FACTS:
            known = ", ".join(nearest_first(self.method, METHOD_FACTS))
            raise InputError(f"there is no method {self.method!r}: choose one of {known}.")
        self._check_options()
        if not 0.01 <= self.minutes <= 1e6:
            raise InputError(f"minutes={self.minutes} must be between 0.01 and 1000000.")
        check_method(self)
        in_batch = self.mixes and not self.uses("train.queue_size")
        if in_batch and self.mix.num_hardest > 2 * self.train.batch_size - 2:
            raise InputError(
                f"mix.num_hardest={self.mix.num_hardest} exceeds the"
                f" {2 * self.train.batch_size - 2} other views of a batch"
                f" (train.batch_size={self.train.batch_size}): lower mix.num_hardest or raise"
                " train.batch_size."
            )
        if not in_batch and self.mixes and self.mix.num_hardest > self.train.queue_size:
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
                f" train.accumulate={self.train.accumulate}): all groups must be of equal size."
            )

    def uses(self, setting: str) -> bool:
        """Return whether the method uses a setting, given by its dotted name."""
        return METHOD_FACTS[self.method].uses(setting)

    @property
    def mixes(self) -> bool:
        """Whether hard negatives are mixed: always in MoCHi, in others if points are asked for."""
        points = self.mix.num_pairs + self.mix.num_with_query
        return self.uses("mix.num_pairs") and (self.method == "mochi" or points > 0)

    @property
    def trunk_lr(self) -> float:
        """Factor on optimizer.lr for the trunk; below 1 for pre-trained weights."""
        if self.optimizer.trunk_lr is not None:
            return self.optimizer.trunk_lr
        return TRUNK_LR if self.model.init is not None else 1.0

    def _check_options(self) -> None:
        kind = METHOD_FACTS[self.method].options
        if self.options is None and kind is not None:
            object.__setattr__(self, "options", kind())  # frozen, and not yet given away
        elif self.options is not None and type(self.options) is not kind:
            raise InputError(
                f"options={self.options} do not belong to the method {self.method}: omit them"
                f"{'' if kind is None else f', or pass {kind.__name__}(...)'}."
            )
