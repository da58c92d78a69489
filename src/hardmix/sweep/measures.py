"""The evaluations of a sweep's run, by the name of their result files; existing ones stay."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hardmix.analysis.embedding import measure_run
from hardmix.analysis.over_training import epoch_means
from hardmix.errors import InputError
from hardmix.evaluation.detection import detect
from hardmix.evaluation.evaluated_run import open_evaluated_run, run_evaluation
from hardmix.evaluation.linear import cached_protocol, measure_cached
from hardmix.mixing.embedding_space import uniformity
from hardmix.runs.checkpoints import load_newest
from hardmix.runs.folder import Run
from hardmix.runs.reading import RunRecord, number
from hardmix.settings.config import DataConfig
from hardmix.settings.evaluations import (
    EVALUATIONS,
    SCHEDULES,
    DetectionConfig,
    KnnOptions,
    LinearOptions,
    accuracy_titles,
)
from hardmix.settings.saved import absolute_root
from hardmix.sweep.grids import grid_named
from hardmix.sweep.planning import SweepOptions

VOTE = KnnOptions(k=200)
"""One k for all sweeps, so that their tables compare; results record k = 20 as well."""
QUEUE_KEYS = "memory.keys"
"""Suffix of the name of the queue's keys in a checkpoint."""

PROTOCOLS: dict[str, dict[str, Any]] = {
    "linear-cached": {"protocol": cached_protocol("lbfgs")},
    "knn": {"k": VOTE.k, "temperature": VOTE.temperature},
    "linear": {},
}
"""Values that a result must record, besides its images and preset: a user may have evaluated
the run differently by hand."""

NAMED_BY_PLACE = (None, "folder", "list")
"""Data sets whose result files record a path, which may have changed."""


def is_present(record: RunRecord, name: str) -> bool:
    """Return whether the run has this result, by the sweep's protocol and on its own images."""
    result = record.results.get(name)
    if result is None:
        return False
    if name not in PROTOCOLS:
        return True
    wanted = dict(PROTOCOLS[name])
    if name == "linear":
        wanted["protocol"] = f"preset {record.settings['recipe']}"
    if record.settings["data.name"] not in NAMED_BY_PLACE:
        wanted["data"] = record.settings["data.name"]
    return all(result.get(key) == value for key, value in wanted.items())


def evaluate(run: Run, name: str, options: SweepOptions) -> None:
    """Run one evaluation in this process."""
    data = _data(run, name, options)
    if name.startswith("detection-"):
        _detect(run, name, options)
    elif name in MAKERS:
        MAKERS[name](run, data, options)
    else:
        run_evaluation(name, run.path, EVALUATIONS[name].options(), data)


def _data(run: Run, name: str, options: SweepOptions) -> DataConfig:
    """Return the images of an evaluation, which may have moved since the run was trained."""
    data = replace(run.config().data, root=options.data_root)
    grid = grid_named(options.grid)
    labelled = grid.labelled_images
    if name in ("linear-cached", "transfer"):
        labelled = grid.probe_images or labelled
    return data if labelled is None else replace(data, num_images=labelled)


def _probe(options: SweepOptions) -> LinearOptions:
    return LinearOptions(cached=True, penalty=grid_named(options.grid).probe_penalty)


def _linear_cached(run: Run, data: DataConfig, options: SweepOptions) -> None:
    run_evaluation("linear", run.path, _probe(options), data)


def _knn(run: Run, data: DataConfig, _: SweepOptions) -> None:
    run_evaluation("knn", run.path, VOTE, data)


def _linear(run: Run, data: DataConfig, _: SweepOptions) -> None:
    run_evaluation("linear", run.path, LinearOptions(cached=False), data)


def _transfer(run: Run, data: DataConfig, options: SweepOptions) -> None:
    """Sec. 5.2 in its simplest form: the probe on the images of --transfer-root."""
    other = replace(data, name=None, root=options.transfer_root, test=None)
    measure_cached(open_evaluated_run(run.path, other), _probe(options), "transfer")


def _embedding(run: Run, data: DataConfig, _: SweepOptions) -> None:
    measure_run(run, data)


def _queue(run: Run, _: DataConfig, __: SweepOptions) -> None:
    """App. A's losses in the embedding where the contrastive loss acts, as training left it.

    Uniformity is that of the keys in the queue; alignment, E|q - k|^2 of two views of an image,
    follows from their similarity over the last epoch.
    """
    checkpoint = load_newest(run.checkpoints, set_aside=False)
    tensors = {} if checkpoint is None else checkpoint.tensors
    keys = next((value for name, value in tensors.items() if name.endswith(QUEUE_KEYS)), None)
    similarity = epoch_means(run.metrics(), "positive_similarity")
    if keys is None or not similarity:
        raise InputError(f"{run.path} has no queue: the evaluation 'queue' is for MoCo and MoCHi.")
    found = {"uniformity": uniformity(keys), "alignment": 2 - 2 * similarity[-1]}
    run.write_result("queue", {**found, "keys": len(keys)})


def _detect(run: Run, name: str, options: SweepOptions) -> None:
    config, root = _detector(name, options)
    workers = config.workers if options.workers is None else options.workers
    config = replace(config, device=options.device, workers=workers)
    detect.evaluate(run.path, config, root)


def _detector(name: str, options: SweepOptions) -> tuple[DetectionConfig, Path]:
    """Return the schedule of a detector, by the name of its result, and its images."""
    _, task, schedule = name.split("-")
    config = SCHEDULES[task, schedule]  # type: ignore[index]  # of a result's name
    root = options.voc_root if task == "voc" else options.coco_root
    assert root is not None, "checked by check_roots"
    if steps := options.detector_iterations:
        share = steps / config.iterations
        config = replace(
            config,
            iterations=steps,
            milestones=tuple(round(share * each) for each in config.milestones),
            warm_up=round(share * config.warm_up),
            precise_bn=min(steps, config.precise_bn),
            test_every=0,
        )
    return config, root.expanduser()


