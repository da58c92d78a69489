"""Evaluations of a trained encoder: their options, presets and titles. Imports no torch.

A new evaluation is a file in evaluation/ and a line in `EVALUATIONS` here, with a dataclass above
it for its options. Detectors have more settings than the others; their defaults are those of MoCo's
detectron2 configuration, which the paper uses (Sec. 5.2, App. C.2).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from hardmix.errors import InputError
from hardmix.settings.facts import check_above, check_at_least, check_between, check_choices, shown

ProbeSolver = Literal["lbfgs", "sgd"]
"""Solvers of the linear probe on cached features."""

Baseline = Literal["pixels", "untrained", "colours"]
"""Untrained baselines: raw pixels, the same network with random weights, or a colour histogram."""

EvaluationPrecision = Literal["fp32", "bf16"]
"""Number format of forward passes; float32 by default, so that results are comparable."""

LinearPreset = Literal["imagenet100", "imagenet1k", "official-moco"]
"""Protocols of the linear evaluation: the paper's two (App. C.1), and official MoCo's."""


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """Options of every evaluation of an encoder, your own included."""

    checkpoint: str | None = None
    """A checkpoint of the run to evaluate instead of its encoder: its step, as step-00000012, or
    its epoch. Unset: the trained encoder, or the newest checkpoint of an unfinished run."""
    precision: EvaluationPrecision = "fp32"
    """Number format of the encoder's forward passes."""


@dataclass(frozen=True, kw_only=True)
class KnnOptions(EvaluationOptions):
    """Measure the k-NN accuracy of a run's encoder; nothing is trained."""

    k: int | None = None
    """Number of nearest neighbours that vote. Unset: 200, or 20 if a class has fewer than 200
    labelled images on average; the accuracies with both are recorded in any case."""
    temperature: float = 0.07
    """Softmax temperature of the vote."""
    baseline: tuple[Baseline, ...] = ()
    """Also score untrained baselines: raw pixels, the network with random weights, or a colour
    histogram."""

    def __post_init__(self) -> None:
        check_choices(self, "knn")
        check_at_least(self, "knn", k=1)
        check_above(self, "knn", temperature=0)


@dataclass(frozen=True, kw_only=True)
class LinearConfig:
    """A linear classifier on a frozen trunk (App. C.1); the defaults are for ImageNet-100."""

    epochs: int = 60
    """Passes over the training images."""
    batch_size: int = 128
    """Images per step."""
    lr: float = 10.0
    """Initial learning rate."""
    milestones: tuple[int, ...] = (30, 40, 50)
    """Epochs at which the learning rate is divided by ten."""
    min_scale: float = 0.08
    """Smallest area of a training crop, as a fraction of the image; torchvision's default."""
    seed: int = 0
    """Seed of the classifier's initial weights, the order of the images and the crops."""

    def __post_init__(self) -> None:
        check_at_least(self, "linear", epochs=1, batch_size=1, seed=0)
        check_above(self, "linear", lr=0)
        check_between(self, "linear", 0.0, 1.0, "min_scale")


@dataclass(frozen=True, kw_only=True)
class LinearOptions(EvaluationOptions):
    """Train a linear classifier on a run's frozen encoder.

    With a preset, this follows the paper's protocol: the classifier is trained on random crops.
    Without one, and with fewer than 100,000 images, features are extracted once and the classifier
    is fitted to them in seconds (cached).
    """

    preset: LinearPreset | None = None
    """Protocol to follow: the paper's for ImageNet-100 or ImageNet-1k, or official MoCo's."""
    cached: bool | None = None
    """Fit the classifier on features extracted once. Unset: yes without a preset for fewer than
    100,000 images."""
    solver: ProbeSolver = "lbfgs"
    """Solver for cached features."""
    penalty: float | None = None
    """L2 penalty on the weights, for cached features. Unset: cross-validated on the training
    images over powers of ten."""
    seeds: int = 3
    """Number of classifiers fitted to cached features, each with its own seed."""
    epochs: int | None = None
    """Override the preset's number of epochs."""
    batch_size: int | None = None
    """Override the preset's batch size."""
    lr: float | None = None
    """Override the preset's initial learning rate."""
    milestones: tuple[int, ...] | None = None
    """Override the preset's epochs at which the learning rate is divided by ten."""
    seed: int = 0
    """Seed of the classifier that is trained on crops."""

    def __post_init__(self) -> None:
        check_choices(self, "linear")
        check_at_least(self, "linear", penalty=0)
        if not 1 <= self.seeds <= 1000:
            raise InputError(
                f"linear.seeds={shown(self.seeds)} must be between 1 and 1000: the number of"
                " classifiers."
            )

    @property
    def changes(self) -> dict[str, object]:
        """The settings that override the preset, by name."""
        names = ("epochs", "batch_size", "lr", "milestones")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(EvaluationOptions):
    """Fine-tune all weights on a fraction of the labels; not in the paper."""

    labels: float = 1.0
    """Fraction of the labels to use, such as 0.01, 0.1 or 1.0; the same number of images from
    every class."""
    epochs: int = 30
    """Passes over the chosen images."""
    batch_size: int = 128
    """Most images per step."""
    lr: float = 0.01
    """Initial learning rate of the trunk."""
    classifier_lr: float = 0.1
    """Initial learning rate of the new classifier."""
    weight_decay: float = 1e-4
    """Weight decay, on all weights."""
    min_scale: float = 0.2
    """Smallest area of a training crop, as a fraction of the image."""
    seed: int = 0
    """Seed of the choice of labels, the classifier's initial weights, the order and the crops."""
    untrained: bool = False
    """Start from random weights, for comparison."""

    def __post_init__(self) -> None:
        check_choices(self, "finetune")
        check_at_least(self, "finetune", epochs=1, batch_size=1, weight_decay=0, seed=0)
        check_above(self, "finetune", labels=0, lr=0, classifier_lr=0)
        check_between(self, "finetune", 0.0, 1.0, "labels", "min_scale")
        if self.untrained and self.checkpoint is not None:
            raise InputError(
                f"finetune.untrained with finetune.checkpoint={self.checkpoint}: random weights do"
                " not come from a checkpoint; omit one of the two."
            )


