"""The evaluations of a sweep's run, by the name of their result files; existing ones stay."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hardmix.analysis.embedding import measure_run
from hardmix.analysis.over_training import epoch_means
from hardmix.errors import InputError
from hardmix.evaluation.all_evaluations import EVALUATIONS
from hardmix.evaluation.detection import detect
from hardmix.evaluation.evaluated_run import open_evaluated_run
from hardmix.evaluation.linear import cached_protocol, measure_cached
from hardmix.mixing.embedding_space import uniformity
from hardmix.runs.checkpoints import load_newest
from hardmix.runs.folder import Run
from hardmix.runs.reading import RunRecord
from hardmix.settings.config import DataConfig
from hardmix.settings.detection_options import SCHEDULES, DetectionConfig
from hardmix.settings.evaluation_options import KnnOptions, LinearOptions
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
"""What a result must record to be used, besides its images and preset: a user may have evaluated
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
    """Run one evaluation; the images may have moved since the run was trained."""
    data = replace(run.config().data, root=options.data_root)
    grid = grid_named(options.grid)
    labelled = grid.labelled_images
    if name in ("linear-cached", "transfer"):
        labelled = grid.probe_images or labelled
    if labelled is not None:
        data = replace(data, num_images=labelled)
    if name in MAKERS:
        MAKERS[name](run, data, options)
    else:
        EVALUATIONS[name].measure(run.path, EVALUATIONS[name].Options(), data)


def _probe(options: SweepOptions) -> LinearOptions:
    return LinearOptions(cached=True, penalty=grid_named(options.grid).probe_penalty)


def _linear_cached(run: Run, data: DataConfig, options: SweepOptions) -> None:
    EVALUATIONS["linear"].measure(run.path, _probe(options), data)


def _knn(run: Run, data: DataConfig, _: SweepOptions) -> None:
    EVALUATIONS["knn"].measure(run.path, VOTE, data)


def _linear(run: Run, data: DataConfig, _: SweepOptions) -> None:
    EVALUATIONS["linear"].measure(run.path, LinearOptions(cached=False), data)


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


def _voc(run: Run, _: DataConfig, options: SweepOptions) -> None:
    _detect(run, SCHEDULES["voc", "24k"], options.voc_root, options)


def _coco(run: Run, _: DataConfig, options: SweepOptions) -> None:
    _detect(run, SCHEDULES["coco", options.coco_schedule], options.coco_root, options)


def _detect(run: Run, config: DetectionConfig, root: Path | None, options: SweepOptions) -> None:
    assert root is not None, "checked by check_roots"
    workers = config.workers if options.workers is None else options.workers
    config = replace(config, device=options.device, workers=workers)
    detect.evaluate(run.path, config, root.expanduser())


MAKERS: dict[str, Callable[[Run, DataConfig, SweepOptions], None]] = {
    "linear-cached": _linear_cached,
    "linear": _linear,
    "knn": _knn,
    "transfer": _transfer,
    "embedding": _embedding,
    "queue": _queue,
    "detection-voc-24k": _voc,
    "detection-coco-1x": _coco,
    "detection-coco-2x": _coco,
}
"""Evaluations that need more than the default options of `EVALUATIONS`."""
