"""The loss in other libraries: sentence-transformers, open_clip, lightly, Lightning.

None of these libraries is imported: the classes have the shape that each expects of a loss. Every
name is imported on first use: `from hardmix.integrations import NTXentLoss`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hardmix.integrations.lightly import NTXentLoss
    from hardmix.integrations.lightning import MomentumContrast
    from hardmix.integrations.mixing_options import MixingOptions
    from hardmix.integrations.sentence_transformers import MixedNegativesLoss
    from hardmix.integrations.two_tower import TwoTowerLoss

_HOME = {
    "lightly": "NTXentLoss",
    "lightning": "MomentumContrast",
    "mixing_options": "MixingOptions",
    "sentence_transformers": "MixedNegativesLoss",
    "two_tower": "TwoTowerLoss",
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names.split()}

__all__ = [
    "MixedNegativesLoss",
    "MixingOptions",
    "MomentumContrast",
    "NTXentLoss",
    "TwoTowerLoss",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'hardmix.integrations' has no attribute {name!r}")
    value = getattr(import_module(f"hardmix.integrations.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