@dataclass(frozen=True, kw_only=True)
class OwnOptions(EvaluationOptions):
    """Evaluate a run's encoder by your own function: hardmix mypackage:function RUN."""

    def __post_init__(self) -> None:
        check_choices(self, "evaluation")


LINEAR_PRESETS: dict[LinearPreset, LinearConfig] = {
    "imagenet100": LinearConfig(),
    "imagenet1k": LinearConfig(epochs=100, batch_size=512, lr=30.0, milestones=(60, 80)),
    "official-moco": LinearConfig(epochs=100, batch_size=256, lr=30.0, milestones=(60, 80)),
}
"""Linear evaluation as run by the paper (App. C.1) and by official MoCo."""


@dataclass(frozen=True)
class Evaluation:
    """A way to evaluate a run's encoder, from which all that mentions it is derived."""

    title: str
    """Title in the report's tables and, with "top-1", in the columns of a sweep."""
    options: type
    """Class of its options; the first line of its docstring describes the command."""
    variants: dict[str, str] = field(default_factory=dict)
    """Titles of further kinds of results that it writes, by kind."""
    shared: bool = True
    """Whether several processes can share the command (torchrun)."""
    one_accuracy: bool = True
    """Whether a run has a single accuracy of it, which is then a column of sweeps."""


EVALUATIONS: dict[str, Evaluation] = {
    "linear": Evaluation(
        "Linear evaluation", LinearOptions, variants={"linear-cached": "Linear probe"}
    ),
    "knn": Evaluation("k-NN", KnnOptions),
    "finetune": Evaluation("Fine-tuned", FinetuneConfig, shared=False, one_accuracy=False),
}
"""Every evaluation, the paper's own first. Its name is that of the command, of the result file in
RUN/results (perhaps with a suffix: finetune-0.1.json), and of the file in evaluation/ with the
function `measure`."""
OTHER_ACCURACIES = {"transfer": "Linear probe on other images"}
"""Titles of accuracies that no command measures, but a sweep."""
OTHER_RESULTS = {"detection": "Detection", "embedding": "Embedding space", "queue": "Queue"}
"""Titles of results without an accuracy: average precisions, and the losses of App. A."""


def result_titles() -> dict[str, str]:
    """Return the title of every kind of results, in the order of the report."""
    return _titles(EVALUATIONS) | OTHER_ACCURACIES | OTHER_RESULTS


def accuracy_titles() -> dict[str, str]:
    """Return the kinds with a single accuracy per run, and their titles in columns and axes."""
    single = {name: each for name, each in EVALUATIONS.items() if each.one_accuracy}
    titles = _titles(single) | OTHER_ACCURACIES
    return {kind: f"{title} top-1" for kind, title in titles.items()}


def _titles(evaluations: Mapping[str, Evaluation]) -> dict[str, str]:
    return {
        kind: title
        for name, evaluation in evaluations.items()
        for kind, title in {name: evaluation.title, **evaluation.variants}.items()
    }


def evaluation_kind(name: str) -> str:
    """Return the kind that a result belongs to, given its name; the name if there is none."""
    fitting = [kind for kind in result_titles() if name == kind or name.startswith(f"{kind}-")]
    return max(fitting, key=len, default=name)


def evaluation_title(name: str) -> str:
    """Return the title of a result file, given its name."""
    kind = evaluation_kind(name)
    title = result_titles().get(kind, name)
    share, _, start = name.removeprefix("finetune-").partition("-")
    if kind == "finetune" and share.replace(".", "", 1).isdigit():
        title = f"{title} on {float(share):.4g} of the labels"
        title += ", from random weights" if start == "untrained" else ""
    return title


DetectionTask = Literal["voc", "coco"]
DetectionSchedule = Literal["24k", "1x", "2x", "short"]
DetectionStart = Literal["run", "supervised", "random"]

VOC_SIDES = tuple(range(480, 801, 32))
"""Lengths in pixels of the shortest side when training on VOC."""

COCO_SIDES = tuple(range(640, 801, 32))
"""Lengths in pixels of the shortest side when training on COCO."""

