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
    from hardmix.mixing.denominators import (
        DENOMINATORS,
        Denominator,
        debiased,
        decoupled,
        dual_temperature,
        hcl,
        infonce,
        supcon_in,
    )
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
    from hardmix.mixing.filters import (
        FILTERS,
        NegativeFilter,
        above_positive,
        same_labels,
        share_of_positive,
    )
    from hardmix.mixing.gradient_cache import backward_in_chunks
    from hardmix.mixing.infonce import Contrast, contrast
    from hardmix.mixing.log_sums import WeightLine
    from hardmix.mixing.loss import MochiLoss
    from hardmix.mixing.masses import Masses
    from hardmix.mixing.negative_weights import (
        WEIGHTS,
        NegativeWeights,
        given_weights,
        hardness_weights,
        hcl_weights,
        ring_weights,
    )
    from hardmix.mixing.plans import (
        KEY,
        QUERY,
        VECTOR,
        Embeddings,
        HardestNegatives,
        MixPlan,
        Strategy,
        hardest_negatives,
        mix_pairs,
        mix_with_query,
        plan_mochi,
    )
    from hardmix.mixing.points import materialize
    from hardmix.mixing.queue import MemoryQueue
    from hardmix.mixing.synco import plan_mixcse, plan_synco
    from hardmix.mixing.transformations import (
        FeatureTransformation,
        extrapolated_positives,
        mixed_queue,
    )
    from hardmix.mixing.variants import (
        STRATEGIES,
        dropped_negatives,
        plan_beta_weighted,
        plan_fixed_percentage,
        plan_mixed_with_key,
        plan_ranked_by_key,
        plan_softmax_sampled,
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
    "mixing.denominators": (
        "DENOMINATORS Denominator debiased decoupled dual_temperature hcl infonce supcon_in"
    ),
    "mixing.diagnostics": (
        "FalseParents NegativeMass ProxyAccuracy false_negatives_top false_parents "
        "matching_probability negative_mass proxy_accuracy synthetic_mass"
    ),
    "mixing.embedding_space": "alignment uniformity",
    "mixing.filters": "FILTERS NegativeFilter above_positive same_labels share_of_positive",
    "mixing.gradient_cache": "backward_in_chunks",
    "mixing.infonce": "Contrast contrast",
    "mixing.log_sums": "WeightLine",
    "mixing.loss": "MochiLoss",
    "mixing.masses": "Masses",
    "mixing.negative_weights": (
        "WEIGHTS NegativeWeights given_weights hardness_weights hcl_weights ring_weights"
    ),
    "mixing.plans": (
        "KEY QUERY VECTOR Embeddings HardestNegatives MixPlan Strategy hardest_negatives mix_pairs "
        "mix_with_query plan_mochi"
    ),
    "mixing.points": "materialize",
    "mixing.queue": "MemoryQueue",
    "mixing.synco": "plan_mixcse plan_synco",
    "mixing.transformations": "FeatureTransformation extrapolated_positives mixed_queue",
    "mixing.variants": (
        "STRATEGIES dropped_negatives plan_beta_weighted plan_fixed_percentage "
        "plan_mixed_with_key plan_ranked_by_key plan_softmax_sampled"
    ),
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
    "infonce",
    "knn_accuracy",
    "load_encoder",
    "matching_probability",
    "materialize",
    "mix_pairs",
    "mix_with_query",
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
    "plan_ranked_by_key",
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
