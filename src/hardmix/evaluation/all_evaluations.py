"""The evaluations by their commands, one line each. Options and titles are in settings/."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hardmix.evaluation import finetune, knn, linear
from hardmix.settings.config import DataConfig
from hardmix.settings.evaluation_options import EVALUATION_OPTIONS
from hardmix.settings.titles import EVALUATION_TITLES


class Evaluation(NamedTuple):
    """A way to evaluate a run's encoder; gives a command, a result file, a title and a column."""

    title: str
    """Title in the report's table and the sweep's columns."""
    Options: type
    """Class of its options; imports no torch."""
    measure: Callable[[Path, Any, DataConfig | None], dict[str, Any]]
    """Takes a run's folder, options and data (None: the run's), and returns the result written."""


MEASURES: dict[str, Callable[[Path, Any, DataConfig | None], dict[str, Any]]] = {
    "knn": knn.measure,
    "linear": linear.measure,
    "finetune": finetune.measure,
}

EVALUATIONS: dict[str, Evaluation] = {
    name: Evaluation(EVALUATION_TITLES[name], EVALUATION_OPTIONS[name], measure)
    for name, measure in MEASURES.items()
}
"""Every evaluation by name, which is that of its command and of its result file."""
