"""Strategies: which points to mix (Sec. 4, App. B.2, SynCo, MixCSE), and the parts of your own."""

from typing import TYPE_CHECKING

from hardmix.settings.lazy_names import lazy_names

if TYPE_CHECKING:
    from hardmix.mixing.plans import VECTOR as VECTOR
    from hardmix.mixing.strategies import (
        STRATEGIES as STRATEGIES,
        Candidates as Candidates,
        Strategy as Strategy,
        dropped_negatives as dropped_negatives,
        plan_beta_weighted as plan_beta_weighted,
        plan_fixed_percentage as plan_fixed_percentage,
        plan_mixcse as plan_mixcse,
        plan_mixed_with_key as plan_mixed_with_key,
        plan_points as plan_points,
        plan_softmax_sampled as plan_softmax_sampled,
        plan_synco as plan_synco,
    )
    from hardmix.mixing.transformations import (
        FeatureTransformation as FeatureTransformation,
        extrapolated_positives as extrapolated_positives,
        mixed_queue as mixed_queue,
    )

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
