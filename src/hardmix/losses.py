"""The family around Eq. 1: weights, filters and denominators, and the parts of your own loss."""

from typing import TYPE_CHECKING

from hardmix.settings.lazy_names import lazy_names

if TYPE_CHECKING:
    from hardmix.mixing.family import (
        DENOMINATORS as DENOMINATORS,
        FILTERS as FILTERS,
        WEIGHTS as WEIGHTS,
        Denominator as Denominator,
        Masses as Masses,
        NegativeFilter as NegativeFilter,
        NegativeWeights as NegativeWeights,
        above_positive as above_positive,
        debiased as debiased,
        decoupled as decoupled,
        decoupled_weighted as decoupled_weighted,
        dual_temperature as dual_temperature,
        given_weights as given_weights,
        hardness_weights as hardness_weights,
        hcl as hcl,
        hcl_weights as hcl_weights,
        logq_weights as logq_weights,
        ring_weights as ring_weights,
        same_labels as same_labels,
        share_of_positive as share_of_positive,
        supcon_in as supcon_in,
    )
    from hardmix.mixing.infonce import (
        WeightLine as WeightLine,
        log_mass as log_mass,
    )
    from hardmix.mixing.logits import (
        Embeddings as Embeddings,
        Logits as Logits,
        logits as logits,
    )

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
