"""hardmix: contrastive pre-training with hard negative mixing (MoCHi, NeurIPS 2020).

Every public name is imported on first use, so that `hardmix --help` needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hardmix.analysis.analyze import Analysis, analyze
    from hardmix.analysis.figures.picture import Picture
    from hardmix.data.datasets import open_images
    from hardmix.data.image_files import UnreadableImage
    from hardmix.data.image_set import ImageSet
    from hardmix.data.shapes import draw_shapes
    from hardmix.errors import InputError, OutputError, UnfinishedError
    from hardmix.evaluation.accuracy import Accuracy, accuracy_of
    from hardmix.evaluation.evaluated_run import EvaluatedRun, open_evaluated_run
    from hardmix.evaluation.features import Features, TrainedEncoder, extract, load_encoder
    from hardmix.evaluation.knn import knn_accuracy
    from hardmix.evaluation.probe import probe_accuracy
    from hardmix.mixing.diagnostics import (
        FalseParents,
        NegativeMass,
        ProxyAccuracy,
        false_negatives_top,
        false_parents,
        matching_probability,
        negative_mass,
        proxy_accuracy,
        synthetic_mass,
    )
    from hardmix.mixing.embedding_space import alignment, uniformity
    from hardmix.mixing.family import (
        DENOMINATORS,
        FILTERS,
        WEIGHTS,
        Denominator,
        Masses,
        NegativeFilter,
        NegativeWeights,
        above_positive,
        debiased,
        decoupled,
        decoupled_weighted,
        dual_temperature,
        given_weights,
        hardness_weights,
        hcl,
        hcl_weights,
        ring_weights,
        same_labels,
        share_of_positive,
        supcon_in,
    )
    from hardmix.mixing.gradient_cache import backward_in_chunks
    from hardmix.mixing.infonce import Contrast, WeightLine, contrast, log_mass
    from hardmix.mixing.logits import Embeddings, Logits, logits
    from hardmix.mixing.loss import MochiLoss
    from hardmix.mixing.plans import (
        KEY,
        QUERY,
        VECTOR,
        HardestNegatives,
        MixPlan,
        hardest_negatives,
        materialize,
        plan_mochi,
    )
    from hardmix.mixing.queue import MemoryQueue
    from hardmix.mixing.strategies import (
        STRATEGIES,
        Candidates,
        Strategy,
        dropped_negatives,
        plan_beta_weighted,
        plan_fixed_percentage,
        plan_mixcse,
        plan_mixed_with_key,
        plan_points,
        plan_softmax_sampled,
        plan_synco,
    )
    from hardmix.mixing.transformations import (
        FeatureTransformation,
        extrapolated_positives,
        mixed_queue,
    )
    from hardmix.report.page import write_report
    from hardmix.runs.folder import Run
    from hardmix.runtime.device import Compute, choose_compute
    from hardmix.runtime.distributed import gather
    from hardmix.runtime.own_code import allow_code
    from hardmix.settings import recipes
    from hardmix.settings.config import DataConfig, ModelConfig, PretrainConfig, TrainConfig
    from hardmix.settings.detection_options import DetectionConfig
    from hardmix.settings.evaluation_options import (
        FinetuneConfig,
        KnnOptions,
        LinearConfig,
        LinearOptions,
    )
    from hardmix.settings.loss_options import LossConfig, MixConfig
    from hardmix.settings.method_options import (
        ByolOptions,
        CmcOptions,
        Co2Options,
        InstDisOptions,
        PclOptions,
        PirlOptions,
        SwavOptions,
        UnmixOptions,
    )
    from hardmix.settings.optimizer_options import OptimizerConfig
    from hardmix.settings.schedules import decreasing, mixing_started
    from hardmix.training.pretrain import pretrain
    from hardmix.weights.export import export
    from hardmix.weights.foreign import import_weights

__version__ = "0.1.0"
"""The version of hardmix."""

_HOME = {
    "analysis.analyze": "Analysis analyze",
    "analysis.figures.picture": "Picture",
    "data.datasets": "open_images",
    "data.image_files": "UnreadableImage",
    "data.image_set": "ImageSet",
    "data.shapes": "draw_shapes",
    "errors": "InputError OutputError UnfinishedError",
    "evaluation.accuracy": "Accuracy accuracy_of",
    "evaluation.evaluated_run": "EvaluatedRun open_evaluated_run",
    "evaluation.features": "Features TrainedEncoder extract load_encoder",
    "evaluation.knn": "knn_accuracy",
    "evaluation.probe": "probe_accuracy",
    "mixing.diagnostics": (
        "FalseParents NegativeMass ProxyAccuracy false_negatives_top false_parents "
        "matching_probability negative_mass proxy_accuracy synthetic_mass"
    ),
    "mixing.embedding_space": "alignment uniformity",
    "mixing.family": (
        "DENOMINATORS FILTERS WEIGHTS Denominator Masses NegativeFilter NegativeWeights "
        "above_positive debiased decoupled decoupled_weighted dual_temperature given_weights "
        "hardness_weights hcl hcl_weights ring_weights same_labels share_of_positive supcon_in"
    ),
    "mixing.gradient_cache": "backward_in_chunks",
    "mixing.infonce": "Contrast WeightLine contrast log_mass",
    "mixing.logits": "Embeddings Logits logits",
    "mixing.loss": "MochiLoss",
    "mixing.plans": (
        "KEY QUERY VECTOR HardestNegatives MixPlan hardest_negatives materialize plan_mochi"
    ),
    "mixing.queue": "MemoryQueue",
    "mixing.strategies": (
        "STRATEGIES Candidates Strategy dropped_negatives plan_beta_weighted "
        "plan_fixed_percentage plan_mixcse plan_mixed_with_key plan_points plan_softmax_sampled "
        "plan_synco"
    ),
    "mixing.transformations": "FeatureTransformation extrapolated_positives mixed_queue",
    "report.page": "write_report",
    "runs.folder": "Run",
    "runtime.device": "Compute choose_compute",
    "runtime.distributed": "gather",
    "runtime.own_code": "allow_code",
    "settings.recipes": "recipes",
    "settings.config": ("DataConfig ModelConfig PretrainConfig TrainConfig"),
    "settings.detection_options": "DetectionConfig",
    "settings.evaluation_options": "FinetuneConfig KnnOptions LinearConfig LinearOptions",
    "settings.loss_options": "LossConfig MixConfig",
    "settings.method_options": (
        "ByolOptions CmcOptions Co2Options InstDisOptions PclOptions PirlOptions SwavOptions"
        " UnmixOptions"
    ),
    "settings.optimizer_options": "OptimizerConfig",
    "settings.schedules": "decreasing mixing_started",
    "training.pretrain": "pretrain",
    "weights.export": "export",
    "weights.foreign": "import_weights",
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names.split()}

__all__ = [
    "DENOMINATORS",
    "FILTERS",
    "KEY",
    "QUERY",
    "STRATEGIES",
    "VECTOR",
    "WEIGHTS",
    "Accuracy",
    "Analysis",
    "ByolOptions",
    "Candidates",
    "CmcOptions",
    "Co2Options",
    "Compute",
    "Contrast",
    "DataConfig",
    "Denominator",
    "DetectionConfig",
    "Embeddings",
    "EvaluatedRun",
    "FalseParents",
    "FeatureTransformation",
    "Features",
    "FinetuneConfig",
    "HardestNegatives",
    "ImageSet",
    "InputError",
    "InstDisOptions",
    "KnnOptions",
    "LinearConfig",
    "LinearOptions",
    "Logits",
    "LossConfig",
    "Masses",
    "MemoryQueue",
    "MixConfig",
    "MixPlan",
    "MochiLoss",
    "ModelConfig",
    "NegativeFilter",
    "NegativeMass",
    "NegativeWeights",
    "OptimizerConfig",
    "OutputError",
    "PclOptions",
    "Picture",
    "PirlOptions",
    "PretrainConfig",
    "ProxyAccuracy",
    "Run",
    "Strategy",
    "SwavOptions",
    "TrainConfig",
    "TrainedEncoder",
    "UnfinishedError",
    "UnmixOptions",
    "UnreadableImage",
    "WeightLine",
    "__version__",
    "above_positive",
    "accuracy_of",
    "alignment",
    "allow_code",
    "analyze",
    "backward_in_chunks",
    "choose_compute",
    "contrast",
    "debiased",
    "decoupled",
    "decoupled_weighted",
    "decreasing",
    "draw_shapes",
    "dropped_negatives",
    "dual_temperature",
    "export",
    "extract",
    "extrapolated_positives",
    "false_negatives_top",
    "false_parents",
    "gather",
    "given_weights",
    "hardest_negatives",
    "hardness_weights",
    "hcl",
    "hcl_weights",
    "import_weights",
    "knn_accuracy",
    "load_encoder",
    "log_mass",
    "logits",
    "matching_probability",
    "materialize",
    "mixed_queue",
    "mixing_started",
    "negative_mass",
    "open_evaluated_run",
    "open_images",
    "plan_beta_weighted",
    "plan_fixed_percentage",
    "plan_mixcse",
    "plan_mixed_with_key",
    "plan_mochi",
    "plan_points",
    "plan_softmax_sampled",
    "plan_synco",
    "pretrain",
    "probe_accuracy",
    "proxy_accuracy",
    "recipes",
    "ring_weights",
    "same_labels",
    "share_of_positive",
    "supcon_in",
    "synthetic_mass",
    "uniformity",
    "write_report",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'hardmix' has no attribute {name!r}")
    home = import_module(f"hardmix.{_MODULE_OF[name]}")
    return globals().setdefault(name, home if name == "recipes" else getattr(home, name))


def __dir__() -> list[str]:
    return sorted(__all__)
