"""The evaluations by their commands: one line each. Options and titles stand in settings."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hardmix.evaluation import finetune, knn, linear
from hardmix.settings.config import DataConfig
from hardmix.settings.evaluation_options import EVALUATION_OPTIONS
from hardmix.settings.titles import EVALUATION_TITLES


class Evaluation(NamedTuple):
    """A way to judge a run's encoder: makes a command, a result file, a title and a column."""

    title: str
    """Of the report's table and the sweep's column."""
    Options: type
    """What can be chosen; settings without torch."""
    measure: Callable[[Path, Any, DataConfig | None], dict[str, Any]]
    """From a run's folder, options, and other images than its own, to what it wrote."""


MEASURES: dict[str, Callable[[Path, Any, DataConfig | None], dict[str, Any]]] = {
    "knn": knn.measure,
    "linear": linear.measure,
    "finetune": finetune.measure,
}

EVALUATIONS: dict[str, Evaluation] = {
    name: Evaluation(EVALUATION_TITLES[name], EVALUATION_OPTIONS[name], measure)
    for name, measure in MEASURES.items()
}
"""By the name of the command and of the result file."""