TEST_SIDE = 800
"""Length in pixels of the shortest side in all tests of the paper."""


@dataclass(frozen=True, kw_only=True)
class DetectionConfig:
    """Fine-tuning a C4 detector: Faster R-CNN on VOC, Mask R-CNN on COCO."""

    task: DetectionTask
    """voc: boxes, with VOC's layout and AP. coco: boxes and masks, with COCO's layout and AP."""
    schedule: DetectionSchedule
    """The named schedule that the settings below start from."""
    start: DetectionStart = "run"
    """The run's encoder, or a baseline of the paper: supervised weights, random weights."""
    iterations: int = 24_000
    """Steps of SGD."""
    milestones: tuple[int, ...] = (18_000, 22_000)
    """Steps at which the learning rate is divided by 10."""
    warm_up: int = 100
    """Steps over which the learning rate rises linearly from a thousandth of its value."""
    batch_size: int = 16
    """Images per step, summed over all processes."""
    lr: float = 0.02
    """Learning rate after the warm-up."""
    weight_decay: float = 1e-4
    """Weight decay, on all weights except those of batch norm."""
    sides: tuple[int, ...] = VOC_SIDES
    """Lengths in pixels of a training image's shortest side; one is drawn for each image."""
    test_side: int = TEST_SIDE
    """Length in pixels of a test image's shortest side."""
    regions: int = 512
    """RoIs sampled per training image."""
    proposals: int = 1000
    """Proposals per test image that the RoI heads classify."""
    precise_bn: int = 200
    """Training batches whose statistics replace the running batch-norm statistics before the
    final test; 0: keep the running ones."""
    trials: int = 3
    """Number of detectors to train, each with its own seed; the paper's results are means over
    3."""
    seed: int = 0
    """Seed of the first trial; later trials count up from it."""
    test_every: int = 0
    """Steps between tests during training; 0: test only at the end."""
    save_every: int = 1000
    """Steps between checkpoints."""
    log_every: int = 20
    """Steps between lines of metrics.jsonl."""
    workers: int | None = None
    """Worker processes that read images, per process. Unset: one fewer than its cores."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Number format of the detector's forward passes; boxes and losses stay in float32."""

    def __post_init__(self) -> None:
        check_choices(self, "detect")
        check_above(self, "detect", lr=0)
        check_at_least(self, "detect", iterations=1, batch_size=1, test_side=16, regions=4)
        check_at_least(self, "detect", proposals=1, trials=1, save_every=1, log_every=1)
        check_at_least(self, "detect", warm_up=0, precise_bn=0, test_every=0, seed=0)
        check_between(self, "detect", 0, 1024, "workers")
        check_between(self, "detect", 0.0, 1.0, "weight_decay")
        if not self.sides or min(self.sides) < 16:
            raise InputError(
                f"detect.sides={self.sides} must be one length or more, each at least 16 pixels:"
                " the size of a cell."
            )
        if list(self.milestones) != sorted(self.milestones):
            raise InputError(f"detect.milestones={self.milestones} must be in ascending order.")


_COCO = DetectionConfig(
    task="coco",
    schedule="1x",
    iterations=90_000,
    milestones=(60_000, 80_000),
    warm_up=1000,
    sides=COCO_SIDES,
)

_SHORT = DetectionConfig(
    task="voc",
    schedule="short",
    iterations=600,
    milestones=(450, 550),
    warm_up=50,
    batch_size=4,
    lr=0.02,
    sides=(256, 288, 320, 352, 384),
    test_side=320,
    regions=64,
    proposals=200,
    precise_bn=50,
    save_every=100,
    test_every=100,
    trials=1,
)

SCHEDULES: dict[tuple[DetectionTask, DetectionSchedule], DetectionConfig] = {
    ("voc", "24k"): DetectionConfig(task="voc", schedule="24k"),
    ("voc", "short"): _SHORT,
    ("coco", "1x"): _COCO,
    ("coco", "2x"): replace(
        _COCO, schedule="2x", iterations=180_000, milestones=(120_000, 160_000)
    ),
    ("coco", "short"): replace(_SHORT, task="coco"),
}
"""24k: official MoCo's, for VOC. 1x, 2x: detectron2's, for COCO. short: ours, for CPUs."""

USUAL: dict[DetectionTask, DetectionSchedule] = {"voc": "24k", "coco": "1x"}
"""The default schedule of each task."""


def schedule_of(task: DetectionTask, schedule: DetectionSchedule | None) -> DetectionConfig:
    """Return the settings of a schedule; None means the task's default schedule."""
    name = schedule or USUAL[task]
    if (task, name) not in SCHEDULES:
        names = ", ".join(name for kind, name in SCHEDULES if kind == task)
        raise InputError(f"schedule {name!r} does not exist for task {task!r}: choose {names}.")
    return SCHEDULES[task, name]


def with_batch(config: DetectionConfig, batch_size: int) -> DetectionConfig:
    """Return the config with another batch size and a learning rate in proportion to it.

    This is official MoCo's advice.
    """
    checked = replace(config, batch_size=batch_size)
    return replace(checked, lr=config.lr * batch_size / config.batch_size)
