"""Exploring images with an encoder: duplicates, clusters, outliers, neighbours, wrong labels.

`hardmix.explore.folder("photos")` explores a folder of images, without training. The other
functions work on any features, one row per image: `hardmix.explore.duplicates(features)`. Every
name is imported on first use.
"""

from typing import TYPE_CHECKING

from hardmix.settings.lazy_names import lazy_names

if TYPE_CHECKING:
    from hardmix.explore.clustering import (
        Clusters as Clusters,
        clusters as clusters,
    )
    from hardmix.explore.exploring import (
        Exploration as Exploration,
        ExploreOptions as ExploreOptions,
        explore_run as explore_run,
        folder as folder,
    )
    from hardmix.explore.near_duplicates import (
        DuplicateGroup as DuplicateGroup,
        Duplicates as Duplicates,
        duplicates as duplicates,
    )
    from hardmix.explore.neighbourhoods import (
        Mislabelled as Mislabelled,
        Neighbours as Neighbours,
        Outliers as Outliers,
        centred as centred,
        mislabelled as mislabelled,
        neighbours as neighbours,
        outliers as outliers,
        sparse as sparse,
    )

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
