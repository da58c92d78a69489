"""The loss in other libraries: sentence-transformers, open_clip, lightly, Lightning and more.

None of these libraries is imported: the classes have the shape that each expects of a loss. Every
name is imported on first use: `from hardmix.integrations import NTXentLoss`.
"""

from typing import TYPE_CHECKING

from hardmix.settings.lazy_names import lazy_names

if TYPE_CHECKING:
    from hardmix.integrations.lightly import NTXentLoss as NTXentLoss
    from hardmix.integrations.lightning import MomentumContrast as MomentumContrast
    from hardmix.integrations.metric_learning import SupConLoss as SupConLoss
    from hardmix.integrations.mixing_options import MixingOptions as MixingOptions
    from hardmix.integrations.sentence_transformers import MixedNegativesLoss as MixedNegativesLoss
    from hardmix.integrations.two_tower import TwoTowerLoss as TwoTowerLoss

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
