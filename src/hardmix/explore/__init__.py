"""Exploring images with an encoder: duplicates, clusters, outliers, neighbours, wrong labels.

Works on any features, one row per image: `hardmix.explore.duplicates(features)`. Every name is
imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hardmix.explore.clustering import Clusters, clusters
    from hardmix.explore.label_checks import Mislabelled, mislabelled
    from hardmix.explore.near_duplicates import DuplicateGroup, Duplicates, duplicates
    from hardmix.explore.nearest import Neighbours, centred, neighbours
    from hardmix.explore.outlying import Outliers, outliers

_HOME = {
    "clustering": "Clusters clusters",
    "label_checks": "Mislabelled mislabelled",
    "near_duplicates": "DuplicateGroup Duplicates duplicates",
    "nearest": "Neighbours centred neighbours",
    "outlying": "Outliers outliers",
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names.split()}

__all__ = [
    "Clusters",
    "DuplicateGroup",
    "Duplicates",
    "Mislabelled",
    "Neighbours",
    "Outliers",
    "centred",
    "clusters",
    "duplicates",
    "mislabelled",
    "neighbours",
    "outliers",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'hardmix.explore' has no attribute {name!r}")
    value = getattr(import_module(f"hardmix.explore.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
