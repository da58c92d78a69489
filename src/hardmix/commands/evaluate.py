"""The commands that judge a finished run, made of `EVALUATION_OPTIONS`; and `detect`.

Each takes the run's folder first, and `--data.*` for other images than those it was trained on.
"""

import typing
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated

from hardmix.commands import argv
from hardmix.commands.options import (
    Help,
    RunFolder,
    data_field,
    data_of,
    make_options,
    option_field,
    parse,
)
from hardmix.settings.detection_options import (
    DetectionSchedule,
    DetectionStart,
    DetectionTask,
    schedule_of,
    with_batch,
)
from hardmix.settings.evaluation_options import EVALUATION_OPTIONS
from hardmix.settings.facts import docs_of


def evaluation_command(name: str) -> Callable[[list[str]], None]:
    """The command of an evaluation: its options, and the images."""
    kind = EVALUATION_OPTIONS[name]

    def command(arguments: list[str]) -> None:
        own = argv.data_of_run(arguments)
        hints, docs, usual = typing.get_type_hints(kind), docs_of(kind), kind()
        made = [
            option_field(each, hint, getattr(usual, each), docs[each])
            for each, hint in hints.items()
        ]
        shown = [("run", RunFolder), *made, data_field(own, arguments)]
        options = parse(make_options(name, kind.__doc__ or "", shown), name, arguments)
        chosen = kind(**{each: getattr(options, each) for each in hints})
        from hardmix.evaluation.all_evaluations import EVALUATIONS

        EVALUATIONS[name].measure(options.run, chosen, data_of(options.data, own))

    command.__doc__ = (kind.__doc__ or "").split("\n")[0]
    return command


EVALUATION_COMMANDS: dict[str, Callable[[list[str]], None]] = {
    name: evaluation_command(name) for name in EVALUATION_OPTIONS
}


@dataclass(frozen=True, kw_only=True)
class DetectionData:
    """Where the images with boxes are."""

    root: Annotated[Path, Help(help="folder in the layout of VOC, or of COCO")]
    workers: Annotated[int, Help(help="processes that read images")] = 2


@dataclass(frozen=True, kw_only=True)
class Detect:
    """Fine-tune a run's encoder as a detector: hardmix detect RUN --task voc --data.root DIR.

    Faster R-CNN C4 on VOC (or any folder in its layout), Mask R-CNN C4 on COCO, as the paper.
    The same command again goes on where it stopped.
    """

    run: RunFolder
    task: Annotated[DetectionTask, Help(help="boxes and VOC's AP; boxes, masks and COCO's AP")]
    data: DetectionData
    schedule: Annotated[
        DetectionSchedule | None, Help(help="unset: 24k for voc, 1x for coco; short: for CPUs")
    ] = None
    trials: Annotated[int | None, Help(help="detectors trained, each with its own seed")] = None
    start: Annotated[DetectionStart, Help(name="from", help="what training starts from")] = "run"
    weights: Annotated[Path | None, Help(help="torchvision's file, of --from supervised")] = None
    out: Annotated[Path | None, Help(help="unset: RUN/detection/TASK-SCHEDULE")] = None
    iterations: Annotated[int | None, Help(help="other than the schedule's")] = None
    milestones: Annotated[tuple[int, ...] | None, Help(help="steps of lr x 0.1")] = None
    warm_up: Annotated[int | None, Help(help="other than the schedule's")] = None
    batch_size: Annotated[int | None, Help(help="lr follows unless it is set")] = None
    lr: Annotated[float | None, Help(help="other than the schedule's")] = None
    sides: Annotated[tuple[int, ...] | None, Help(help="shortest sides in training")] = None
    test_side: Annotated[int | None, Help(help="shortest side in tests")] = None
    regions: Annotated[int | None, Help(help="learnt from, of each image")] = None
    proposals: Annotated[int | None, Help(help="looked at, of each test image")] = None
    precise_bn: Annotated[int | None, Help(help="batches before the final test")] = None
    test_every: Annotated[int | None, Help(help="steps; 0: only at the end")] = None
    save_every: Annotated[int | None, Help(help="steps between checkpoints")] = None
    log_every: Annotated[int | None, Help(help="steps between lines of metrics")] = None
    seed: Annotated[int | None, Help(help="of the first trial")] = None
    device: Annotated[str | None, Help(help="auto, cpu, cuda or cuda:N")] = None


def detect(arguments: list[str]) -> None:
    """Fine-tune a run's encoder as a detector."""
    options = parse(Detect, "detect", arguments)
    config = schedule_of(options.task, options.schedule)
    if options.batch_size is not None:
        config = with_batch(config, options.batch_size)
    names = {each.name for each in fields(config)} & vars(options).keys() - {"task", "schedule"}
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    config = replace(config, workers=options.data.workers, **given)
    from hardmix.evaluation.detection.detect import evaluate

    evaluate(options.run, config, options.data.root, weights=options.weights, out=options.out)
