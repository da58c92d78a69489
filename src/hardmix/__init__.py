"""hardmix: contrastive pre-training with hard negative mixing (MoCHi, NeurIPS 2020).

Every public name is imported when it is first used: `hardmix --help` needs no torch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hardmix.contrast import Contrast, contrast
    from hardmix.diagnostics import (
        FalseParents,
        ProxyAccuracy,
        false_negatives_top,
        false_parents,
        matching_probability,
        proxy_accuracy,
    )
    from hardmix.embedding_space import alignment, uniformity
    from hardmix.errors import InputError
    from hardmix.features import TrainedEncoder, load_encoder
    from hardmix.loss import MochiLoss
    from hardmix.memory import MemoryQueue
    from hardmix.mixing import (
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
    from hardmix.mixing_variants import (
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
    "contrast": ["Contrast", "contrast"],
    "diagnostics": [
        "FalseParents",
        "ProxyAccuracy",
        "false_negatives_top",
        "false_parents",
        "matching_probability",
        "proxy_accuracy",
    ],
    "embedding_space": ["alignment", "uniformity"],
    "errors": ["InputError"],
    "features": ["TrainedEncoder", "load_encoder"],
    "loss": ["MochiLoss"],
    "memory": ["MemoryQueue"],
    "mixing": [
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
    "mixing_variants": [
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


class _Package(ModuleType):
    """`contrast` is a function and a module: importing the module must not hide the function."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in _MODULE_OF and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'hardmix' has no attribute {name!r}")
    value = getattr(import_module(f"hardmix.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
