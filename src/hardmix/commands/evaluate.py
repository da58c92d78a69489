"""The commands that judge or use a finished run. Part of the command line: see cli.py.

Each takes the run's folder first, and `--data.*` for other images than those it was trained on.
"""

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from hardmix.errors import InputError
from hardmix.settings.config import DataConfig
from hardmix.settings.detection_options import (
    DetectionSchedule,
    DetectionStart,
    DetectionTask,
    schedule_of,
    with_batch,
)
from hardmix.settings.evaluation_options import FinetuneConfig, ProbeSolver
from hardmix.settings.recipes import LINEAR_PRESETS

Help = tyro.conf.arg
RunFolder = Annotated[tyro.conf.Positional[Path], Help(metavar="RUN", help="the run's folder")]
Preset = Literal["imagenet100", "imagenet1k", "official-moco"]


def knn(arguments: list[str]) -> None:
    """k-NN accuracy of a run's encoder."""

    @dataclass(frozen=True, kw_only=True)
    class Knn:
        """k-NN accuracy of a run's encoder: hardmix knn RUN. Nothing is trained."""

        run: RunFolder
        k: Annotated[int, Help(help="neighbours that vote")] = 200
        temperature: Annotated[float, Help(help="of the votes")] = 0.07
        baseline: Annotated[
            tuple[Literal["pixels", "untrained"], ...],
            Help(help="also score what needs no training: the floor"),
        ] = ()
        data: DataConfig = field(default_factory=lambda: _data_of(arguments))

    options = tyro.cli(Knn, prog="hardmix knn", args=arguments)
    from hardmix.evaluation.run_knn import evaluate

    evaluate(
        options.run,
        options.data,
        k=options.k,
        temperature=options.temperature,
        baselines=options.baseline,
    )


def linear(arguments: list[str]) -> None:
    """Linear evaluation of a run's encoder."""

    @dataclass(frozen=True, kw_only=True)
    class Linear:
        """Linear evaluation: hardmix linear RUN [--preset imagenet100|imagenet1k|official-moco].

        With a preset, the paper's protocol: a classifier trained on random crops. Without one,
        features are extracted once and a classifier is fitted in seconds (--cached), where the
        images are fewer than 100,000.
        """

        run: RunFolder
        preset: Annotated[Preset | None, Help(help="whose protocol")] = None
        cached: Annotated[bool | None, Help(help="fit on features extracted once")] = None
        solver: Annotated[ProbeSolver, Help(help="of --cached")] = "lbfgs"
        seeds: Annotated[int, Help(help="classifiers fitted by --cached")] = 3
        epochs: Annotated[int | None, Help(help="other than the preset's")] = None
        batch_size: Annotated[int | None, Help(help="other than the preset's")] = None
        lr: Annotated[float | None, Help(help="other than the preset's")] = None
        milestones: Annotated[tuple[int, ...] | None, Help(help="epochs of lr x 0.1")] = None
        seed: int = 0
        """of the classifier that is trained on crops"""
        data: DataConfig = field(default_factory=lambda: _data_of(arguments))

    options = tyro.cli(Linear, prog="hardmix linear", args=arguments)
    if options.seeds < 1:
        raise InputError(f"--seeds {options.seeds} is below 1: it counts classifiers.")
    from hardmix.evaluation import linear as evaluation

    changes = {
        name: getattr(options, name)
        for name in ("epochs", "batch_size", "lr", "milestones")
        if getattr(options, name) is not None
    }
    cached = options.cached
    if cached is None:
        cached = options.preset is None and not changes and _is_small(options.data)
    if cached:
        evaluation.evaluate_cached(
            options.run, options.data, solver=options.solver, seeds=options.seeds
        )
        return
    preset = options.preset or _preset_of(options.run)
    config = replace(LINEAR_PRESETS[preset], seed=options.seed, **changes)
    changed = "".join(f", {name} {value}" for name, value in changes.items())
    evaluation.evaluate(options.run, config, options.data, f"preset {preset}{changed}")


