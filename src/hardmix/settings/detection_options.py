"""Settings of `hardmix detect`, and its named schedules. Imports no torch.

The defaults are MoCo's detectron2 configuration, which the paper uses (Sec. 5.2, App. C.2).
"""

from dataclasses import dataclass, replace
from typing import Literal

from hardmix.errors import InputError
from hardmix.settings.bounds import check_above, check_at_least, check_between

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
        known = ", ".join(each for kind, each in SCHEDULES if kind == task)
        raise InputError(f"schedule {name!r} does not exist for task {task!r}: choose {known}.")
    return SCHEDULES[task, name]


def with_batch(config: DetectionConfig, batch_size: int) -> DetectionConfig:
    """Return the config with another batch size and a learning rate in proportion to it.

    This is official MoCo's advice.
    """
    checked = replace(config, batch_size=batch_size)
    return replace(checked, lr=config.lr * batch_size / config.batch_size)