def shared_command(run: Run, name: str, options: SweepOptions) -> list[str] | None:
    """Return the command whose work several processes share; None if one does it in minutes."""
    if name.startswith("detection-"):
        config, root = _detector(name, options)
        words = ["detect", str(run.path), "--task", config.task, "--schedule", config.schedule]
        words += ["--data.root", str(root), "--device", options.device]
        return words + _given("--data.workers", options.workers) + _changes(config)
    if name not in ("linear", "knn"):
        return None
    own = ["--no-cached"] if name == "linear" else ["--k", str(VOTE.k)]
    data = _data(run, name, options)
    images = absolute_root(options.data_root)
    moved = images if images != run.config().data.root else None
    words = [name, str(run.path), *own, *_given("--data.root", moved)]
    return words + _given("--data.num-images", data.num_images)


def _changes(config: DetectionConfig) -> list[str]:
    """Return the options that make a detector's schedule this one."""
    usual, words = SCHEDULES[config.task, config.schedule], []
    for name in ("iterations", "milestones", "warm_up", "precise_bn", "test_every"):
        value = getattr(config, name)
        if value != getattr(usual, name):
            values = value if isinstance(value, tuple) else (value,)
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return words


def _given(option: str, value: object) -> list[str]:
    return [] if value is None else [option, str(value)]


MAKERS: dict[str, Callable[[Run, DataConfig, SweepOptions], None]] = {
    "linear-cached": _linear_cached,
    "linear": _linear,
    "knn": _knn,
    "transfer": _transfer,
    "embedding": _embedding,
    "queue": _queue,
}
"""Evaluations that need more than the default options of `EVALUATIONS`."""


# -- measures


@dataclass(frozen=True)
class Measure:
    """A number of a result file, and its place in the paper."""

    id: str
    """Key for joining; titles are only shown."""
    title: str
    file: str
    """Result file; "metrics" is the mean of the last epoch of metrics.jsonl."""
    path: tuple[str, ...]
    paper: tuple[str, str] | None = None
    """Task and metric in the table of the paper's numbers."""
    percent: bool = True

    @property
    def digits(self) -> int:
        """Decimals in tables."""
        return 2 if self.percent else 3

    def value(self, record: RunRecord) -> float | None:
        """Return the value as tables show it, fractions in percent; None if the run lacks it."""
        found = self._read(record)
        return 100 * found if found is not None and self.percent else found

    def _read(self, record: RunRecord) -> float | None:
        if self.file == "metrics":
            means = epoch_means(record.metrics, self.path[0])
            return means[-1] if means else None
        if not is_present(record, self.file):
            return None
        inside: Any = record.results[self.file]
        for name in self.path:
            inside = inside.get(name) if isinstance(inside, Mapping) else None
        return number(inside)


def _detection(file: str, metric: str, task: str, name: str, words: str) -> list[Measure]:
    paper = {"ap": "", "ap50": "50", "ap75": "75"}
    return [
        Measure(
            f"{file}/{metric}/{key}",
            f"{words} AP{end}",
            file,
            ("metrics", metric, key, "mean"),
            (task, f"{name}{end}") if task else None,
        )
        for key, end in paper.items()
    ]


def _logged(key: str, title: str) -> Measure:
    return Measure(key, title, "metrics", (key,))


PAPER_ACCURACIES = dict.fromkeys(("linear", "linear-cached"), ("linear", "top1"))
"""The paper's numbers that an accuracy is compared with, by the kind of its file."""

MEASURES: list[Measure] = [
    _logged("proxy_accuracy", "proxy accuracy"),
    _logged("proxy_accuracy_mixed", "proxy accuracy, with synthetic points"),
    _logged("synthetic_mass", "softmax mass of synthetic points"),
    _logged("synthetic_one_false", "pair points with a false parent"),
    *(
        Measure(kind, title, kind, ("top1",), PAPER_ACCURACIES.get(kind))
        for kind, title in accuracy_titles().items()
    ),
    Measure("knn-20", "k-NN top-1, k = 20", "knn", ("by_k", "20", "top1")),
    *_detection("detection-voc-24k", "VOC07 11-point", "voc_detection", "AP", "VOC"),
    *_detection("detection-coco-1x", "COCO box", "coco_detection", "APbb", "COCO 1x box"),
    *_detection("detection-coco-1x", "COCO mask", "coco_segmentation", "APmk", "COCO 1x mask"),
    *_detection("detection-voc-short", "VOC07 11-point", "voc_detection", "AP", "VOC short"),
    *_detection("detection-coco-short", "COCO box", "coco_detection", "APbb", "COCO short box"),
    *_detection("detection-coco-short", "COCO mask", "coco_segmentation", "APmk", "short mask"),
    *_detection("detection-coco-2x", "COCO box", "", "", "COCO 2x box"),
    *_detection("detection-coco-2x", "COCO mask", "", "", "COCO 2x mask"),
    Measure("alignment", "alignment", "embedding", ("alignment",), percent=False),
    Measure("uniformity", "uniformity", "embedding", ("uniformity",), percent=False),
    Measure("queue-alignment", "alignment of two views", "queue", ("alignment",), percent=False),
    Measure("queue-uniformity", "uniformity of the queue", "queue", ("uniformity",), percent=False),
    *(
        Measure(key, title, "pretrain", (key,), percent=False)
        for key, title in {
            "images_per_second": "images per second",
            "peak_mb": "peak memory in MB",
            "seconds": "seconds of training",
        }.items()
    ),
]
"""Losses of App. A have Wang and Isola's sign: lower is better."""
