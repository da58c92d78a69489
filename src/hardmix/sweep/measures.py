"""The numbers that a sweep compares, and how each is read from a finished run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hardmix.analysis.over_training import epoch_means
from hardmix.runs.reading import RunRecord, number
from hardmix.settings.titles import accuracy_titles
from hardmix.sweep.evaluating import is_present


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
