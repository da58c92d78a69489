"""All settings of a run, checked before any image is read. Imports no torch.

Defaults are the paper's for ImageNet-100 (App. C.1, official MoCo-v2).
"""

from dataclasses import dataclass, field
from typing import Literal

from hardmix.errors import InputError
from hardmix.settings.facts import (
    check_above,
    check_at_least,
    check_between,
    check_choices,
    nearest_first,
    setting,
)
from hardmix.settings.methods import METHOD_FACTS, MethodName, MethodOptions, jigsaw_sizes
from hardmix.settings.named_choices import (
    TRUNK_LR,
    Augmentation,
    CacheMode,
    Compiled,
    DataName,
    Decoder,
    Head,
    KeyShuffle,
    OnNan,
    OptimizerName,
    Precision,
    RealNegatives,
    RunDenominator,
    RunFilter,
    RunWeights,
    Schedule,
    Shuffle,
    Statistics,
    StrategyName,
)

MOST_FRAMES = 1000
"""Most frames per second: the name of a frame has three decimals of a second."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The images, and how views are made of them."""

    name: DataName | None = setting(None, label="{}")
    """Data set. Unset: recognised from data.root."""
    root: str | None = setting(None, resume=True)
    """Folder of images, text file of their paths, shards such as 'a-{000..099}.tar', or
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
    """Random changes that make a view of an image. moco-v2's are stronger than moco-v1's, simclr
    has twice the jitter, infomin adds RandAugment (on the CPU), byol blurs the first view always,
    the second rarely, and solarises some of the second (byol-second), plain is crop and flip."""
    colour_strength: float = setting(1.0, later=True, name="strength of colour changes")
    """Factor on the colour changes of data.augmentation, 0 to 1: the jitter's ranges and the
    probability of grey. 1: as published; 0: colours stay as they are. Lower it if colour tells
    your images apart."""
    blur: bool = True
    """MoCo-v2's Gaussian blur; usually off for 32-pixel images."""
    min_scale: float = setting(0.2, name="smallest crop")
    """Smallest area of a random crop, as a fraction of the image."""
    small_crops: int = setting(0, later=True, label="{} small crops")
    """Small crops of each image beside the two views, for MoCo and MoCHi: further queries for the
    image's key (multi-crop, as in SwAV). They have 96 pixels for a data.image_size of 224 and cover
    5 % to 14 % of the image; data.min_scale is then usually 0.14."""
    views: str | None = setting(None, name="own views", later=True, code=True)
    """'mypackage:make_views': your own function that returns a torchvision v2 or albumentations
    pipeline, applied once per view instead of the random crop and data.augmentation."""
    reduce: bool = setting(False, name="reduced images", later=True)
    """Shrink images while reading them, to a shorter side of at most twice data.image_size: large
    photographs are decoded several times faster, to different pixels."""
    resized_jpegs: bool = setting(False, name="resized JPEGs", later=True)
    """Read images from JPEGs whose shorter side is 256 pixels, of quality 90, which are made once
    and kept in one file of the cache folder: decoded in six tenths of the time, to other pixels.
    For sets that are too large to be kept decoded, such as ImageNet (34 GB)."""
    decoder: Decoder = setting("cpu", name="JPEG decoder", later=True)
    """The decoder of JPEGs while training: worker processes, or the GPU, for machines with few
    cores for each; needs hardmix[jpeg]. Random numbers stay the same, pixels differ by rounding.
    Evaluations always use the CPU."""
    frames_per_second: float = setting(1.0, later=True)
    """Frames per second of a video that are used as images, at most 1,000; needs
    hardmix[video]."""
    max_pixels: int = 89_000_000
    """Images with more pixels than this are treated as unreadable."""
    max_unreadable: float = setting(0.05, resume=True, identity=False)
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
        check_choices(self, "data")
        check_at_least(self, "data", num_images=1, image_size=8, max_pixels=1, small_crops=0)
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

    backbone: str = setting("resnet50", label="{}", code=True)
    """A torchvision ResNet (resnet18 ... wide_resnet101_2), 'small' (made for CPUs), 'timm:NAME',
    or your own function, 'mypackage:make_net'. A ResNet with '-cifar' is for 32-pixel images;
    'resnet18-narrow' is a quarter as wide; 'lab-small', 'lab-resnet50' and others have two halves,
    for CMC. timm's may have options, as in 'timm:NAME?img_size=96'."""
    init: str | None = setting(None, later=True, label="from {}", name="initial weights")
    """Weights to start from instead of random ones: a file, a run's folder, 'timm' or
    'torchvision'. A file may be torchvision's, timm's, official MoCo's or the authors' MoCHi;
    'timm' and 'torchvision' are the backbone's own pre-trained weights. The head is always new.
    Recommended for small data sets."""
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
    key_shuffle: KeyShuffle = setting("all", later=True, name="shuffled batch norm")
    """Processes among which images are shuffled for the keys' batch norm: all of them, as in MoCo,
    or those of the same node, so that no image is sent from node to node."""
    statistics: Statistics = setting("auto", later=True, name="batch-norm statistics")
    """Means and variances of the trunk's batch norm: moving with the batches, or frozen as the
    weights of model.init have them. auto: frozen with model.init. Moving ones drift away from good
    weights faster than training improves these."""

    def __post_init__(self) -> None:
        check_choices(self, "model")
        check_at_least(self, "model", dim=1, key_bn_splits=1)
        check_between(self, "model", 0.0, 1.0, "key_momentum")