def finetune(arguments: list[str]) -> None:
    """All weights trained on a share of the labels."""

    @dataclass(frozen=True, kw_only=True)
    class Finetune:
        """Fine-tune all weights: hardmix finetune RUN --labels 0.01|0.1|1.0."""

        run: RunFolder
        settings: Annotated[FinetuneConfig, Help(name="")] = field(default_factory=FinetuneConfig)
        untrained: Annotated[bool, Help(help="start from random weights, to compare")] = False
        data: DataConfig = field(default_factory=lambda: _data_of(arguments))

    options = tyro.cli(Finetune, prog="hardmix finetune", args=arguments)
    from hardmix.evaluation.finetune import evaluate

    evaluate(options.run, options.settings, options.data, untrained=options.untrained)


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
    options = tyro.cli(Detect, prog="hardmix detect", args=arguments)
    config = schedule_of(options.task, options.schedule)
    if options.batch_size is not None:
        config = with_batch(config, options.batch_size)
    names = {each.name for each in fields(config)} & vars(options).keys() - {"task", "schedule"}
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    config = replace(config, workers=options.data.workers, **given)
    from hardmix.evaluation.detection.detect import evaluate

    evaluate(options.run, config, options.data.root, weights=options.weights, out=options.out)


def features(arguments: list[str]) -> None:
    """Features of any folder of images, to a file."""

    @dataclass(frozen=True, kw_only=True)
    class Features:
        """Features of any images: hardmix features RUN --data.root DIR --out FILE."""

        run: RunFolder
        out: Annotated[Path, Help(help=".safetensors, .npy or .csv; names are written beside it")]
        data: DataConfig = field(default_factory=lambda: _data_of(arguments))

    options = tyro.cli(Features, prog="hardmix features", args=arguments)
    from hardmix.evaluation.feature_files import write_features

    write_features(options.run, options.data, options.out)


def neighbours(arguments: list[str]) -> None:
    """The images nearest to one, as a picture."""

    @dataclass(frozen=True, kw_only=True)
    class Neighbours:
        """The images most similar to one: hardmix neighbours RUN IMAGE [--data.root DIR]."""

        run: RunFolder
        image: Annotated[tyro.conf.Positional[Path], Help(metavar="IMAGE", help="an image file")]
        out: Annotated[Path, Help(help="the contact sheet")] = Path("neighbours.png")
        number: Annotated[int, Help(help="images to show")] = 11
        data: DataConfig = field(default_factory=lambda: _data_of(arguments))

    options = tyro.cli(Neighbours, prog="hardmix neighbours", args=arguments)
    from hardmix.evaluation.feature_files import show_neighbours

    show_neighbours(options.run, options.image, options.data, options.out, options.number)


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write a run's encoder for another program: hardmix export RUN --format onnx --out FILE."""

    run: RunFolder
    format: Annotated[str, Help(help="safetensors, torchvision, timm, onnx or detectron2")]
    out: Annotated[Path, Help(help="the file to write; detectron2's configs stand beside it")]


def export(arguments: list[str]) -> None:
    """Write a run's encoder for another program."""
    options = tyro.cli(Export, prog="hardmix export", args=arguments)
    from hardmix.weights.export import export as write

    write(options.run, options.format, options.out)


def _data_of(arguments: list[str]) -> DataConfig:
    """The run's own images are the default; a root of another kind is recognised by itself."""
    if not arguments or arguments[0].startswith("-"):
        return DataConfig()
    from hardmix.runs.folder import Run

    data = Run.open(arguments[0]).config().data
    given: dict[str, Any] = {"name": None, "num_images": None}
    if any(word.split("=")[0] == "--data.root" for word in arguments):
        return replace(data, **given)
    return data


def _is_small(data: DataConfig) -> bool:
    from hardmix.data.datasets import open_images
    from hardmix.evaluation.linear import SMALL

    return len(open_images(data, "train")) < SMALL


def _preset_of(run: Path) -> str:
    from hardmix.runs.folder import Run

    recipe = Run.open(run).config().recipe
    return recipe if recipe in LINEAR_PRESETS else "imagenet100"
