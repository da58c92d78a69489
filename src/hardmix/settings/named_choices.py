"""The choices that settings offer, by name. Imports no torch.

The tables that implement them are next to the functions; a test keeps both equal.
"""

from typing import Literal

StrategyName = Literal[
    "mochi",
    "ranked-by-key",
    "mixed-with-key",
    "beta-weighted",
    "one-minus-beta-weighted",
    "log-beta-weighted",
    "softmax-sampled",
    "fixed-percentage",
    "synco",
    "mixcse",
    "feature-transformation",
    "extrapolated-positives",
    "mixed-queue",
    "own",
]
"""How synthetic points are planned: Sec. 4 ("mochi"), the variants of App. B.2, and later papers'
points: SynCo, MixCSE, and Zhu et al. 2021 (the last three names). "own" is your own function,
passed to `pretrain` or `MochiLoss`."""

_Weights = Literal["none", "hcl", "hardness", "ring"]
WeightsName = Literal[_Weights, "given"]
"""How real negatives are weighted: HCL, hardness weighting, a ring of percentiles, or SimCSE's
weight of given negatives."""
RunWeights = Literal[_Weights, "own"]
"""The same for `hardmix pretrain`, where no negatives are given with a query."""

_Denominator = Literal[
    "infonce", "decoupled", "decoupled-weighted", "debiased", "hcl", "dual-temperature"
]
DenominatorName = Literal[_Denominator, "supcon-in"]
"""How the loss combines the positive and the negatives: as Eq. 1, or as in a later paper."""
RunDenominator = Literal[_Denominator, "own"]
"""The same for `hardmix pretrain`, where a query has one positive."""

FilterName = Literal["none", "above-positive", "share-of-positive"]
"""Rules by which negatives are taken for false ones and left out, without labels."""
RunFilter = Literal[FilterName, "same-cluster", "own"]
"""The same for `hardmix pretrain`, which can also cluster the images before each epoch."""

SameLabel = Literal["positives", "exclude"]
"""Use of negatives of the query's class: further positives (SupCon), or excluded (the oracle)."""

Reduction = Literal["mean", "sum", "none"]
"""Results of a loss: the mean or sum over the queries, or the loss of each."""

RealNegatives = Literal["keep", "drop_hardest", "drop_all"]
"""Real negatives that stay in the loss beside the synthetic ones. The paper keeps all; it never
defines its row "(all queue)", of which "drop_all" is the most plausible reading."""

RankBy = Literal["query", "key"]
"""Rankings of negatives: by similarity to the query (Sec. 4.1), or to its key (App. B.2)."""

QueueStart = Literal["random", "empty"]
"""Content of unfilled slots: random negatives, as in official MoCo, or nothing."""

Shuffle = Literal["full", "blocks"]
"""Orders of the images in an epoch (data.shuffle)."""

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
    "hf",
    "own",
]
"""Names of data sets. "folder" is any folder of images, "list" a text file of paths, "shards"
WebDataset archives, "hf" a set of Hugging Face's datasets; all are recognised from `root`. "own" is
your own `ImageSet`, passed to `pretrain`."""

CacheMode = Literal["auto", "memory", "file", "off"]
"""Places for decoded images. "auto": in memory if they fit, in a file if decoding is slow; later
commands use the file too."""

Decoder = Literal["cpu", "cuda"]
"""Decoders of JPEGs while training: worker processes, or the GPU (torchcodec and nvJPEG)."""

KMeans = Literal["auto", "sklearn", "faiss"]
"""Libraries of PCL's k-means."""

Augmentation = Literal["moco-v1", "moco-v2", "simclr", "infomin", "byol", "byol-second", "plain"]
"""Operations on a view after its random crop: official MoCo's colour changes, SimCLR's, which are
twice as strong, InfoMin's, which add RandAugment, BYOL's, which blur the first view always and the
second rarely and solarise some of the second, or only a flip."""
Head = Literal["linear", "mlp", "mlp-bn"]
OptimizerName = Literal["sgd", "lars", "adamw"]
Schedule = Literal["cosine", "step"]
TRUNK_LR = 0.1
"""Factor on the learning rate of a trunk that starts from pre-trained weights; our choice."""
Precision = Literal["auto", "fp32", "bf16", "fp16"]
Statistics = Literal["auto", "moving", "frozen"]
OnNan = Literal["stop", "skip"]
KeyShuffle = Literal["all", "node"]
"""Processes among which images are shuffled for the key encoder's batch norm."""
Compiled = Literal["no", "encoders", "all", "graphs"]
"""Parts that torch.compile compiles: none, the encoders, or the encoders and the loss; "graphs" is
"all" with the encoders' kernels recorded as CUDA graphs, which a GPU starts without the host."""