@dataclass(frozen=True, kw_only=True)
class MixConfig:
    """MoCHi (N, s, s') and its variants (Sec. 4, App. B.2)."""

    num_hardest: int = 1024
    """N: how many of a query's hardest negatives may be mixed."""
    num_pairs: int = 1024
    """s: synthetic points per query that mix two hard negatives."""
    num_with_query: int = 128
    """s': synthetic points per query that mix a hard negative with the query."""
    warm_up_epochs: float = setting(10, name="epochs without mixing")
    """Epochs of training before mixing begins (Sec. 5)."""
    warm_up_steps: int | None = setting(None, name="steps without mixing")
    """Steps of training before mixing begins; overrides mix.warm_up_epochs."""
    strategy: StrategyName | str = setting("mochi", label="{}", name="mixing strategy", code=True)
    """How synthetic points are made: the paper's method, one of its variants (App. B.2), a later
    paper's (SynCo, MixCSE, or feature transformations, Zhu et al. 2021), or your own function,
    'mypackage:plan'."""
    real_negatives: RealNegatives = setting("keep", label="real negatives {}")
    """Real negatives in the loss: keep all, drop the N hardest, or drop all."""
    through_query: bool = setting(False, name="gradient through the query")
    """Let the gradient flow through the query inside the points mixed with it; off in the
    paper."""
    sampling_temperature: float = setting(0.2, label="tau' = {}")
    """tau', for mix.strategy softmax-sampled."""
    percentage: float = 50.0
    """X at the start of training, in percent, for mix.strategy fixed-percentage."""
    percentage_end: float | None = None
    """X at the end of training, in percent, with a linear change in between. Unset: X stays
    constant."""
    num_extrapolated: int = setting(256, label="{} extrapolated", later=True)
    """Points beyond a hard negative, seen from the query, for mix.strategy synco. SynCo's other
    two counts of 256 are mix.num_pairs and mix.num_with_query."""
    num_noisy: int = setting(64, label="{} noisy", later=True)
    """Points of a hard negative with noise, for mix.strategy synco."""
    num_perturbed: int = setting(64, label="{} perturbed", later=True)
    """Points moved a little towards the query, for mix.strategy synco."""
    num_adversarial: int = setting(64, label="{} adversarial", later=True)
    """Points moved a little along the signs of the query, for mix.strategy synco."""

    def __post_init__(self) -> None:
        check_choices(self, "mix")
        check_at_least(self, "mix", num_hardest=1, num_pairs=0, num_with_query=0)
        check_at_least(self, "mix", warm_up_epochs=0, warm_up_steps=0)
        check_at_least(self, "mix", num_extrapolated=0, num_noisy=0)
        check_at_least(self, "mix", num_perturbed=0, num_adversarial=0)
        check_above(self, "mix", sampling_temperature=0)
        check_between(self, "mix", 0.0, 100.0, "percentage", "percentage_end")
        if self.num_pairs > 0 and self.num_hardest < 2:
            raise InputError(
                f"mix.num_pairs={self.num_pairs} with mix.num_hardest={self.num_hardest}: a pair"
                " needs two different negatives; raise mix.num_hardest or set mix.num_pairs to 0."
            )


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The family around Eq. 1: weights, denominators and filters of later papers."""

    weights: RunWeights | str = setting(
        "none", name="weights of the negatives", later=True, code=True
    )
    """Weights of the real negatives: HCL (Robinson et al. 2021), hardness weighting (LLaVE), a
    ring of percentiles (Wu et al. 2021), or your own function, 'mypackage:weigh'."""
    denominator: RunDenominator | str = setting("infonce", later=True, code=True)
    """Eq. 1, or without the positive (decoupled; decoupled-weighted is DCLW), without the expected
    false negatives (debiased), HCL as its authors train it, with the hardness of a second
    temperature, or your own function, 'mypackage:loss'."""
    filter: RunFilter | str = setting(
        "none", name="filter of false negatives", later=True, code=True
    )
    """Leave out negatives above the positive's similarity minus loss.margin, above loss.share of
    it, or of the query's own cluster of images; or by your own function, 'mypackage:filter'."""
    beta: float = setting(1.0, label="beta = {}", later=True)
    """How much HCL's weights prefer hard negatives."""
    tau_plus: float = setting(0.1, label="tau+ = {}", later=True)
    """Expected fraction of false negatives, for loss.denominator debiased and hcl."""
    alpha: float = setting(9.0, label="alpha = {}", later=True)
    """Strength of loss.weights hardness."""
    ring_low: float = setting(90.0, label="ring from {} %", later=True)
    """Lowest percentile of loss.weights ring."""
    ring_high: float = setting(99.0, label="ring to {} %", later=True)
    """Highest percentile of loss.weights ring."""
    factor: float = setting(10.0, label="second temperature x {}", later=True)
    """Second temperature over the first, for loss.denominator dual-temperature."""
    sigma: float = setting(0.5, label="sigma = {}", later=True)
    """Width of the positives' weights, for loss.denominator decoupled-weighted (DCLW)."""
    margin: float = setting(0.0, label="margin {}", later=True)
    """Margin of loss.filter above-positive."""
    share: float = setting(0.95, label="share {}", later=True)
    """Share of the positive's similarity, for loss.filter share-of-positive."""
    jigsaw: float = setting(0.0, label="jigsaw x {}", name="weight of the jigsaw", later=True)
    """Weight of InfoMin's jigsaw, for MoCo and MoCHi: nine shuffled tiles of an image are another
    query for its key. 0.5 as published; 0: none."""
    clusters: int = setting(100, label="{} clusters", later=True)
    """Clusters of all images, made before each epoch but the first, for loss.filter
    same-cluster."""

    def __post_init__(self) -> None:
        check_choices(self, "loss")
        check_at_least(self, "loss", beta=0, alpha=0, clusters=2)
        check_above(self, "loss", factor=0, share=0, sigma=0)
        check_between(self, "loss", 0.0, 0.999, "tau_plus")
        check_between(self, "loss", 0.0, 1.0, "jigsaw")
        check_between(self, "loss", -2.0, 2.0, "margin")
        check_between(self, "loss", 0.0, 100.0, "ring_low", "ring_high")
        if self.ring_low >= self.ring_high:
            raise InputError(
                f"loss.ring_low={self.ring_low} is not below loss.ring_high={self.ring_high}: they"
                " are the percentiles between which negatives count."
            )
        if self.weights == "hcl" and self.denominator == "hcl":
            raise InputError(
                "loss.weights=hcl with loss.denominator=hcl would weigh twice: choose"
                " loss.denominator=debiased for constant weights, or loss.weights=none."
            )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and its learning rate."""

    name: OptimizerName = setting("sgd", label="{}", name="optimizer", later=True)
    """SGD as in official MoCo, LARS for large batches (You et al. 2017), or AdamW."""
    lr: float = setting(0.03, label="learning rate {}", name="learning rate")
    """Initial learning rate. The paper uses 0.03 for batches of 128 and of 256."""
    trunk_lr: float | None = setting(None, later=True, label="trunk's learning rate x {}")
    """Factor on optimizer.lr for the trunk. Unset: 0.1 with model.init, otherwise 1."""
    momentum: float = setting(0.9, name="optimizer momentum")
    """Momentum of SGD and LARS. The key encoder's momentum is model.key_momentum."""
    betas: tuple[float, ...] = setting((0.9, 0.999), later=True)
    """The two decay rates of AdamW's running means."""
    weight_decay: float = 1e-4
    """Weight decay, applied as optimizer.decay_all says."""
    decay_all: bool = setting(True, name="weight decay on norms and biases", later=True)
    """Apply weight decay to norms and biases too, as official MoCo does. With LARS, parameters
    without decay are not rescaled either."""
    clip: float | None = setting(None, name="largest gradient norm", later=True)
    """Clip the gradient to this norm. Unset: no clipping."""
    warm_up_epochs: float = setting(0, name="learning-rate warm-up epochs", later=True)
    """Epochs over which the learning rate rises linearly from 0 before the schedule begins."""
    schedule: Schedule = "cosine"
    """MoCo-v2's cosine, updated once per epoch, or MoCo-v1's step schedule."""
    milestones: tuple[int, ...] = setting((120, 160), name="milestones of the step schedule")
    """Epochs at which the step schedule divides the learning rate by ten."""

    def __post_init__(self) -> None:
        check_choices(self, "optimizer")
        check_above(self, "optimizer", lr=0, clip=0)
        check_at_least(self, "optimizer", trunk_lr=0, weight_decay=0, warm_up_epochs=0)
        check_between(self, "optimizer", 0.0, 1.0, "momentum")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise InputError(
                f"optimizer.betas={self.betas} must be two numbers, at least 0 and below 1: the"
                " decay rates of AdamW's running means."
            )


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
    """auto, cpu, cuda or cuda:N. cuda:1 is the second GPU; auto is cuda when available, otherwise
    cpu."""
    compile: Compiled = setting("no", resume=True, identity=False)
    """Parts that torch.compile compiles. `all` includes the loss, but only for the methods
    moco-v1, moco-v2, mochi, unmix, co2 and pcl. `graphs` also records the encoders as CUDA graphs,
    for steps in which the GPU waits for the host: few images, a fast GPU. Takes minutes at the
    start; worthwhile on GPUs, not on CPUs."""
    deterministic: bool = setting(False, resume=True, identity=False)
    """Use PyTorch's deterministic algorithms, so that a run on the same kind of GPU repeats bit
    for bit; slower. Runs on a CPU repeat without it."""
    log_every: int = setting(50, resume=True, identity=False)
    """Steps between lines of metrics.jsonl."""
    knn_every: int = setting(10, resume=True, identity=False)
    """Epochs between measurements of the k-NN accuracy, if the images have labels; 0: never."""
    probe: bool = setting(False, resume=True, identity=False, later=True)
    """Train a linear classifier on the trunk's features beside the method, from the labels, and log
    its accuracy on each batch before it learns from it. The encoder is not affected."""
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
    """Reaction to a loss or gradient that is NaN or infinite: stop the run, or skip the step."""
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
        check_choices(self, "train")
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
    """Time budget of the whole command, for a recipe that chooses settings."""
    options: MethodOptions | None = None
    """Settings that only this method has. Unset: its defaults."""

    def __post_init__(self) -> None:
        if self.method not in METHOD_FACTS:
            names = ", ".join(nearest_first(self.method, METHOD_FACTS))
            raise InputError(f"there is no method {self.method!r}: choose one of {names}.")
        self._check_options()
        if not 0.01 <= self.minutes <= 1e6:
            raise InputError(f"minutes={self.minutes} must be between 0.01 and 1000000.")
        _check_method(self)
        in_batch = self.mixes and not self.uses("train.queue_size")
        negatives = METHOD_FACTS[self.method].batch_negatives * (self.train.batch_size - 1)
        if in_batch and self.mix.num_hardest > negatives:
            raise InputError(
                f"mix.num_hardest={self.mix.num_hardest} exceeds the"
                f" {negatives} other views of a batch"
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
        """Whether hard negatives are mixed: always by MoCHi, by others if points are requested."""
        points = self.mix.num_pairs + self.mix.num_with_query
        return self.uses("mix.num_pairs") and (self.method == "mochi" or points > 0)

    @property
    def only_warms_up(self) -> bool:
        """Whether training ends before the first epoch that mixes: bit for bit without points."""
        by_steps = self.mix.warm_up_steps is not None
        covered = self.mix.warm_up_epochs >= self.train.last_epoch
        return self.mixes and covered and not by_steps

    @property
    def trunk_lr(self) -> float:
        """Factor on optimizer.lr for the trunk; below 1 for pre-trained weights."""
        if self.optimizer.trunk_lr is not None:
            return self.optimizer.trunk_lr
        return TRUNK_LR if self.model.init is not None else 1.0

    @property
    def freezes_statistics(self) -> bool:
        """Whether the trunk's batch norm keeps the statistics that it starts with."""
        chosen = self.model.statistics
        return chosen == "frozen" or (chosen == "auto" and self.model.init is not None)

    def _check_options(self) -> None:
        kind = METHOD_FACTS[self.method].options
        if self.options is None and kind is not None:
            object.__setattr__(self, "options", kind())  # frozen, but nobody has it yet
        elif self.options is not None and type(self.options) is not kind:
            raise InputError(
                f"options={self.options} do not belong to the method {self.method}: omit them"
                f"{'' if kind is None else f', or pass {kind.__name__}(...)'}."
            )


def _check_method(config: PretrainConfig) -> None:
    """Raise InputError for shared settings that the method cannot have."""
    facts = METHOD_FACTS[config.method]
    if facts.no_mixing and (config.mix.strategy == "own" or ":" in config.mix.strategy):
        raise InputError(
            f"a strategy was passed to method={config.method}: {facts.no_mixing}; omit it, or"
            " choose another method."
        )
    if facts.whole_batch and config.train.accumulate > 1:
        raise InputError(
            f"train.accumulate={config.train.accumulate} with method={config.method}: its loss"
            " compares all images of a batch with each other, which parts would not; set"
            " train.accumulate to 1 and use more processes, or lower train.batch_size."
        )
    if config.loss.jigsaw and not config.uses("loss.jigsaw"):
        raise InputError(
            f"loss.jigsaw={config.loss.jigsaw} with method={config.method}: only MoCo and MoCHi"
            " have InfoMin's jigsaw; set loss.jigsaw to 0, or method to moco-v2, mochi or pirl."
        )
    if config.data.small_crops and not config.uses("data.small_crops"):
        raise InputError(
            f"data.small_crops={config.data.small_crops} with method={config.method}: only MoCo and"
            " MoCHi take small crops as further queries; set data.small_crops to 0, or method to"
            " moco-v2, mochi, or swav, which has swav.small_crops."
        )
    jigsaw, tile = jigsaw_sizes(config.data.image_size)
    if config.loss.jigsaw and jigsaw // 3 < tile:
        raise InputError(
            f"loss.jigsaw={config.loss.jigsaw} with data.image_size={config.data.image_size}: tiles"
            " have at least 8 pixels, which takes images of 20 pixels or more; raise"
            " data.image_size or set loss.jigsaw to 0."
        )
    queued = config.uses("train.exclude_same_image")
    if config.loss.filter == "same-cluster" and config.uses("loss.filter") and not queued:
        raise InputError(
            f"loss.filter=same-cluster with method={config.method}: it looks up the images of a"
            " queue's keys, and this method has no such queue; choose loss.filter"
            " share-of-positive or above-positive, or a method with a queue, such as mochi."
        )
    crossed = config.mix.num_with_query > 0 and config.mix.strategy != "mixed-with-key"
    if config.method == "cmc" and config.mixes and crossed:
        raise InputError(
            f"mix.num_with_query={config.mix.num_with_query} with method=cmc would mix a query"
            " with negatives of the other modality: set mix.num_with_query to 0, or"
            " mix.strategy to mixed-with-key."
        )
