"""hardmix: contrastive pre-training with hard negative mixing (MoCHi, NeurIPS 2020).

Every public name is imported when it is first used: `hardmix --help` needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hardmix.errors import InputError
    from hardmix.evaluation.features import TrainedEncoder, load_encoder
    from hardmix.mixing.diagnostics import (
        FalseParents,
        ProxyAccuracy,
        false_negatives_top,
        false_parents,
        matching_probability,
        proxy_accuracy,
    )
    from hardmix.mixing.embedding_space import alignment, uniformity
    from hardmix.mixing.infonce import Contrast, contrast
    from hardmix.mixing.loss import MochiLoss
    from hardmix.mixing.plans import (
        KEY,
        QUERY,
        Embeddings,
        HardestNegatives,
        MixPlan,
        Strategy,
        hardest_negatives,
        materialize,
        mix_pairs,
        mix_with_query,
        plan_mochi,
    )
    from hardmix.mixing.queue import MemoryQueue
    from hardmix.mixing.variants import (
        STRATEGIES,
        dropped_negatives,
        plan_beta_weighted,
        plan_fixed_percentage,
        plan_mixed_with_key,
        plan_ranked_by_key,
        plan_softmax_sampled,
    )

__version__ = "0.1.0"
"""The version of hardmix."""

_HOME = {
    "mixing.infonce": ["Contrast", "contrast"],
    "mixing.diagnostics": [
        "FalseParents",
        "ProxyAccuracy",
        "false_negatives_top",
        "false_parents",
        "matching_probability",
        "proxy_accuracy",
    ],
    "mixing.embedding_space": ["alignment", "uniformity"],
    "errors": ["InputError"],
    "evaluation.features": ["TrainedEncoder", "load_encoder"],
    "mixing.loss": ["MochiLoss"],
    "mixing.queue": ["MemoryQueue"],
    "mixing.plans": [
        "KEY",
        "QUERY",
        "Embeddings",
        "HardestNegatives",
        "MixPlan",
        "Strategy",
        "hardest_negatives",
        "materialize",
        "mix_pairs",
        "mix_with_query",
        "plan_mochi",
    ],
    "mixing.variants": [
        "STRATEGIES",
        "dropped_negatives",
        "plan_beta_weighted",
        "plan_fixed_percentage",
        "plan_mixed_with_key",
        "plan_ranked_by_key",
        "plan_softmax_sampled",
    ],
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "KEY",
    "QUERY",
    "STRATEGIES",
    "Contrast",
    "Embeddings",
    "FalseParents",
    "HardestNegatives",
    "InputError",
    "MemoryQueue",
    "MixPlan",
    "MochiLoss",
    "ProxyAccuracy",
    "Strategy",
    "TrainedEncoder",
    "__version__",
    "alignment",
    "contrast",
    "dropped_negatives",
    "false_negatives_top",
    "false_parents",
    "hardest_negatives",
    "load_encoder",
    "matching_probability",
    "materialize",
    "mix_pairs",
    "mix_with_query",
    "plan_beta_weighted",
    "plan_fixed_percentage",
    "plan_mixed_with_key",
    "plan_mochi",
    "plan_ranked_by_key",
    "plan_softmax_sampled",
    "proxy_accuracy",
    "uniformity",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'hardmix' has no attribute {name!r}")
    value = getattr(import_module(f"hardmix.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
