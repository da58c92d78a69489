"""hardmix: contrastive pre-training with hard negative mixing (MoCHi, NeurIPS 2020).

Settings are in `hardmix.config`, strategies in `hardmix.strategies`, weights, filters and
denominators of the loss in `hardmix.losses`, searching image sets in `hardmix.explore`, and the
loss for other libraries in `hardmix.integrations`. Every public name is imported on first use, so
that `hardmix --help` needs no torch.
"""

from typing import TYPE_CHECKING

from hardmix.settings.lazy_names import lazy_names

if TYPE_CHECKING:
    from hardmix import (
        config as config,
        explore as explore,
        integrations as integrations,
        losses as losses,
        strategies as strategies,
    )
    from hardmix.analysis.analyze import analyze as analyze
    from hardmix.data.image_files import UnreadableImage as UnreadableImage
    from hardmix.data.image_set import ImageSet as ImageSet
    from hardmix.data.shapes import draw_shapes as draw_shapes
    from hardmix.data.sources import open_images as open_images
    from hardmix.errors import (
        InputError as InputError,
        OutputError as OutputError,
        UnfinishedError as UnfinishedError,
    )
    from hardmix.evaluation.accuracy import accuracy_of as accuracy_of
    from hardmix.evaluation.evaluated_run import open_evaluated_run as open_evaluated_run
    from hardmix.evaluation.features import extract as extract
    from hardmix.evaluation.knn import knn_accuracy as knn_accuracy
    from hardmix.evaluation.probe import probe_accuracy as probe_accuracy
    from hardmix.evaluation.trained_encoder import load_encoder as load_encoder
    from hardmix.mixing.diagnostics import (
        false_negatives_top as false_negatives_top,
        false_parents as false_parents,
        matching_probability as matching_probability,
        negative_mass as negative_mass,
        proxy_accuracy as proxy_accuracy,
        synthetic_mass as synthetic_mass,
    )
    from hardmix.mixing.embedding_space import (
        alignment as alignment,
        uniformity as uniformity,
    )
    from hardmix.mixing.gradient_cache import backward_in_chunks as backward_in_chunks
    from hardmix.mixing.infonce import (
        Contrast as Contrast,
        contrast as contrast,
    )
    from hardmix.mixing.loss import MochiLoss as MochiLoss
    from hardmix.mixing.plans import (
        KEY as KEY,
        QUERY as QUERY,
        HardestNegatives as HardestNegatives,
        MixPlan as MixPlan,
        hardest_negatives as hardest_negatives,
        materialize as materialize,
        plan_mochi as plan_mochi,
    )
    from hardmix.mixing.queue import MemoryQueue as MemoryQueue
    from hardmix.report.page import write_report as write_report
    from hardmix.runs.folder import Run as Run
    from hardmix.runs.summary import read_verdict as read_verdict
    from hardmix.runtime.distributed import gather as gather
    from hardmix.runtime.own_code import allow_code as allow_code
    from hardmix.settings import recipes as recipes
    from hardmix.settings.schedules import mixing_started as mixing_started
    from hardmix.training.pretrain import pretrain as pretrain
    from hardmix.weights.export import export as export
    from hardmix.weights.foreign import import_weights as import_weights

__version__ = "0.1.0"
"""The version of hardmix."""

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
