"""The commands that evaluate a run, built from `EVALUATIONS`; and `detect`.

Each takes the run's folder first, and `--data.*` for images other than those it was trained on.
"""

import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Literal

from hardmix.commands.argv import CommandLine, data_of_run
from hardmix.commands.options import (
    Checkpoint,
    Help,
    RunFolder,
    data_field,
    data_of,
    make_options,
    option_field,
    parse,
)
from hardmix.settings.evaluations import (
    EVALUATIONS,
    DetectionSchedule,
    DetectionStart,
    DetectionTask,
    OwnOptions,
    schedule_of,
    with_batch,
)
from hardmix.settings.facts import docs_of


def evaluation_command(name: str) -> Callable[[CommandLine], None]:
    """Return the command of an evaluation, perhaps of one's own: its and the data options."""
    kind = EVALUATIONS[name].options if name in EVALUATIONS else OwnOptions

    def command(line: CommandLine) -> None:
        hints, docs, usual = typing.get_type_hints(kind), docs_of(kind), kind()
        own = data_of_run(line)
        made = [
            option_field(each, hint, getattr(usual, each), docs[each])
            for each, hint in hints.items()
        ]
        shown = [("run", RunFolder), *made, data_field(own, line)]
        options = parse(make_options(name, kind.__doc__ or "", shown), name, line)
        chosen = kind(**{each: getattr(options, each) for each in hints})
        from hardmix.evaluation.evaluated_run import run_evaluation

        run_evaluation(name, options.run, chosen, data_of(options.data, own))

    command.__doc__ = (kind.__doc__ or "").split("\n")[0]
    return command


def flags_of(name: str) -> dict[str, Sequence[str]]:
    """Return the options of an evaluation that may stand alone, since they may be unset."""
    hints = typing.get_type_hints(EVALUATIONS[name].options)
    flags = [each for each, hint in hints.items() if hint == bool | None]
    return dict.fromkeys(flags, ("True", "False", "None"))


EVALUATION_COMMANDS: dict[str, Callable[[CommandLine], None]] = {
    name: evaluation_command(name) for name in EVALUATIONS
}


@dataclass(frozen=True, kw_only=True)
class DetectionData:
    """The images with boxes."""

    root: Annotated[Path, Help(help="Folder in the layout of VOC or COCO.")]
    workers: Annotated[
        int | None,
        Help(help="Processes that read images. Unset: one fewer than the cores."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Detect:
    """Fine-tune a run's encoder as a detector: hardmix detect RUN --task voc --data.root DIR.

    Faster R-CNN C4 on VOC (or any folder in its layout), Mask R-CNN C4 on COCO, as in the paper.
    Options that are not set are the schedule's. Run the same command again to resume.
    """

    run: RunFolder
    task: Annotated[
        DetectionTask, Help(help="voc: boxes, VOC's AP. coco: boxes, masks, COCO's AP.")
    ]
    data: DetectionData
    schedule: Annotated[
        DetectionSchedule | None, Help(help="Unset: 24k for voc, 1x for coco. short is for CPUs.")
    ] = None
    trials: Annotated[int | None, Help(help="Detectors to train, each with its own seed.")] = None
    checkpoint: Checkpoint = None
    start: Annotated[
        DetectionStart,
        Help(name="from", help="Initial weights: the run's encoder, or a baseline of the paper."),
    ] = "run"
    weights: Annotated[
        Path | None, Help(help="torchvision's file of weights, for --from supervised.")
    ] = None
    out: Annotated[
        Path | None, Help(help="Folder to write. Unset: RUN/detection/TASK-SCHEDULE.")
    ] = None
    iterations: Annotated[int | None, Help(help="Steps of SGD.")] = None
    milestones: Annotated[
        tuple[int, ...] | None, Help(help="Steps at which the learning rate is divided by 10.")
    ] = None
    warm_up: Annotated[int | None, Help(help="Steps of learning-rate warm-up.")] = None
    batch_size: Annotated[
        int | None, Help(help="Images per step; the learning rate scales with it unless set.")
    ] = None
    lr: Annotated[float | None, Help(help="Learning rate after the warm-up.")] = None
    sides: Annotated[
        tuple[int, ...] | None, Help(help="Shortest sides of training images, in pixels.")
    ] = None
    test_side: Annotated[int | None, Help(help="Shortest side of test images, in pixels.")] = None
    regions: Annotated[int | None, Help(help="RoIs sampled per training image.")] = None
    proposals: Annotated[int | None, Help(help="Proposals per test image.")] = None
    precise_bn: Annotated[
        int | None, Help(help="Batches that set the batch-norm statistics of the final test.")
    ] = None
    test_every: Annotated[int | None, Help(help="Steps between tests; 0: only at the end.")] = None
    save_every: Annotated[int | None, Help(help="Steps between checkpoints.")] = None
    log_every: Annotated[int | None, Help(help="Steps between lines of metrics.jsonl.")] = None
    seed: Annotated[int | None, Help(help="Seed of the first trial.")] = None
    device: Annotated[str | None, Help(help="auto, cpu, cuda or cuda:N.")] = None
    precision: Annotated[
        Literal["fp32", "bf16"] | None,
        Help(help="Number format of the forward passes; boxes and losses stay in float32."),
    ] = None


def detect(line: CommandLine) -> None:
    """Fine-tune a run's encoder as a detector."""
    options = parse(Detect, "detect", line)
    config = schedule_of(options.task, options.schedule)
    if options.batch_size is not None:
        config = with_batch(config, options.batch_size)
    names = {each.name for each in fields(config)} & vars(options).keys() - {"task", "schedule"}
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    config = replace(config, workers=options.data.workers, **given)
    from hardmix.evaluation.detection.detect import evaluate

    where = options.run, config, options.data.root
    evaluate(*where, weights=options.weights, out=options.out, checkpoint=options.checkpoint)
